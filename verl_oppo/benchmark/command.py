"""The benchmark's command: arms of the same work, interleaved over repeats, then summary, table and report.

    python scripts/benchmark.py --preset cpu --arms sync_fast_poll,colocate_async_fast_poll,inter,oppo --out OUT
    python scripts/benchmark.py --preset cpu --work constant --arms sync_fast_poll,oppo --out OUT
    python scripts/benchmark.py --convergence --seeds 3 --out OUT

OUT gets `summary.json`, `steps.jsonl` (every step of every run, raw), `table.md`, the report (`report.html` and PNGs)
and one folder a run with its log and metrics. A run that fails is named and left out of every figure, and the command
ends with status 1. Called by scripts/benchmark.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from verl_oppo.benchmark import convergence
from verl_oppo.benchmark.arms import LAYOUTS, Preset, arm_names, presets, replay_arguments
from verl_oppo.benchmark.machine import machine, versions
from verl_oppo.benchmark.runs import RunResult, RunSpec, run_all
from verl_oppo.benchmark.summary import summarize, table, write_steps
from verl_oppo.benchmark.work import KINDS, write_work
from verl_oppo.report.page import write_report

DEMO_CONFIG = "--config-name=oppo_cpu"
DEFAULT_ARMS = "sync_fast_poll,colocate_async_fast_poll,inter,oppo"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python scripts/benchmark.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="cpu", choices=[name for name in presets() if name != convergence.PRESET])
    parser.add_argument(
        "--arms",
        default="",
        help=f"in this order, of {', '.join(LAYOUTS)} (default: {DEFAULT_ARMS}); "
        f"with --convergence of {', '.join(convergence.ARMS)} (default: all)",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", default="long_tail", choices=KINDS, help="the list of response lengths")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1, help="of the first repeat; each further one adds 1")
    parser.add_argument("--steps", type=int, help="a run, instead of the preset's")
    parser.add_argument("--prompts", type=Path, help="data set of prompts (default: the demo's)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds a run may take, start-up included")
    parser.add_argument("--resume", action="store_true", help="reuse what ended well in OUT with the same arguments")
    parser.add_argument("--convergence", action="store_true", help="does it learn the same, instead of how fast")
    parser.add_argument("--seeds", type=int, default=3, help="of --convergence")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time with --convergence; others go alone")
    parser.add_argument("overrides", nargs="*", help="arguments for every run, after all others")
    options = parser.parse_args(argv)
    for name in ("repeats", "seeds", "at_once"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; allowed: 1 or more")
    return options


def say(message: str) -> None:
    print(f"[benchmark {time.strftime('%H:%M:%S')}] {message}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Exit status: 0; 1 if a run failed; 2 for bad arguments."""
    options = parse(argv)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if options.convergence:
        return convergence.main(options, out, demo_prompts, say)
    preset = Preset.load(options.preset).with_steps(options.steps)
    specs = plan(options, preset, out)
    say(f"{len(specs)} runs in {out}")
    results = run_all(specs, resume=options.resume, timeout_s=options.timeout, at_once=1, say=say)
    return conclude(options, preset, results, out)


def plan(options: argparse.Namespace, preset: Preset, out: Path) -> list[RunSpec]:
    """One run for each arm and repeat, the arms interleaved; writes the repeats' work files.

    Raises:
        ValueError: an arm, preset or work does not exist, or prompts are missing.
    """
    arms = arm_names(options.arms or DEFAULT_ARMS)
    lengths = preset.lengths(options.work)
    arguments = {arm: preset.arguments(arm) for arm in arms}
    if options.prompts is None and DEMO_CONFIG not in next(iter(arguments.values()), []):
        raise ValueError(f"--prompts is not given; allowed with preset {preset.name}: a data set in verl's format")
    prompts = options.prompts or demo_prompts()
    specs = []
    for repeat in range(options.repeats):
        seed = options.seed + repeat
        work_file = out / f"work-{options.work}-{seed}.parquet"
        write_work(prompts, lengths.draw(preset.num_prompts, seed), work_file)
        for arm in arms:
            whole = (*arguments[arm], *replay_arguments(work_file, seed), *options.overrides)
            specs.append(RunSpec(arm, repeat, out / f"{arm}-{repeat}", whole))
    return specs


def demo_prompts() -> Path:
    """The demo's training prompts, made in a process of their own since that needs torch.

    Raises:
        RuntimeError: they could not be made.
    """
    done = subprocess.run([sys.executable, "-m", "verl_oppo.demo.assets"], capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise RuntimeError(f"the demo's assets could not be made:\n{done.stderr[-2000:]}")
    return Path(json.loads(done.stdout)["train_file"])


def conclude(
    options: argparse.Namespace,
    preset: Preset,
    results: Sequence[RunResult],
    out: Path,
) -> int:
    """Writes what the runs say."""
    stated = {
        "preset": preset.name,
        "steps": preset.steps,
        "measured_steps": [preset.measured_steps.start, preset.measured_steps.stop - 1],
        "repeats": options.repeats,
        "seed": options.seed,
        "work": preset.lengths(options.work).stated([options.seed + repeat for repeat in range(options.repeats)]),
        "overrides": list(options.overrides),
        "arguments": {arm: preset.arguments(arm) for arm in dict.fromkeys(result.arm for result in results)},
    }
    summary = summarize(results, preset, options.work)
    summary |= {"settings": stated, "machine": machine(), "versions": versions()}
    (out / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False))
    write_steps(results, out / "steps.jsonl")
    text = table(summary)
    (out / "table.md").write_text(text)
    print(text)
    folders = [Path(result.folder) for result in results if result.failure is None]
    if folders:
        say(f"report: {write_report(folders, out)}")
    say(f"summary: {out / 'summary.json'}")
    return 1 if summary["failures"] else 0
