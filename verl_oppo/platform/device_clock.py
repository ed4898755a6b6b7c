"""Makes model steps last as long as an emulated device needs, by sleeping, and counts those that took longer for real.

Used by `emulated`, one clock per process that stands for a device, and by `emulated_run`, which adds up what they all
counted. The processes of one device see each other through a small memory-mapped file each, in a folder of the run:
seconds they have been busy, and since when they are. It does not know what a step computes.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import psutil

from verl_oppo.platform.cost_model import shared_progress_s

KINDS = ("decode", "prefill", "train", "sync")
IDLE = -1.0
"""In place of the time when a step started: there is none."""
CLOSE_ENOUGH_S = 1e-4
"""A sleep shorter than this is not worth its overhead."""

_numbers = itertools.count()


@dataclass
class Totals:
    """Steps of one kind since the run began."""

    steps: float = 0.0
    overruns: float = 0.0
    """Steps that took longer in reality than on the emulated device."""
    overrun_s: float = 0.0
    """By how much, all together."""
    real_s: float = 0.0
    """What the steps took before any sleep."""
    emulated_s: float = 0.0
    """What they lasted with it."""

    def add(self, other: Totals) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class DeviceRecord:
    """What one process says of itself to the others on its device, in a file of fixed size.

    Only its own process writes it. Invariant: a reader sees a state that was true at one time.
    """

    _BUSY = struct.Struct("<dd")
    _TOTALS = struct.Struct(f"<{len(fields(Totals))}d")
    SIZE = _BUSY.size + len(KINDS) * _TOTALS.size

    def __init__(self, path: Path, create: bool = False) -> None:
        """Opens the file; `create` makes it, empty."""
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_bytes(self._BUSY.pack(0.0, IDLE) + bytes(self.SIZE - self._BUSY.size))
            part.rename(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self.SIZE)

    def set_busy(self, total_s: float, since: float | None) -> None:
        """`total_s` of finished steps, and when the present one started; None if there is none."""
        self._BUSY.pack_into(self._map, 0, total_s, IDLE if since is None else since)

    def busy_s(self, now: float) -> float:
        """Seconds with a step running, up to now."""
        total_s, since = self._steady(self._BUSY, 0)
        return total_s + (0.0 if since == IDLE else max(0.0, now - since))

    def add(self, kind: str, totals: Totals) -> None:
        summed = self.totals(kind)
        summed.add(totals)
        self._TOTALS.pack_into(self._map, self._offset(kind), *astuple(summed))

    def totals(self, kind: str) -> Totals:
        return Totals(*self._steady(self._TOTALS, self._offset(kind)))

    def _offset(self, kind: str) -> int:
        return self._BUSY.size + KINDS.index(kind) * self._TOTALS.size

    def _steady(self, layout: struct.Struct, offset: int) -> tuple[float, ...]:
        """Two equal readings in a row: a writer in between shows."""
        before = self._map[offset : offset + layout.size]
        while (after := self._map[offset : offset + layout.size]) != before:
            before = after
        return layout.unpack(after)


@dataclass(frozen=True)
class Step:
    """A model step in progress."""

    started: float
    others: tuple[DeviceRecord, ...]
    others_busy_s: float
    """What the others had been busy when it started, all together."""


class DeviceClock:
    """One process of one device. Its steps follow each other.

    Invariant: a step that is finished has lasted at least its cost, and longer by what the others on the device slowed
    it; the process sleeps for the difference and keeps nothing busy meanwhile.
    """

    def __init__(
        self,
        folder: Path,
        share_factor: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`folder` is the device's; `clock` must be the same in all processes of the machine."""
        self._folder = folder
        self._share_factor = share_factor
        self._clock, self._sleep = clock, sleep
        self._name = f"{os.getpid()}.{next(_numbers)}"
        self._record = DeviceRecord(folder / self._name, create=True)
        self._others: dict[str, DeviceRecord] = {}
        self._busy_s = 0.0
        self._current: Step | None = None

    @contextmanager
    def step(self, kind: str, cost_s: float) -> Iterator[None]:
        """The body is one model step. If it fails nothing is waited for."""
        step = self.begin()
        try:
            yield
        except BaseException:
            self.abandon(step)
            raise
        self.finish(step, kind, cost_s)

    def begin(self) -> Step:
        assert self._current is None, "a model step began within another one of the same process"
        others = self._living_others()
        now = self._clock()
        self._current = Step(now, others, sum(other.busy_s(now) for other in others))
        self._record.set_busy(self._busy_s, now)
        return self._current

    def finish(self, step: Step, kind: str, cost_s: float) -> None:
        """Sleeps until the step has lasted `cost_s` seconds of undisturbed work."""
        real_s = self._clock() - step.started
        overrun_s = max(0.0, self._progress_s(step) - cost_s)
        while (remaining_s := cost_s - self._progress_s(step)) > CLOSE_ENOUGH_S:
            self._sleep(remaining_s)
        lasted_s = self._close(step)
        self._record.add(kind, Totals(1, float(overrun_s > 0), overrun_s, real_s, lasted_s))

    def abandon(self, step: Step) -> None:
        """Ends a step that failed."""
        self._close(step)

    def _close(self, step: Step) -> float:
        assert step is self._current, "the model step that ends is not the one that began"
        lasted_s = self._clock() - step.started
        self._busy_s += lasted_s
        self._record.set_busy(self._busy_s, None)
        self._current = None
        return lasted_s

    def _progress_s(self, step: Step) -> float:
        now = self._clock()
        overlap_s = sum(other.busy_s(now) for other in step.others) - step.others_busy_s
        return shared_progress_s(now - step.started, overlap_s, self._share_factor)

    def _living_others(self) -> tuple[DeviceRecord, ...]:
        """Records of the other processes on the device; one that died in a step would count as busy for ever."""
        living = {}
        for path in record_files(self._folder):
            if path.name != self._name and psutil.pid_exists(int(path.stem)):
                living[path.name] = self._others.get(path.name) or DeviceRecord(path)
        self._others = living
        return tuple(living.values())


def record_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix != ".part"]


def read_totals(run_folder: Path) -> dict[str, dict[str, Totals]]:
    """Totals by kind of each device of the run, its processes added up; devices are folders of `run_folder`."""
    devices: dict[str, dict[str, Totals]] = {}
    for device in sorted(run_folder.iterdir()):
        by_kind = devices.setdefault(device.name, {kind: Totals() for kind in KINDS})
        for path in record_files(device):
            record = DeviceRecord(path)
            for kind in KINDS:
                by_kind[kind].add(record.totals(kind))
    return devices
