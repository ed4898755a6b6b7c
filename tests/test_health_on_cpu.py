"""The health check of a waiting trainer, on real Ray actors: alive, busy, dead, and a run that stands still."""

import time
from threading import Event

import pytest
import ray

from verl_oppo.rollout.controller import RolloutControllerGroup
from verl_oppo.trainer import health
from verl_oppo.trainer.health import HealthCheck

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 120.0
ENDLESS_S = 3600.0


@ray.remote(num_cpus=0)
class Worker:
    """Serves one call at a time, as a synchronous server does."""

    def work(self) -> None:
        Event().wait()


@pytest.fixture
def worker(shared_ray: None) -> ray.actor.ActorHandle:
    worker = Worker.remote()
    ray.get(worker.__ray_ready__.remote(), timeout=PATIENCE_S)
    yield worker
    ray.kill(worker)


@pytest.fixture(autouse=True)
def every_check_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PING_INTERVAL_S", 0.0)


def health_check(
    group: RolloutControllerGroup, /, stall_timeout_s: float = ENDLESS_S, **actors: ray.actor.ActorHandle
) -> HealthCheck:
    return HealthCheck(actors, controller=group, stall_timeout_s=stall_timeout_s)


def check_until_it_raises(check: HealthCheck) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        check.check()
        time.sleep(0.01)


def test_living_actors_pass(controller, worker):
    check = health_check(controller, server=worker, controller=controller.handle)
    for _ in range(3):
        check.check()
        ray.wait(list(check._pings), num_returns=2, timeout=PATIENCE_S)


def test_a_busy_actor_is_neither_waited_for_nor_asked_twice(controller, worker):
    worker.work.remote()
    check = health_check(controller, server=worker)
    for _ in range(3):
        check.check()
    assert list(check._pings.values()) == ["server"]


def test_a_dead_actor_is_named_and_its_own_error_is_the_cause(controller, worker):
    check = health_check(controller, **{"the server of replica 0": worker, "the controller": controller.handle})
    check.check()
    ray.kill(worker)
    with pytest.raises(RuntimeError, match="the server of replica 0 died while the trainer waited") as raised:
        check_until_it_raises(check)
    assert isinstance(raised.value.__cause__, ray.exceptions.RayActorError)


def test_an_actor_that_dies_at_work_is_named_too(controller, worker):
    worker.work.remote()
    check = health_check(controller, server=worker)
    check.check()
    ray.kill(worker)
    with pytest.raises(RuntimeError, match="server died"):
        check_until_it_raises(check)


def test_a_run_that_stands_still_says_what_it_waits_for(controller):
    controller.call("admit", ["a", "b"], step=1)
    time.sleep(0.02)
    check = health_check(controller, stall_timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"stall_timeout_s is 0\.01\): 0 of 2 outstanding prompts are sampleable"):
        check.check()


def test_a_run_that_moves_is_not_stalled(controller):
    controller.call("admit", ["a", "b"], step=1)
    health_check(controller, stall_timeout_s=PATIENCE_S).check()


def test_between_two_pings_nothing_is_asked(controller, monkeypatch):
    monkeypatch.setattr(health, "PING_INTERVAL_S", ENDLESS_S)
    asked = []
    monkeypatch.setattr(controller, "call", asked.append)
    check = health_check(controller)
    check._pinged_at = time.monotonic()
    check.check()
    assert asked == []
