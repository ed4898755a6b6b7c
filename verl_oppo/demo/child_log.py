"""Finds in the output of a training run what a person wants to know: what it does now, and why it failed.

Called by demo/run.py on the lines of the log. Pure functions on text, which know no more than the form of the messages
of Ray, Hydra and Python.
"""

import re
from collections.abc import Sequence

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Ray puts "(TaskRunnerV1 pid=123)" or "(... pid=123, ip=...)" before what another process prints.
_RAY_PREFIX = re.compile(r"^\(.*?\bpid=\d+[^)]*\)\s?")
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?:\([\w.]*\))?(?::|$)")
_HYDRA_ERROR = re.compile(
    r"^(Could not override|Could not load|Cannot find primary config|Error parsing override|In '.*': )"
)
_TOTAL_STEPS = re.compile(r"Total training steps: (\d+)|Training Progress:.*?\| *\d+/(\d+) ")


def clean_line(line: str) -> str:
    """The line without colours, without Ray's process prefix, and of a progress bar only its last state."""
    line = _ANSI.sub("", line).rstrip("\r\n").rsplit("\r", 1)[-1]
    return _RAY_PREFIX.sub("", line).rstrip()


def last_words(lines: Sequence[str], width: int = 100) -> str:
    """The last line that says something, cut to ``width`` characters; empty when there is none."""
    for line in reversed(lines):
        cleaned = clean_line(line).strip()
        if cleaned:
            return cleaned if len(cleaned) <= width else cleaned[: width - 3] + "..."
    return ""


def total_steps(text: str) -> int | None:
    """The number of training steps that verl announced (trainer_base.py: its log line or its progress bar)."""
    found = None
    for match in _TOTAL_STEPS.finditer(text):
        found = match
    return None if found is None else int(found.group(1) or found.group(2))


def errors(lines: Sequence[str]) -> tuple[str, ...]:
    """The first error in the log and the last one: a single entry where they are the same, none where none is found.

    An error is the line that closes a traceback, or Hydra's message about a wrong override. Ray repeats the error of an
    actor in each caller's traceback and wraps it (RayTaskError, whose own line says nothing): the wrapper counts only
    where it stands alone.
    """
    found, wrapped, in_traceback = [], [], False
    for line in map(clean_line, lines):
        if line.startswith("Traceback (most recent call last)"):
            in_traceback = True
        elif _HYDRA_ERROR.match(line):
            found.append(line)
        elif in_traceback and _ERROR.match(line):
            (wrapped if "RayTaskError(" in line else found).append(line)
    chosen = found or wrapped
    if not chosen:
        return ()
    return (chosen[0],) if chosen[0] == chosen[-1] else (chosen[0], chosen[-1])
