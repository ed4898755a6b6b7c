"""The rollout controller in a Ray process of its own, asked through its worker group as the trainer asks it."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import ray

from verl_oppo.control.admission import AdmissionController
from verl_oppo.rollout.controller import RolloutControllerGroup
from verl_oppo.trainer.health import HealthCheck

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 120.0
ENDLESS_S = 3600.0


def tell(group: RolloutControllerGroup, event: str, *args: object) -> None:
    """An event from an agent loop worker, arrived."""
    ray.get(getattr(group.handle, event).remote(*args), timeout=PATIENCE_S)


def complete(group: RolloutControllerGroup, uids: str) -> None:
    for uid in uids:
        tell(group, "completed", uid)


def num_events(group: RolloutControllerGroup) -> int:
    """Completions so far; the counter outlives the ledger of one test."""
    return group.call("wait_for_batch", 10**9, 0.0)


def train(group: RolloutControllerGroup, uids: str, step: int) -> list[str]:
    """Admit, complete and select one batch."""
    group.call("admit", list(uids), step=step)
    complete(group, uids)
    return group.call("select", list(uids), step=step)


def test_a_step_through_the_worker_group_keeps_the_ledger(controller):
    assert controller.call("num_to_admit", delta=1, steps_left=9) == 3
    controller.call("admit", ["a", "b", "c"], step=1)
    assert not controller.call("ready", ["c"])
    complete(controller, "cb")
    assert controller.call("ready", ["b", "c"])
    assert controller.call("select", ["b", "c"], step=1) == ["c", "b"]
    controller.call("evict", ["a"], reason="failed")
    state = controller.call("state")
    assert state.ledger == {"submitted": 3, "trained": 2, "evicted": 1, "outstanding": 0}
    assert state.evicted_by_reason == {"failed": 1}


def test_an_error_of_the_ledger_comes_back_as_itself(controller):
    with pytest.raises(ValueError, match="'x' was never admitted"):
        controller.call("ready", ["x"])


def waiting(group: RolloutControllerGroup, pool: ThreadPoolExecutor, seen: int) -> "Future[int]":
    """A wait that outlasts the test's patience: nothing but an event ends it in time."""
    return pool.submit(group.call, "wait_for_batch", seen, 1.5 * PATIENCE_S, timeout_s=2 * PATIENCE_S)


def test_the_completion_that_fills_the_batch_ends_the_wait(controller):
    controller.call("admit", ["a", "b", "c"], step=1)
    seen = num_events(controller)
    with ThreadPoolExecutor(1) as pool:
        wait = waiting(controller, pool, seen)
        complete(controller, "a")
        assert not wait.done(), "one group of two"
        complete(controller, "b")
        assert wait.result(PATIENCE_S) == seen + 2


