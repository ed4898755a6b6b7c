"""First-B sampling on a real TransferQueue and rollout controller: what is trained, evicted, refilled and counted."""

from collections.abc import Callable, Iterator
from itertools import count

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_oppo.rollout.controller import RolloutControllerGroup
from verl_oppo.trainer import replay_buffer
from verl_oppo.trainer.replay_buffer import LISTING_SHARE, MAX_FAILED_IN_A_ROW, OppoReplayBuffer

pytestmark = pytest.mark.timeout(300)

MAX_POLLS = 50
"""A sampling that should have ended long before."""


@pytest.fixture(scope="module")
def transfer_queue(shared_ray: None) -> Iterator[None]:
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()


class Run:
    """A trainer and its agent loop workers as the buffer sees them: TransferQueue rows, statuses and events.

    `during_polls` holds what happens while the buffer waits, one entry a poll; `on_refill` is told each new uid.
    """

    def __init__(self, controller: RolloutControllerGroup, delta: int = 2, **kwargs: object) -> None:
        self.controller = controller
        self.delta = delta
        self.step = 1
        self.during_polls: list[Callable[[], object]] = []
        self.on_refill: Callable[[str], object] = self.finish
        self.refilled: list[str] = []
        self.num_polls = 0
        self._names = count()
        defaults = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop", "filter_groups_metric": None}
        self.buffer = OppoReplayBuffer(
            controller=controller,
            check_health=self.on_poll,
            trainer_mode="oppo",
            trainer_config=OmegaConf.create({}),
            sampler_kwargs=OmegaConf.create({}),
            refill_fn=self.refill,
            **{**defaults, **kwargs},
        )

    def on_poll(self) -> None:
        self.num_polls += 1
        assert self.num_polls <= MAX_POLLS, "the buffer waits for what will not come"
        if self.during_polls:
            self.during_polls.pop(0)()

    def submit(self, uids: str | list[str], partition_id: str = "train") -> None:
        if partition_id == "train":
            self.controller.call("admit", list(uids), step=self.step)
        tag = {"is_prompt": True, "status": "pending", "global_steps": self.step}
        tq.kv_batch_put(keys=list(uids), partition_id=partition_id, tags=[tag] * len(uids))

    def refill(self, num_prompts: int) -> int:
        num_due = self.controller.call("num_to_admit", delta=self.delta, steps_left=9)
        uids = [f"r{next(self._names)}" for _ in range(min(num_prompts, num_due))]
        if uids:
            self.submit(uids)
        self.refilled += uids
        for uid in uids:
            self.on_refill(uid)
        return len(uids)

    def finish(self, uid: str, rewards: tuple[float, ...] = (0.0, 1.0), partition_id: str = "train") -> None:
        """One row a session, each with the reward on its last token; then the status, then the event."""
        scores = [torch.tensor([0.0] * session_id + [reward]) for session_id, reward in enumerate(rewards)]
        tq.kv_batch_put(
            keys=[f"{uid}_{session_id}_0" for session_id in range(len(rewards))],
            partition_id=partition_id,
            fields=TensorDict(
                {"rm_scores": torch.nested.as_nested_tensor(scores, layout=torch.jagged)}, batch_size=len(rewards)
            ),
            tags=[{"status": "success", "seq_len": 1 + session_id} for session_id in range(len(rewards))],
        )
        self._settle(uid, "finished", partition_id)

    def fail(self, uid: str, error: str = "ValueError: no such tool") -> None:
        ray.get(self.controller.handle.failed.remote(uid, error))
        self._settle(uid, "failure", "train")

    def _settle(self, uid: str, status: str, partition_id: str) -> None:
        tq.kv_put(key=uid, partition_id=partition_id, tag={"status": status})
        if partition_id == "train":
            ray.get(self.controller.handle.completed.remote(uid))

    def sample(self, partition_id: str = "train", batch_size: int = 2) -> tuple[set[str], dict]:
        """The sampled uids and verl's eviction metrics; all rows of a group come with it."""
        self.num_polls = 0
        batch, metrics = self.buffer.sample(self.step, partition_id, batch_size)
        assert isinstance(batch, KVBatchMeta) and batch.partition_id == partition_id
        assert len(batch.keys) == len(batch.tags) == len(set(batch.keys))
        uids = {key.split("_")[0] for key in batch.keys}
        left = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        assert not uids & left.keys(), "the prompts of the batch have left TransferQueue"
        return uids, metrics

    @property
    def ledger(self) -> tuple[int, int, int, int]:
        """Prompts submitted, trained, evicted, outstanding; they add up, and TransferQueue holds the outstanding."""
        state = self.controller.call("state")
        assert state.ledger["submitted"] == sum(state.ledger[name] for name in ("trained", "evicted", "outstanding"))
        assert state.ledger["evicted"] == sum(state.evicted_by_reason.values())
        items = (tq.kv_list("train") or {}).get("train", {})
        assert sum(tag.get("is_prompt", False) for tag in items.values()) == state.ledger["outstanding"]
        return tuple(state.ledger.values())

    @property
    def evicted(self) -> dict[str, int]:
        return self.controller.call("state").evicted_by_reason


