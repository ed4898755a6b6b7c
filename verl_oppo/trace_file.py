"""Files of JSON lines beside a run's metrics, for what a metric cannot say: time spans and single trajectories.

Written by the trainer and by the benchmark's agent loop and samplers where the environment names a folder, and nowhere
else; read by the report and the benchmark. Any process of the run may write, each into a file of its own kind.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "VERL_OPPO_TRACE"
"""The folder; absent where nobody asks for traces."""
SPANS = "spans.jsonl"
"""A line a step: `step`; `sample`: begin and end of sampling; `scorers`: name -> [kind, begin, end]. Wall-clock s."""
TRAJECTORIES = "trajectories.jsonl"
"""A line a trained trajectory: see `trainer/trace.py`."""
ROLLOUTS = "rollouts.jsonl"
"""A line a response of the benchmark's agent loop: `uid`, `length` in tokens, `started` and `ended` (wall clock, s)."""


class TraceFile:
    """Invariant: a line is written at once and whole, so that lines of several processes do not mix."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, *records: Mapping[str, Any]) -> None:
        lines = "".join(f"{json.dumps(record)}\n" for record in records).encode()
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, lines)
        finally:
            os.close(handle)


def trace_file(name: str) -> TraceFile | None:
    """The file of this run; None where nobody asks for traces."""
    folder = os.environ.get(VARIABLE)
    return _open(folder, name) if folder else None


@functools.cache
def _open(folder: str, name: str) -> TraceFile:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return TraceFile(Path(folder) / name)
