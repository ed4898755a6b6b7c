"""The rollout controller: `control.admission` behind verl's single-controller API.

One `Worker` in a `RayWorkerGroup` of one process without GPU. The trainer and its replay buffer ask it whom to admit,
whether the first B groups are complete and which ones to train; the agent loop workers tell it what happens to a
prompt. It does not know TransferQueue, vLLM or any tensor: which groups are sampleable is verl's decision and comes in
as an argument.
"""

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Any

import ray
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from verl_oppo.control.admission import AdmissionController

RPC_TIMEOUT_S = 120.0
"""Upper bound of one call to the controller; it answers in milliseconds unless its process is gone."""

_one_call = register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO, blocking=False)


@dataclass(frozen=True)
class RolloutState:
    """What the controller knows at one moment, for metrics and messages.

    Attributes:
        ledger: prompts `submitted`, `trained`, `evicted`, `outstanding` since the start of training.
        evicted_by_reason: evicted prompts by reason.
        num_deferred, age_mean, age_max: deferred prompts outstanding now and how often each was deferred.
        total_deferred: distinct prompts ever deferred.
        carried_tokens: tokens kept from aborted requests of the outstanding prompts.
        last_error: the last failure of an agent loop, as text.
        idle_s: seconds since the last event from an agent loop worker or admission.
        waiting_for: what keeps a batch from being complete, in words.
    """

    ledger: dict[str, int]
    evicted_by_reason: dict[str, int]
    num_deferred: int
    age_mean: float
    age_max: int
    total_deferred: int
    carried_tokens: int
    last_error: str | None
    idle_s: float
    waiting_for: str