@pytest.fixture
def start(transfer_queue: None, controller: RolloutControllerGroup) -> Iterator[Callable[..., Run]]:
    yield lambda **kwargs: Run(controller, **kwargs)
    for partition_id, items in (tq.kv_list() or {}).items():
        if items:
            tq.kv_clear(keys=list(items), partition_id=partition_id)


def test_the_first_to_complete_are_sampled_and_the_rest_stays(start):
    run = start()
    run.submit("abcd")
    for uid in "dba":
        run.finish(uid)
    assert run.sample() == ({"d", "b"}, {})
    assert run.ledger == (4, 2, 0, 2)
    run.finish("c")
    assert run.sample()[0] == {"a", "c"}
    assert run.ledger == (4, 4, 0, 0)


def test_a_completion_while_waiting_ends_the_wait(start):
    run = start()
    run.submit("abc")
    run.finish("c")
    run.during_polls = [lambda: None, lambda: run.finish("a")]
    assert run.sample()[0] == {"a", "c"}
    assert not run.during_polls


def test_a_status_without_its_event_is_found_by_the_poll(start):
    """The event is lost with a worker, say; TransferQueue is what counts."""
    run = start()
    run.submit("ab")
    run.finish("a")
    run.during_polls = [lambda: tq.kv_put(key="b", partition_id="train", tag={"status": "finished"})]
    assert run.sample()[0] >= {"a"}
    assert run.ledger == (2, 2, 0, 0)


def test_the_carried_are_sampled_first_though_they_complete_last(start):
    run = start()
    run.submit("abcd")
    run.finish("b")
    run.finish("c")
    assert run.sample()[0] == {"b", "c"}
    ray.get(run.controller.handle.carried.remote("a", 0, 5))
    run.step = 2
    run.submit("ef")
    for uid in "fea":
        run.finish(uid)
    assert run.sample()[0] == {"a", "f"}
    assert run.ledger == (6, 4, 0, 2)


def test_a_prompt_at_the_deferral_bound_is_waited_for(start):
    run = start()
    run.submit("abc")
    for step, others in ((1, "bc"), (2, "de")):
        run.step = step
        if step > 1:
            run.submit(others)
        for uid in others:
            run.finish(uid)
        assert run.sample()[0] == set(others)
        ray.get(run.controller.handle.carried.remote("a", 0, step))
    run.step = 3
    run.submit("fg")
    run.finish("f")
    run.finish("g")
    run.during_polls = [lambda: None, lambda: run.finish("a")]
    assert run.sample()[0] == {"a", "f"}
    assert not run.during_polls, "sampled only after the prompt at the bound had finished"


def test_failed_groups_are_evicted_and_refilled(start):
    run = start()
    run.submit("abcd")
    run.fail("a")
    run.finish("b")
    uids, metrics = run.sample()
    assert uids == {"b", "r0"}
    assert metrics == {"training/rollout_failure/evicted_samples": 1}
    assert run.evicted == {"failed": 1}
    assert run.ledger == (5, 2, 1, 2)


def test_rows_of_a_failed_group_leave_with_it(start):
    run = start()
    run.submit("ab")
    run.finish("b")
    run.finish("a")
    run.fail("a")
    assert run.sample()[0] == {"b", "r0"}
    assert not [key for key in (tq.kv_list("train") or {}).get("train", {}) if key.startswith("a_")]


def test_no_refill_beyond_what_may_be_outstanding(start):
    """Delta has shrunk since: three prompts too many are outstanding, so a failed one is not replaced."""
    run = start(delta=0)
    run.submit("abcde")
    run.fail("a")
    run.finish("b")
    run.finish("c")
    assert run.sample()[0] == {"b", "c"}
    assert run.refilled == []
    assert run.ledger == (5, 2, 1, 2)


def test_stale_groups_are_dropped_by_verls_rule_and_refilled(start):
    run = start(max_off_policy_threshold=2)
    run.submit("ab")
    run.step = 3
    run.submit("c")
    for uid in "abc":
        run.finish(uid)
    uids, metrics = run.sample()
    assert uids == {"c", "r0"} or uids == {"c", "r1"}
    assert metrics["training/off_policy/evicted_samples"] == 2
    assert metrics["training/off_policy/evicted_samples_staleness/max"] == 3
    assert run.evicted == {"stale": 2}
    assert run.ledger == (5, 2, 2, 1)


def test_groups_of_one_reward_are_filtered_counted_and_refilled(start):
    run = start(filter_groups_metric="reward")
    run.submit("abcd")
    run.finish("a", rewards=(0.25, 0.25))
    run.finish("b", rewards=(0.0, 1.0))
    run.finish("c", rewards=(1.0, 1.0))
    uids, metrics = run.sample()
    assert uids == {"b", "r0"}
    assert metrics["training/filter_groups/evicted_samples"] == 2
    assert sorted(run.buffer.filtered_rewards) == [0.25, 1.0]
    assert run.evicted == {"filtered": 2}
    assert run.ledger == (6, 2, 2, 2)
    run.finish("d")
    run.sample()
    assert run.buffer.filtered_rewards == [], "of one step only"


