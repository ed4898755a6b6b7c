"""Starts real training runs for the e2e tests and reads what they left. No verl in this process."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_oppo.demo.child import ChildRun

RUN_TIMEOUT_S = 900
"""A run's bound: about two minutes of start-up on two free cores, several times that on a busy machine."""

RAY_DID_NOT_START = "The current node timed out during startup"
"""What Ray says when its daemons got too little of a busy machine for 30 s; nothing of the run has happened then."""

STOP = threading.Event()
"""Set when the session ends: runs that are still going are ended."""


@dataclass(frozen=True)
class Run:
    """A finished training run."""

    folder: Path
    status: int

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """verl's metrics, one dict a step, in order."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record["data"] for record in map(json.loads, lines) if "training/global_step" in record["data"]]

    def recorded(self, step: int) -> dict[str, Any]:
        """What `e2e_recorder.Recorder` wrote at this step's checkpoint."""
        return json.loads((self.folder / "checkpoints" / f"global_step_{step}" / "recorded.json").read_text())

    def trained_rows(self, step: int) -> dict[str, dict[str, Any]]:
        """The rows that this step trained: those with advantages that no earlier checkpoint recorded."""
        earlier: set[str] = set()
        for before in range(1, step):
            path = self.folder / "checkpoints" / f"global_step_{before}" / "recorded.json"
            if path.exists():
                rows = json.loads(path.read_text())["rows"]
                earlier |= {key for key, row in rows.items() if "advantages" in row}
        rows = self.recorded(step)["rows"]
        return {key: row for key, row in rows.items() if "advantages" in row and key not in earlier}


GetRun = Callable[[str], Run]


def train(
    folder: Path,
    overrides: Sequence[str],
    *,
    module: str = "verl_oppo.main_ppo",
    config: Sequence[str] = ("--config-name", "oppo_cpu"),
    env: dict[str, str] | None = None,
    timeout_s: float = RUN_TIMEOUT_S,
) -> Run:
    """Run a training command to its end, or end it after `timeout_s` seconds; its log and metrics are in `folder`.

    Once more, if Ray itself did not come up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", module),
        *config,
        f"hydra.run.dir={folder}/hydra",
        f"trainer.default_local_dir={folder}/checkpoints",
        "++ray_kwargs.ray_init.address=local",
        *overrides,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]]),
        "VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl",
        "HYDRA_FULL_ERROR": "1",
        **(env or {}),
    }
    run = run_to_end(command, folder, environment, timeout_s)
    if run.status != 0 and RAY_DID_NOT_START in run.log:
        run = run_to_end(command, folder, environment, timeout_s)
    return run


def run_to_end(command: Sequence[str], folder: Path, environment: dict[str, str], timeout_s: float) -> Run:
    child = ChildRun(command, folder / "log.txt", environment)
    deadline = time.monotonic() + timeout_s
    try:
        while child.poll() is None and time.monotonic() < deadline and not STOP.is_set():
            time.sleep(0.5)
    finally:
        status = child.end()
    return Run(folder, status)


def assert_finished(run: Run) -> None:
    """Fails with the end of the log."""
    assert run.status == 0, f"exit status {run.status}\n" + "\n".join(run.log.splitlines()[-60:])
