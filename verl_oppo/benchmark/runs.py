"""Training runs of the benchmark as child processes: started, gated, watched, and recorded with how they ended.

Start-up is mostly imports, so two runs start at once; the gate of the benchmark's agent loop (`gate.py`)
then lets one train while the other waits idle. A run that ended well leaves `run.json` and may be reused. Knows
commands and folders, nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_oppo import trace_file
from verl_oppo.benchmark.arms import hydra_string
from verl_oppo.benchmark.gate import GATE_VARIABLE, GO, READY
from verl_oppo.demo.child import ChildRun
from verl_oppo.demo.child_log import errors

METRICS, LOG, RECORD = "metrics.jsonl", "train.log", "run.json"
POLL_S = 0.2


@dataclass(frozen=True)
class RunSpec:
    """One run: its arm and repeat, its folder, and all arguments beside those that name the folder."""

    arm: str
    repeat: int
    folder: Path
    arguments: tuple[str, ...]
    gated: bool = True

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
    startup_s: float | None = None
    """From the start of the process to the first rollout."""
    training_s: float | None = None
    """From the gate's opening to the end of the process."""


def finished_result(spec: RunSpec) -> RunResult | None:
    """The result of an earlier run of exactly this spec that ended well; None if there is none."""
    path = spec.folder / RECORD
    if not path.is_file():
        return None
    result = RunResult(**json.loads(path.read_text()))
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
        self._ready_s: float | None = None
        self._released: float | None = None
        environment = {
            **os.environ,
            "VERL_FILE_LOGGER_PATH": str(spec.folder / METRICS),
            trace_file.VARIABLE: str(spec.folder),
        }
        if spec.gated:
            environment[GATE_VARIABLE] = str(spec.folder)
        self._child = ChildRun(spec.command(), spec.folder / LOG, environment)
        if not spec.gated:
            self.release()

    @property
    def released(self) -> bool:
        return self._released is not None

    def release(self) -> None:
        """Lets the run train."""
        self._released = time.monotonic()
        (self.spec.folder / GO).touch()

    def is_ready(self) -> bool:
        ready = (self.spec.folder / READY).exists()
        if ready and self._ready_s is None:
            self._ready_s = time.monotonic() - self._started
        return ready

    def poll(self) -> None:
        """Looks whether it has ended or must be ended."""
        status = self._child.poll()
        self.is_ready()
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
        spec = self.spec
        training_s = None if self._released is None else ended - self._released
        self.result = RunResult(
            spec.arm, spec.repeat, str(spec.folder), list(spec.arguments), failure, self._ready_s, training_s
        )
        for leftover in ("checkpoints", "hydra"):
            shutil.rmtree(spec.folder / leftover, ignore_errors=True)
        (spec.folder / RECORD).write_text(json.dumps(asdict(self.result), indent=1))


def run_all(
    specs: Sequence[RunSpec], *, resume: bool, timeout_s: float, at_once: int, say: Callable[[str], None]
) -> list[RunResult]:
    """Runs the specs in their order, `at_once` at a time started up and, if gated, one at a time training.

    `timeout_s` bounds each run, its wait for the gate included. Whatever happens, no child outlives this call.
    """
    results: dict[RunSpec, RunResult] = {}
    waiting = list(specs)
    if resume:
        for spec in specs:
            if (result := finished_result(spec)) is not None:
                results[spec] = result
                waiting.remove(spec)
                say(f"{spec.name}: reused")
    while waiting:
        group, waiting = waiting[:at_once], waiting[at_once:]
        say(f"starting {' and '.join(spec.name for spec in group)}")
        for running in _run_group(group, timeout_s, say):
            assert running.result is not None
            results[running.spec] = running.result
    return [results[spec] for spec in specs]


def _run_group(specs: Sequence[RunSpec], timeout_s: float, say: Callable[[str], None]) -> list[_Running]:
    group: list[_Running] = []
    try:
        group += [_Running(spec, timeout_s) for spec in specs]
        while any(running.result is None for running in group):
            for running in group:
                if running.result is None:
                    running.poll()
                    if running.result is not None:
                        say(_ended_words(running.result))
            alive = [running for running in group if running.result is None]
            training = [running for running in alive if running.released]
            # Start-up takes a whole core or two: nobody trains until all have started.
            if alive and not training and all(running.is_ready() for running in alive):
                alive[0].release()
                say(f"{alive[0].spec.name}: training")
            time.sleep(POLL_S)
    finally:
        for running in group:
            running.stop()
    return group


def _ended_words(result: RunResult) -> str:
    if result.failure is not None:
        return f"{result.arm}, repeat {result.repeat}: FAILED: {result.failure[:600]}"
    started = "" if result.startup_s is None else f"{result.startup_s:.0f} s to start, "
    return f"{result.arm}, repeat {result.repeat}: done ({started}{result.training_s:.0f} s to train and end)"
