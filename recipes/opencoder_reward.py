"""Reward of the OpenCoder recipe: the share of a task's assertions that the written code passes.

Named in `reward.custom_reward_function`; verl's reward loop calls `compute_score` for each response. The code runs in a
process of its own, limited in time, memory and output, but in no sandbox: run it where it can do no harm.
"""

import json
import re
import resource
import subprocess
import sys
from typing import Any

TIMEOUT_S = 10
MEMORY_BYTES = 1 << 30
CODE_BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
RUNNER = """
import json, sys
given = json.load(sys.stdin)
passed = 0
space = {"__name__": "solution"}
exec(given["code"], space)
for test in given["tests"]:
    try:
        exec(test, space)
        passed += 1
    except Exception:
        pass
print("\\n" + given["mark"] + str(passed))
"""
MARK = "passed: "


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """Share of passed assertions, 0 to 1; 0 without a block of code, on an error in it, or past the limits.

    Args:
        solution_str: the response.
        ground_truth: JSON list of assert statements.
    """
    blocks = CODE_BLOCK.findall(solution_str)
    tests = json.loads(ground_truth)
    if not blocks or not tests:
        return 0.0
    return _passed(blocks[-1], tests) / len(tests)


def _passed(code: str, tests: list[str]) -> int:
    given = json.dumps({"code": code, "tests": tests, "mark": MARK})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", RUNNER],
            input=given,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            preexec_fn=_limit,
        )
    except subprocess.TimeoutExpired:
        return 0
    last = done.stdout.rpartition("\n" + MARK)[2].strip()
    return int(last) if done.returncode == 0 and last.isdigit() else 0


def _limit() -> None:
    """In the child, before it becomes Python: no more memory, processor time or file size than this."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (TIMEOUT_S, TIMEOUT_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
