"""The clock of an emulated device, in fake time but for one real sleep: what a step lasts, and what is counted."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_oppo.platform.device_clock import CLOSE_ENOUGH_S, DeviceClock, DeviceRecord, Totals, read_totals


class FakeTime:
    """Time that passes only by sleeping; `events` happen at their times, in the middle of sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = 0
        self.events: list[tuple[float, Callable[[], object]]] = []

    def pass_to(self, end: float) -> None:
        for event in [event for event in sorted(self.events, key=lambda event: event[0]) if event[0] <= end]:
            self.events.remove(event)
            self.now = max(self.now, event[0])
            event[1]()
        self.now = max(self.now, end)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps += 1
        self.pass_to(self.now + seconds)

    def clock(self, folder: Path, share_factor: float = 2.0) -> DeviceClock:
        return DeviceClock(folder, share_factor, lambda: self.now, self.sleep)


@pytest.fixture
def fake() -> FakeTime:
    return FakeTime()


def test_step_lasts_its_cost_and_sleeps_once(fake: FakeTime, tmp_path: Path) -> None:
    clock = fake.clock(tmp_path / "GPU0")
    with clock.step("decode", 0.5):
        fake.pass_to(0.2)
    assert fake.now == pytest.approx(0.5)
    assert fake.sleeps == 1
    totals = read_totals(tmp_path)["GPU0"]["decode"]
    assert totals == Totals(steps=1, overruns=0, overrun_s=0, real_s=pytest.approx(0.2), emulated_s=pytest.approx(0.5))


def test_step_that_takes_longer_for_real_is_counted_and_not_hidden(fake: FakeTime, tmp_path: Path) -> None:
    clock = fake.clock(tmp_path / "GPU0")
    with clock.step("train", 0.5):
        fake.pass_to(0.7)
    with clock.step("train", 0.5):
        fake.pass_to(0.8)
    assert fake.now == pytest.approx(1.2)
    totals = read_totals(tmp_path)["GPU0"]["train"]
    assert (totals.steps, totals.overruns) == (2, 1)
    assert totals.overrun_s == pytest.approx(0.2)
    assert totals.real_s == pytest.approx(0.8)
    assert totals.emulated_s == pytest.approx(1.2)


def test_step_that_fails_is_not_waited_for(fake: FakeTime, tmp_path: Path) -> None:
    clock = fake.clock(tmp_path / "GPU0")
    with pytest.raises(RuntimeError), clock.step("prefill", 5.0):
        raise RuntimeError
    assert fake.now == 0.0
    assert read_totals(tmp_path)["GPU0"]["prefill"].steps == 0
    with clock.step("prefill", 1.0):
        pass
    assert fake.now == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("busy_from", "busy_to", "lasted"),
    [(0.0, 99.0, 2.0), (0.0, 0.5, 1.25), (0.5, 99.0, 1.5), (0.25, 0.75, 1.25), (5.0, 6.0, 1.0)],
)
def test_models_that_share_a_device_slow_each_other_while_they_overlap(
    fake: FakeTime, tmp_path: Path, busy_from: float, busy_to: float, lasted: float
) -> None:
    """1 s of work at full speed alone and half of it shared."""
    first, second = fake.clock(tmp_path / "GPU0"), fake.clock(tmp_path / "GPU0")
    steps: list[Any] = []
    fake.events = [
        (busy_from, lambda: steps.append(second.begin())),
        (busy_to, lambda: second.abandon(steps[0])),
    ]
    fake.pass_to(0.0)
    with first.step("prefill", 1.0):
        pass
    assert fake.now == pytest.approx(lasted, abs=2 * CLOSE_ENOUGH_S)


def test_two_steps_at_once_take_twice_as_long_as_each_alone(fake: FakeTime, tmp_path: Path) -> None:
    """Plain time slicing keeps the device's work: 1 s and 1 s end after 2 s."""
    first, second = fake.clock(tmp_path / "GPU0"), fake.clock(tmp_path / "GPU0")
    other = second.begin()
    with first.step("decode", 1.0):
        pass
    assert fake.now == pytest.approx(2.0, abs=2 * CLOSE_ENOUGH_S)
    second.finish(other, "prefill", 1.0)
    assert fake.now == pytest.approx(2.0, abs=4 * CLOSE_ENOUGH_S)


def test_model_on_a_device_of_its_own_is_not_slowed(fake: FakeTime, tmp_path: Path) -> None:
    fake.clock(tmp_path / "GPU0").begin()
    with fake.clock(tmp_path / "GPU1").step("prefill", 1.0):
        pass
    assert fake.now == pytest.approx(1.0)


def test_process_that_died_in_a_step_slows_nobody(fake: FakeTime, tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "GPU0").mkdir()
    DeviceRecord(tmp_path / "GPU0" / f"{gone.pid}.0", create=True).set_busy(0.0, 0.0)
    with fake.clock(tmp_path / "GPU0").step("decode", 1.0):
        pass
    assert fake.now == pytest.approx(1.0)


def test_steps_of_one_process_do_not_nest(fake: FakeTime, tmp_path: Path) -> None:
    clock = fake.clock(tmp_path / "GPU0")
    clock.begin()
    with pytest.raises(AssertionError, match="within another"):
        clock.begin()


def test_reader_never_sees_half_a_state(tmp_path: Path) -> None:
    """The busy time of a process that toggles is never that of an old total with a new start."""
    written, read = DeviceRecord(tmp_path / "1.0", create=True), DeviceRecord(tmp_path / "1.0")
    stop = threading.Event()

    def toggle() -> None:
        while not stop.is_set():
            written.set_busy(0.0, 100.0)
            written.set_busy(1000.0, None)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        seen = {read.busy_s(101.0) for _ in range(20000)}
    finally:
        stop.set()
        thread.join()
    assert seen <= {0.0, 1.0, 1000.0}


def test_sleeping_is_real_and_at_least_the_cost(tmp_path: Path) -> None:
    with DeviceClock(tmp_path / "GPU0", 2.0).step("sync", 0.05):
        pass
    assert read_totals(tmp_path)["GPU0"]["sync"].emulated_s >= 0.05 - CLOSE_ENOUGH_S
