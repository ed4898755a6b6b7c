"""Training runs of the benchmark as child processes: started, watched, and recorded with how they ended.

A run that ended well leaves `run.json` and may be reused. Knows commands and folders, nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from verl_oppo import trace_file
from verl_oppo.benchmark.arms import hydra_string
from verl_oppo.demo.child import ChildRun
from verl_oppo.demo.child_log import errors
from verl_oppo.report.metrics_file import METRICS, RECORD

LOG = "train.log"
POLL_S = 0.2


@dataclass(frozen=True)
class RunSpec:
    """One run: its arm and repeat, its folder, and all arguments beside those that name the folder."""

    arm: str
    repeat: int
    folder: Path
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.arm}, repeat {self.repeat}"

    def command(self) -> list[str]:
        own = [
            'trainer.logger=["console","file"]',
            f"trainer.default_local_dir={hydra_string(self.folder / 'checkpoints')}",
            f"hydra.run.dir={hydra_string(self.folder / 'hydra')}",
            "++ray_kwargs.ray_init.address=local",
        ]
        return [sys.executable, "-u", "-m", "verl_oppo.main_ppo", *self.arguments, *own]


@dataclass
class RunResult:
    """How a run ended. `failure` is None for one that ended well."""

    arm: str
    repeat: int
    folder: str
    arguments: list[str]
    failure: str | None
    seconds: float | None = None
    """From the start of the process to its end."""
    stolen: float | None = None
    """Share of the machine's CPU time that its hypervisor gave to others meanwhile; None where the system is silent."""


def finished_result(spec: RunSpec) -> RunResult | None:
    """The result of an earlier run of exactly this spec that ended well; None if there is none."""
    path = spec.folder / RECORD
    if not path.is_file():
        return None
    # A record of another version may say more.
    known = {field.name for field in fields(RunResult)}
    result = RunResult(**{name: value for name, value in json.loads(path.read_text()).items() if name in known})
    return result if result.failure is None and result.arguments == list(spec.arguments) else None


class _Running:
    """A child and where it stands. Invariant: `result` is set once, after the child and all it started have ended."""

    def __init__(self, spec: RunSpec, timeout_s: float) -> None:
        if spec.folder.exists():
            shutil.rmtree(spec.folder)
        spec.folder.mkdir(parents=True)
        self.spec = spec
        self.result: RunResult | None = None
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        self._cpu = psutil.cpu_times()
        environment = {
            **os.environ,
            "VERL_FILE_LOGGER_PATH": str(spec.folder / METRICS),
            trace_file.VARIABLE: str(spec.folder),
        }
        self._child = ChildRun(spec.command(), spec.folder / LOG, environment)

    def poll(self) -> None:
        """Looks whether it has ended or must be ended."""
        status = self._child.poll()
        if status is None and time.monotonic() - self._started < self._timeout_s:
            return
        ended = time.monotonic()
        late = status is None
        self._child.end()
        failure = None
        if late:
            failure = f"not done after {self._timeout_s:.0f} s"
        elif status != 0:
            log = (self.spec.folder / LOG).read_text(errors="replace").splitlines()
            failure = "; ".join([f"exit status {status}", *errors(log)])
        self._record(failure, ended)

    def stop(self) -> None:
        """Ends it because the benchmark ends."""
        if self.result is None:
            self._child.end()
            self._record("the benchmark was stopped", time.monotonic())

    def _record(self, failure: str | None, ended: float) -> None:
        spec, seconds = self.spec, ended - self._started
        stolen = stolen_share(self._cpu, psutil.cpu_times())
        self.result = RunResult(spec.arm, spec.repeat, str(spec.folder), list(spec.arguments), failure, seconds, stolen)
        for leftover in ("checkpoints", "hydra"):
            shutil.rmtree(spec.folder / leftover, ignore_errors=True)
        (spec.folder / RECORD).write_text(json.dumps(asdict(self.result), indent=1))


def stolen_share(before: Any, after: Any) -> float | None:
    """Between two readings of `psutil.cpu_times`; None where they do not tell stolen time, or no time went by."""
    if not hasattr(after, "steal"):
        return None
    # Linux counts a guest's time in its user time too.
    names = [name for name in after._fields if not name.startswith("guest")]
    total = sum(getattr(after, name) - getattr(before, name) for name in names)
    return (after.steal - before.steal) / total if total > 0 else None


def run_all(
    specs: Sequence[RunSpec], *, resume: bool, timeout_s: float, at_once: int, say: Callable[[str], None]
) -> list[RunResult]:
    """Runs the specs in their order, `at_once` at a time: 1 where time is measured, since an idle run takes some too.

    `timeout_s` bounds each run. Whatever happens, no child outlives this call.
    """
    results: dict[RunSpec, RunResult] = {}
    waiting: list[RunSpec] = []
    for spec in specs:
        result = finished_result(spec) if resume else None
        if result is None:
            waiting.append(spec)
        else:
            results[spec] = result
            say(f"{spec.name}: reused")
    going: list[_Running] = []
    try:
        while waiting or going:
            while waiting and len(going) < at_once:
                say(f"{waiting[0].name}: starting")
                going.append(_Running(waiting.pop(0), timeout_s))
            for running in list(going):
                running.poll()
                if running.result is not None:
                    going.remove(running)
                    results[running.spec] = running.result
                    say(f"{running.spec.name}: {_end_in_words(running.result)}")
            time.sleep(POLL_S)
    finally:
        for running in going:
            running.stop()
    return [results[spec] for spec in specs]


def _end_in_words(result: RunResult) -> str:
    return f"done in {result.seconds:.0f} s" if result.failure is None else f"FAILED: {result.failure[:600]}"