def test_a_full_batch_wakes_again_only_on_a_further_completion(controller):
    controller.call("admit", ["a", "b", "c"], step=1)
    complete(controller, "ab")
    seen = controller.call("wait_for_batch", -1, PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        wait = waiting(controller, pool, seen)
        controller.call("state")
        assert not wait.done(), "nothing completed since"
        complete(controller, "c")
        assert wait.result(PATIENCE_S) == seen + 1


def test_a_wait_without_a_batch_ends_at_its_time_limit(controller):
    controller.call("admit", ["a", "b"], step=1)
    complete(controller, "a")
    seen = num_events(controller)
    assert controller.call("wait_for_batch", seen, 0.01) == seen


def test_late_events_change_nothing(controller):
    train(controller, "ab", step=1)
    before, seen = controller.call("state_dict"), num_events(controller)
    complete(controller, "a")
    tell(controller, "started", "a")
    tell(controller, "carried", "b", 0, 7)
    tell(controller, "completed", "never admitted")
    assert controller.call("state_dict") == before
    assert num_events(controller) == seen
    assert controller.call("state").carried_tokens == 0


def test_carried_tokens_count_each_session_once_and_leave_with_the_prompt(controller):
    controller.call("admit", ["a", "b", "c"], step=1)
    complete(controller, "bc")
    controller.call("select", ["b", "c"], step=1)
    for session_id, num_tokens in ((0, 9), (1, 3), (0, 5)):  # two events of session 0 swapped on the way
        tell(controller, "carried", "a", session_id, num_tokens)
    state = controller.call("state")
    assert (state.num_deferred, state.age_mean, state.age_max, state.total_deferred) == (1, 1.0, 1, 1)
    assert state.carried_tokens == 12
    controller.call("admit", ["d"], step=2)
    complete(controller, "ad")
    assert controller.call("select", ["d", "a"], step=2) == ["a", "d"], "the carried one first"
    assert controller.call("state").carried_tokens == 0
    assert controller.call("deferrals", ["a", "d"]) == [1, 0]


def test_state_names_the_last_error_and_what_is_waited_for(controller):
    controller.call("admit", ["a", "b"], step=1)
    tell(controller, "failed", "a", "ValueError: no such tool")
    tell(controller, "completed", "b")
    state = controller.call("state")
    assert state.last_error == "prompt a: ValueError: no such tool"
    assert "1 of 2 outstanding prompts are sampleable" in state.waiting_for
    assert "first a (deferred 0x)" in state.waiting_for


def test_idle_time_starts_anew_with_each_event(controller):
    controller.call("admit", ["a", "b"], step=1)
    asked = time.monotonic()
    time.sleep(0.05)
    assert controller.call("state").idle_s >= 0.05
    tell(controller, "started", "a")
    assert controller.call("state").idle_s < time.monotonic() - asked


def test_first_b_latency_counts_from_the_completion_that_made_the_batch(controller):
    controller.call("admit", ["a", "b", "c"], step=1)
    complete(controller, "a")
    before = time.monotonic()
    complete(controller, "b")
    after = time.monotonic()
    controller.call("select", ["a", "b"], step=1)
    asked = time.monotonic()
    marks = controller.call("mark_abort", ENDLESS_S)
    assert asked - after <= marks["first_b_latency"] <= time.monotonic() - before
    assert marks["straggler_wait"] == 0.0


def test_a_batch_complete_before_the_trainer_waits_costs_from_that_moment_only(controller):
    train(controller, "ab", step=1)
    assert controller.call("mark_abort", 0.0) == {"first_b_latency": 0.0, "straggler_wait": 0.0}
    assert controller.call("mark_abort", 0.001)["first_b_latency"] == pytest.approx(0.001)


def test_a_status_seen_before_its_event_still_has_a_latency(controller):
    """A poll of TransferQueue may come between the terminal status and the event about it."""
    controller.call("admit", ["a", "b"], step=1)
    complete(controller, "a")
    before = time.monotonic()
    assert controller.call("ready", ["a", "b"])
    controller.call("select", ["a", "b"], step=1)
    complete(controller, "b")
    marks = controller.call("mark_abort", ENDLESS_S)
    assert marks["first_b_latency"] <= time.monotonic() - before
    assert marks["straggler_wait"] == 0.0


def test_straggler_wait_is_the_time_waited_for_a_prompt_at_the_bound(controller):
    controller.call("admit", list("abc"), step=1)
    for step, others in ((1, "bc"), (2, "de")):
        if step > 1:
            controller.call("admit", list(others), step=step)
        complete(controller, others)
        controller.call("select", list(others), step=step)
        tell(controller, "carried", "a", 0, step)
    assert controller.call("deferrals", ["a"]) == [2]
    controller.call("admit", list("fg"), step=3)
    complete(controller, "fg")
    complete_at = time.monotonic()
    assert not controller.call("ready", ["f", "g"]), "a may not be deferred a third time"
    ready_after = time.monotonic()
    complete(controller, "a")
    assert controller.call("select", ["f", "g", "a"], step=3) == ["a", "f"]
    marks = controller.call("mark_abort", ENDLESS_S)
    assert marks["straggler_wait"] >= ready_after - complete_at
    assert marks["first_b_latency"] <= time.monotonic() - ready_after


def restart(group: RolloutControllerGroup) -> None:
    """What a resume does: the saved state into a controller that knows nothing."""
    state = group.call("state_dict")
    group.call("load_state_dict", AdmissionController(batch_size=2, max_deferrals=2).state_dict())
    group.call("load_state_dict", state)


def test_a_resume_keeps_ledger_ages_and_order(controller):
    train(controller, "ab", step=1)
    controller.call("admit", list("cdef"), step=2)
    complete(controller, "fed")
    controller.call("select", ["f", "e", "d"], step=2)
    tell(controller, "carried", "c", 0, 4)
    before = controller.call("state")
    restart(controller)
    after = controller.call("state")
    assert after.ledger == before.ledger == {"submitted": 6, "trained": 4, "evicted": 0, "outstanding": 2}
    assert controller.call("deferrals", ["c", "d"]) == [1, 1]
    assert after.total_deferred == 2
    assert after.carried_tokens == 0, "the tokens of what was in flight do not survive"


def test_what_was_in_flight_has_no_token_after_a_resume_and_is_not_deferred_for_it(controller):
    controller.call("admit", list("abcd"), step=1)
    complete(controller, "bc")
    controller.call("select", ["b", "c"], step=1)
    tell(controller, "carried", "a", 0, 4)
    restart(controller)
    complete(controller, "d")
    controller.call("admit", ["e"], step=2)
    complete(controller, "e")
    controller.call("select", ["d", "e"], step=2)
    assert controller.call("deferrals", ["a"]) == [1]
    tell(controller, "carried", "a", 0, 1)
    assert controller.call("deferrals", ["a"]) == [2]


def test_groups_complete_before_a_resume_count_for_the_signal(controller):
    controller.call("admit", list("abc"), step=1)
    complete(controller, "a")
    restart(controller)
    seen = num_events(controller)
    with ThreadPoolExecutor(1) as pool:
        wait = waiting(controller, pool, seen)
        complete(controller, "b")
        assert wait.result(PATIENCE_S) == seen + 1
    before = time.monotonic()
    controller.call("select", ["a", "b"], step=1)
    assert controller.call("mark_abort", ENDLESS_S)["straggler_wait"] <= time.monotonic() - before


def test_reconcile_makes_the_ledger_hold_what_was_restored(controller):
    controller.call("admit", ["a", "b", "c"], step=1)
    complete(controller, "a")
    assert controller.call("reconcile", ["b", "x", "c"], step=4) == {"added": ["x"], "removed": ["a"]}
    state = controller.call("state")
    assert state.ledger == {"submitted": 4, "trained": 0, "evicted": 1, "outstanding": 3}
    assert state.evicted_by_reason == {"not_in_checkpoint": 1}
    assert controller.call("reconcile", ["b", "x", "c"], step=4) == {"added": [], "removed": []}
    seen = num_events(controller)
    complete(controller, "b")
    assert controller.call("wait_for_batch", seen, 0.01) == seen + 1, "the removed one is no longer complete"
    assert not controller.call("ready", ["b"])


def test_a_checkpoint_may_hold_more_prompts_than_would_be_admitted(controller):
    """Of another trainer mode, or of a run with a larger bound: nothing is refused, nothing lost, every step ends."""
    uids = list("abcdefghi")
    assert len(uids) > AdmissionController(batch_size=2, max_deferrals=2).capacity
    assert controller.call("reconcile", uids, step=4)["added"] == uids
    assert controller.call("num_to_admit", delta=4, steps_left=9) == 0
    trained = []
    for step in range(4, 8):
        remaining = [uid for uid in uids if uid not in trained]
        complete(controller, "".join(remaining))
        trained += controller.call("select", remaining, step=step)
    assert sorted(trained) == uids[:8]
    assert controller.call("state").ledger == {"submitted": 9, "trained": 8, "evicted": 0, "outstanding": 1}


def test_a_call_that_is_not_answered_in_time_says_so(controller):
    with pytest.raises(ray.exceptions.GetTimeoutError):
        controller.call("wait_for_batch", 10**9, 5.0, timeout_s=0.01)


def test_a_dead_controller_raises_its_own_error_and_ends_the_wait(shared_ray):
    group = RolloutControllerGroup(batch_size=1, max_deferrals=0, device_name="cpu")
    group.call("admit", ["a"], step=1)
    with ThreadPoolExecutor(1) as pool:
        wait = waiting(group, pool, 0)
        ray.kill(group.handle)
        with pytest.raises(ray.exceptions.RayActorError):
            wait.result(PATIENCE_S)
    with pytest.raises(ray.exceptions.RayActorError):
        group.call("state")
    with pytest.raises(ray.exceptions.RayActorError):
        HealthCheck({}, controller=group, stall_timeout_s=ENDLESS_S).check()
