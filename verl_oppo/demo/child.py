"""A training run as a child process that can always be ended with all that it started.

Called by demo/run.py. Knows nothing of verl; of Ray only that its daemons leave the process group of the driver, so
that ending the group alone may leave some behind.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

NOTE_EVERY_S = 2.0  # Taking note looks at every process of the machine, some 10 ms.


class ChildRun:
    """A command in its own process group, its output in a file.

    Invariant: after ``end`` neither the command nor any descendant that ``poll`` or ``end`` has noted is alive.
    """

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]):
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        self._descendants: set[psutil.Process] = set()
        self._note_at = 0.0

    def poll(self) -> int | None:
        """Exit status, None while it runs; takes note of its descendants, but not oftener than NOTE_EVERY_S."""
        now = time.monotonic()
        if now >= self._note_at:
            self._note_at = now + NOTE_EVERY_S
            self._note_descendants()
        return self._process.poll()

    def _note_descendants(self) -> None:
        try:
            self._descendants.update(psutil.Process(self._process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            pass  # It has ended; what it started is known from the polls before.

    def end(self, grace_s: float = 20.0) -> int:
        """Ends the command and its descendants: SIGINT, then SIGTERM, then SIGKILL, ``grace_s`` seconds apart at most.

        Returns:
            The exit status of the command, negative for a signal.
        """
        self._note_descendants()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                break
            os.killpg(self._process.pid, signum)
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                continue
        self._end_descendants(grace_s)
        return self._process.wait(grace_s)

    def _end_descendants(self, grace_s: float) -> None:
        """Ray's own shutdown takes a few seconds, so the first wait sends nothing."""
        alive = _wait(self._descendants, grace_s / 2)
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for process in alive:
                try:
                    process.send_signal(signum)
                except psutil.NoSuchProcess:
                    continue
            alive = _wait(alive, grace_s / 2)


def _wait(processes: set[psutil.Process], timeout_s: float) -> set[psutil.Process]:
    """Those still alive after ``timeout_s``. A zombie that no one reaps counts as ended."""
    deadline = time.monotonic() + timeout_s
    while True:
        alive = {process for process in processes if _alive(process)}
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.1)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