def test_a_group_stale_and_filtered_is_evicted_once(start):
    run = start(filter_groups_metric="reward", max_off_policy_threshold=2)
    run.submit("a")
    run.step = 3
    run.submit("b")
    run.finish("a", rewards=(1.0, 1.0))
    run.finish("b")
    assert run.sample()[0] == {"b", "r0"}
    assert run.refilled == ["r0"]
    assert run.evicted == {"stale": 1}
    assert run.ledger == (3, 2, 1, 0)


def test_endless_failure_ends_with_the_last_error(start):
    run = start()
    run.on_refill = lambda uid: run.fail(uid, f"ValueError: no tool for {uid}")
    run.submit("abcd")
    for uid in "abcd":
        run.fail(uid)
    with pytest.raises(RuntimeError, match="64 prompt groups failed in a row while sampling step 1") as raised:
        run.sample()
    assert f"last error: prompt {run.refilled[-1]}: ValueError: no tool for {run.refilled[-1]}" in str(raised.value)
    assert run.evicted == {"failed": MAX_FAILED_IN_A_ROW}
    assert run.ledger == (64, 0, 64, 0)


@pytest.mark.parametrize("reward_of_success", [(0.0, 1.0), (1.0, 1.0)], ids=["sampleable", "filtered"])
def test_a_success_in_between_starts_the_row_anew(start, reward_of_success):
    """Also one that is filtered: the agent loops work."""
    run = start(filter_groups_metric="reward")

    def settle(uid: str) -> None:
        number = int(uid[1:])
        if number == 30:
            run.finish(uid, reward_of_success)
        elif number < 80:
            run.fail(uid)
        else:
            run.finish(uid)

    run.on_refill = settle
    run.submit("abc")
    for uid in "abc":
        run.fail(uid)
    assert len(run.sample()[0]) == 2
    assert run.evicted["failed"] == 3 + 79 > MAX_FAILED_IN_A_ROW


def test_validation_takes_all_and_leaves_the_ledger_alone(start):
    run = start()
    run.submit("ab")
    run.submit(["v0", "v1", "v2"], partition_id="val")
    run.finish("a")
    run.finish("v0", partition_id="val")
    run.finish("v1", partition_id="val")
    run.during_polls = [lambda: None, lambda: run.finish("v2", partition_id="val")]
    assert run.sample(partition_id="val", batch_size=3)[0] == {"v0", "v1", "v2"}
    assert not run.during_polls, "validation waits for all"
    assert run.ledger == (2, 0, 0, 2)
    run.finish("b")
    assert run.sample()[0] == {"a", "b"}


def test_validation_keeps_the_figures_of_the_step(start):
    run = start(filter_groups_metric="reward")
    run.submit("abc")
    run.finish("a", rewards=(1.0, 1.0))
    run.finish("b")
    run.finish("c")
    run.sample()
    waiting_since = run.buffer.waiting_since
    run.submit(["v"], partition_id="val")
    run.finish("v", partition_id="val")
    run.sample(partition_id="val", batch_size=1)
    assert run.buffer.filtered_rewards == [1.0]
    assert run.buffer.waiting_since == waiting_since


def test_the_wait_strategy_waits_for_a_prompt_at_verls_threshold(start):
    run = start(max_off_policy_strategy="wait", max_off_policy_threshold=2)
    run.submit("a")
    run.step = 2
    run.submit("bcd")
    run.finish("b")
    run.finish("c")
    run.during_polls = [lambda: None, lambda: run.finish("a")]
    assert run.sample()[0] == {"b", "c"}
    assert not run.during_polls, "sampled only after the stale prompt had finished"
    run.finish("d")
    assert run.sample()[0] == {"a", "d"}, "and it is trained, not dropped"
    assert run.evicted == {}


def test_what_cannot_end_ends_with_the_health_checks_error(start):
    def dead() -> None:
        raise RuntimeError("agent loop worker 0 died while the trainer waited for rollouts")

    run = start()
    run.submit("ab")
    run.finish("a")
    run.during_polls = [dead]
    with pytest.raises(RuntimeError, match="agent loop worker 0 died"):
        run.sample()
    assert run.ledger == (2, 0, 0, 2)


def test_a_slow_listing_widens_the_poll_interval(start, monkeypatch):
    """Listing the keys takes at most `LISTING_SHARE` of the waiting time."""
    run = start()
    asked: list[float] = []
    call = run.controller.call

    def spy(method: str, *args: object, **kwargs: object) -> object:
        if method == "wait_for_batch":
            asked.append(args[1])
            return call(method, args[0], 0.0)
        return call(method, *args, **kwargs)

    monkeypatch.setattr(run.controller, "call", spy)
    run.buffer._wait_for_next_poll("train", 0.0)
    run.buffer._listing_s = 0.5
    run.buffer._wait_for_next_poll("train", 0.0)
    assert asked == [replay_buffer.POLL_INTERVAL_S, 0.5 / LISTING_SHARE]