class RolloutController(Worker):
    """Ledger and first-B signal of the prompts in flight.

    Invariant: every event runs to its end on the actor's single event loop, so the ledger is never seen half changed.
    Events about a prompt that is no longer outstanding are late and change nothing.
    """

    def __init__(self, batch_size: int, max_deferrals: int) -> None:
        super().__init__()
        self.admission = AdmissionController(batch_size=batch_size, max_deferrals=max_deferrals)
        self._batch_size = batch_size
        self._completed: set[str] = set()
        self._carried_tokens: dict[str, dict[int, int]] = {}
        self._last_error: str | None = None
        self._moved_at = time.monotonic()
        self._num_events = 0
        self._changed = asyncio.Condition()
        self._batch_complete_at: float | None = None
        self._ready_at: float | None = None
        self._selected_complete_at: float | None = None
        self._selected_ready_at: float | None = None

    # ---------------------------------- asked by the trainer ----------------------------------

    @_one_call
    async def num_to_admit(self, delta: int, steps_left: int) -> int:
        return self.admission.num_to_admit(delta=delta, steps_left=steps_left)

    @_one_call
    async def admit(self, uids: list[str], step: int) -> None:
        self.admission.admit(uids, step=step)
        self._moved_at = time.monotonic()

    @_one_call
    async def evict(self, uids: list[str], reason: str) -> None:
        self.admission.evict(uids, reason=reason)
        self._retire(uids)

    @_one_call
    async def ready(self, sampleable: list[str]) -> bool:
        is_ready = self.admission.ready(sampleable)
        if is_ready:
            # A poll may see a status before the event about it arrives.
            now = time.monotonic()
            self._batch_complete_at = self._batch_complete_at or now
            self._ready_at = self._ready_at or now
        return is_ready

    @_one_call
    async def select(self, sampleable: list[str], step: int) -> list[str]:
        uids = self.admission.select(sampleable, step=step)
        self._selected_ready_at, self._selected_complete_at = self._ready_at, self._batch_complete_at
        self._retire(uids)
        return uids

    @_one_call
    async def wait_for_batch(self, seen: int, timeout_s: float) -> int:
        """Return the number of completions so far, as soon as B groups are complete and one is newer than `seen`.

        Returns after `timeout_s` seconds at the latest. It is a hint: a complete group may be failed or filtered.
        """

        def is_due() -> bool:
            return self._num_events > seen and len(self._completed) >= self._batch_size

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(is_due), timeout_s)
            except asyncio.TimeoutError:
                return self._num_events
        return self._num_events

    @_one_call
    async def mark_abort(self, waiting_since_s: float) -> dict[str, float]:
        """Seconds from "the batch could be sampled" to now, and seconds waited for prompts at the deferral bound.

        Both on the controller's clock. A batch that was complete before the trainer began to wait, `waiting_since_s`
        seconds ago, counts from that moment.
        """
        now = time.monotonic()
        began = now - waiting_since_s
        ready_at = max(began, self._selected_ready_at or began)
        complete_at = max(began, self._selected_complete_at or began)
        return {"first_b_latency": now - ready_at, "straggler_wait": max(0.0, ready_at - complete_at)}

    @_one_call
    async def state(self) -> RolloutState:
        deferred = self.admission.deferred()
        return RolloutState(
            ledger=asdict(self.admission.ledger()),
            evicted_by_reason=self.admission.evicted_by_reason(),
            num_deferred=deferred.num,
            age_mean=deferred.age_mean,
            age_max=deferred.age_max,
            total_deferred=self.admission.total_deferred,
            carried_tokens=sum(sum(sessions.values()) for sessions in self._carried_tokens.values()),
            last_error=self._last_error,
            idle_s=time.monotonic() - self._moved_at,
            waiting_for=self.admission.describe_wait(self._completed),
        )

    @_one_call
    async def deferrals(self, uids: list[str]) -> list[int]:
        return [self.admission.deferrals(uid) for uid in uids]

    @_one_call
    async def state_dict(self) -> dict[str, Any]:
        return self.admission.state_dict()

    @_one_call
    async def load_state_dict(self, state: dict[str, Any]) -> None:
        # verl restarts what was in flight from scratch: it has no tokens, but it keeps its age.
        prompts = [{**prompt, "started": False} for prompt in state["outstanding"]]
        self.admission.load_state_dict({**state, "outstanding": prompts})
        self._completed = {prompt["uid"] for prompt in state["outstanding"] if prompt["completed"] is not None}
        self._carried_tokens = {}
        self._restamp()

    @_one_call
    async def reconcile(self, uids: list[str], step: int) -> dict[str, list[str]]:
        """Make the ledger hold exactly the prompts that TransferQueue restored; returns what was added and removed."""
        outstanding = set(self.admission.outstanding())
        added = [uid for uid in uids if uid not in outstanding]
        removed = sorted(outstanding - set(uids))
        if added:
            self.admission.admit(added, step=step, restored=True)
        if removed:
            self.admission.evict(removed, reason="not_in_checkpoint")
            self._retire(removed)
        return {"added": added, "removed": removed}

    # ---------------------------------- told by agent loop workers ----------------------------------

    async def started(self, uid: str) -> None:
        self._moved_at = time.monotonic()
        self.admission.start(uid)

    async def carried(self, uid: str, session_id: int, num_tokens: int) -> None:
        """A request of this prompt was aborted; `num_tokens` tokens of the session are kept so far."""
        self._moved_at = time.monotonic()
        if uid not in self.admission.outstanding():
            return
        self.admission.carry(uid)
        sessions = self._carried_tokens.setdefault(uid, {})
        # Ray may swap two calls to an async actor.
        sessions[session_id] = max(sessions.get(session_id, 0), num_tokens)

    async def failed(self, uid: str, error: str) -> None:
        self._last_error = f"prompt {uid}: {error}"

    async def completed(self, uid: str) -> None:
        """Every session of the prompt has settled and its terminal status is in TransferQueue."""
        self._moved_at = time.monotonic()
        if uid not in self.admission.outstanding():
            return
        self.admission.complete(uid)
        self._completed.add(uid)
        self._stamp_if_ready()
        async with self._changed:
            self._num_events += 1
            self._changed.notify_all()

    # ---------------------------------- internal ----------------------------------

    def _retire(self, uids: list[str]) -> None:
        for uid in uids:
            self._completed.discard(uid)
            self._carried_tokens.pop(uid, None)
        self._restamp()

    def _restamp(self) -> None:
        self._batch_complete_at = self._ready_at = None
        self._stamp_if_ready()

    def _stamp_if_ready(self) -> None:
        now = time.monotonic()
        if self._batch_complete_at is None and len(self._completed) >= self._batch_size:
            self._batch_complete_at = now
        if self._ready_at is None and self.admission.ready(self._completed):
            self._ready_at = now


class RolloutControllerGroup:
    """The controller's worker group, with a deadline on every call.

    Invariant: a call returns, or raises within `RPC_TIMEOUT_S` seconds.
    """

    def __init__(self, *, batch_size: int, max_deferrals: int, device_name: str) -> None:
        # verl's random name for the pool: a fixed one would allow one controller a Ray job.
        pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
        cls = RayClassWithInitArgs(
            cls=ray.remote(RolloutController), batch_size=batch_size, max_deferrals=max_deferrals
        )
        self._group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=cls, device_name=device_name)

    @property
    def handle(self) -> ray.actor.ActorHandle:
        """Actor handle for the workers that report events."""
        return self._group.workers[0]

    def call(self, method: str, *args: Any, timeout_s: float = RPC_TIMEOUT_S, **kwargs: Any) -> Any:
        """Call a registered method and wait for its answer.

        Raises:
            ray.exceptions.GetTimeoutError: the controller did not answer within `timeout_s` seconds.
            ray.exceptions.ActorDiedError: the controller's process is gone.
        """
        return ray.get(getattr(self._group, method)(*args, **kwargs), timeout=timeout_s)
