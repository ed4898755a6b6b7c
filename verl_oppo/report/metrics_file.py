"""Reads the files of a run that may be going, broken off, old or empty: what can be read is read, the rest is counted.

Called by the report and the benchmark. Knows the form of verl's file logger (verl/utils/tracking.py, FileLogger: one
JSON object ``{"step": int, "data": {metric: value}}`` a line) and of our traces (`trace_file.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_oppo.trace_file import ROLLOUTS, SPANS, TRAJECTORIES

METRICS = "metrics.jsonl"
RECORD = "run.json"
"""Of a run that the benchmark started: `arm`, among others."""


@dataclass
class Lines:
    """The JSON objects of a file of lines, and what was no such object.

    Attributes:
        broken: complete lines that hold none.
        is_half_written: whether the last line has no end, as in a run that is going or was killed; it is not read.
    """

    objects: list[dict[str, Any]] = field(default_factory=list)
    broken: int = 0
    is_half_written: bool = False
    is_missing: bool = False


def read_lines(path: Path) -> Lines:
    if not path.is_file():
        return Lines(is_missing=True)
    *complete, rest = path.read_bytes().split(b"\n")
    lines = Lines(is_half_written=bool(rest.strip()))
    for line in complete:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            lines.objects.append(value)
        else:
            lines.broken += 1
    return lines


@dataclass
class RunFiles:
    """What a run left. Invariant: `steps` holds each training step once, its last record, in order."""

    name: str
    arm: str
    """What the run is a repeat of; its name, unless the benchmark noted an arm."""
    folder: Path
    steps: list[tuple[int, Mapping[str, Any]]]
    spans: dict[int, dict[str, Any]]
    trajectories: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    remarks: list[str]
    """What was wrong with the files, in words."""

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric where a step has it as a finite number."""
        found = [(step, data[key]) for step, data in self.steps if is_number(data.get(key))]
        return [step for step, _ in found], [float(value) for _, value in found]

    @property
    def label(self) -> str:
        """Its name in a picture, where an emulated clock must show."""
        return self.name + self._clock

    @property
    def arm_label(self) -> str:
        """Its arm in a picture, likewise."""
        return self.arm + self._clock

    @property
    def _clock(self) -> str:
        return " (EMULATED)" if self.is_emulated else ""

    @property
    def is_emulated(self) -> bool:
        return any(is_number(data.get("oppo/emulated")) and data["oppo/emulated"] for _, data in self.steps)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_run(folder: Path, name: str | None = None) -> RunFiles:
    """Reads a run's folder, or the folder of a metrics file that is named itself; never raises for what is in them.

    Raises:
        ValueError: the path does not exist.
    """
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; allowed: the folder of a run or its metrics file")
    metrics = folder if folder.is_file() else folder / METRICS
    lines = read_lines(metrics)
    remarks = list(_remarks(metrics.name, lines))
    steps: dict[int, Mapping[str, Any]] = {}
    strange = 0
    for record in lines.objects:
        step, data = record.get("step"), record.get("data")
        if isinstance(step, int) and isinstance(data, dict):
            if is_number(data.get("timing_s/step")) or is_number(data.get("perf/time_per_step")):
                steps[step] = data
        else:
            strange += 1
    if strange:
        remarks.append(f"{strange} line{'s' if strange > 1 else ''} of {metrics.name} hold no record of a step")
    home = metrics.parent
    name = name or home.name
    return RunFiles(
        name=name,
        arm=_arm(home / RECORD) or name,
        folder=home,
        steps=sorted(steps.items()),
        spans={line["step"]: line for line in _trace(home / SPANS, remarks, is_span)},
        trajectories=list(_trace(home / TRAJECTORIES, remarks, is_trajectory)),
        rollouts=list(_trace(home / ROLLOUTS, remarks, is_rollout)),
        remarks=remarks,
    )


def _arm(path: Path) -> str | None:
    try:
        arm = json.loads(path.read_bytes())["arm"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return arm if isinstance(arm, str) and arm else None


def _trace(path: Path, remarks: list[str], is_valid: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    lines = read_lines(path)
    if lines.is_missing:
        return
    valid = [line for line in lines.objects if is_valid(line)]
    lines.broken += len(lines.objects) - len(valid)
    remarks += _remarks(path.name, lines)
    yield from valid


def is_span(line: Mapping[str, Any]) -> bool:
    sample, scorers = line.get("sample"), line.get("scorers")
    return (
        isinstance(line.get("step"), int)
        and isinstance(sample, list)
        and len(sample) == 2
        and all(is_number(time) for time in sample)
        and isinstance(scorers, dict)
        and all(isinstance(spans, list) and all(_is_interval(span) for span in spans) for spans in scorers.values())
    )


def _is_interval(span: Any) -> bool:
    return isinstance(span, list) and len(span) == 3 and is_number(span[1]) and is_number(span[2])


def is_trajectory(line: Mapping[str, Any]) -> bool:
    numbers = ("step", "submitted_step", "first_token_step", "length", "stale")
    return all(is_number(line.get(name)) for name in numbers) and isinstance(line.get("key"), str)


def is_rollout(line: Mapping[str, Any]) -> bool:
    return all(is_number(line.get(name)) for name in ("length", "started", "ended"))


def _remarks(name: str, lines: Lines) -> Iterator[str]:
    if lines.is_missing:
        yield f"{name} does not exist"
    elif not lines.objects and not lines.broken and not lines.is_half_written:
        yield f"{name} is empty"
    if lines.broken:
        yield f"{lines.broken} line{'s' if lines.broken > 1 else ''} of {name} could not be read"
    if lines.is_half_written:
        yield f"the last line of {name} is half written and was left out"
