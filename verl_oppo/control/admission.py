"""Who is in flight, who is trained next, who is deferred, and a ledger that adds up.

The rollout controller calls it for every admission, first token, abort and completion; the replay buffer asks it
whether a batch is ready and which prompts form it; the simulator and the benchmark run it as it is. It knows prompts
by uid only: no tokens, no rewards, no replicas. A prompt is a group of ``rollout.n`` sessions.

Two clocks meet here. Completions are announced early and may be lost or late, so they only decide the ORDER. Whether
a prompt can be sampled is verl's own predicate (not failed, not filtered, not stale), passed in as ``sampleable``.

Deferral bound
--------------
A deferral is a ``select`` that leaves a prompt behind which has tokens. Its slack is ``max_deferrals - deferrals``: a
prompt of slack 0 has to be in the next batch. Let N_j be the number of outstanding prompts with slack <= j before a
choice and c_j the number of those that are chosen. What is left of N_j must fit into the next j batches, so a choice
of B prompts is feasible iff ``c_j >= N_j - B * j`` for every j in 0..max_deferrals. Taking the smallest slack first
maximises every c_j at once, so if that choice is infeasible, every choice is, and the step waits.

By induction every step can reach a feasible choice: after a feasible one at most B * j prompts of the former N_j are
left and their slack has dropped by at most 1, so before the next choice N_j <= B * (j + 1) for j < max_deferrals;
for j = max_deferrals it is the cap on ``outstanding``, ``B + delta <= B * (1 + max_deferrals)``, that ``admit`` holds.
So ``N_j - B * j <= B`` always, and waiting for every outstanding prompt is enough. Nothing is deferred more than
``max_deferrals`` times, hence every prompt is trained within ``max_deferrals + 1`` steps of its first token.

Tokens may be learned late: a client reports them when its request is aborted, shortly AFTER ``select``. The check
therefore counts every outstanding prompt as one that has tokens. That cannot dead-lock or even delay: a prompt never
deferred has slack ``max_deferrals`` and enters only c_B >= N - B * max_deferrals, which the cap makes true for any B
chosen. A prompt that has no token because it queues in the client for a free slot is waited for only when the batch
cannot be filled without it; waiting lets the running requests finish and frees the slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ledger:
    """Counts of prompts since the start of training, resumes included."""

    submitted: int
    trained: int
    evicted: int
    outstanding: int

    @property
    def balanced(self) -> bool:
        """True if every prompt submitted is trained, evicted or outstanding."""
        return self.submitted == self.trained + self.evicted + self.outstanding


@dataclass(frozen=True)
class DeferredStats:
    """Deferred prompts that are outstanding now; age in steps, which is the number of times deferred."""

    num: int
    age_mean: float
    age_max: int


@dataclass
class _Prompt:
    """What is known of one prompt. ``counted`` is the last ``select`` (by number) that may not defer it any more."""

    uid: str
    index: int
    admitted_step: int
    counted: int
    started: bool = False
    completed: int | None = None
    deferrals: int = 0
    trained: bool = False
    retired_step: int | None = None
    retired_at: int = 0

    @property
    def has_tokens(self) -> bool:
        return self.started or self.completed is not None


class AdmissionController:
    """Admits, orders, defers and retires prompts.

    Invariants: the ledger is balanced after every call; a uid is trained at most once; with admissions capped by
    ``num_to_admit`` no prompt is deferred more than ``max_deferrals`` times (see the module's docstring).
    """

    def __init__(self, *, batch_size: int, max_deferrals: int) -> None:
        """Args: ``batch_size`` B in prompts per step (``data.train_batch_size``); ``max_deferrals`` in steps.

        Raises:
            ValueError: if ``batch_size`` is below 1 or ``max_deferrals`` below 0.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be 1 or more prompts")
        if max_deferrals < 0:
            raise ValueError(f"max_deferrals is {max_deferrals}; it must be 0 or more steps")
        self._batch_size = batch_size
        self._max_deferrals = max_deferrals
        self._outstanding: dict[str, _Prompt] = {}
        self._retired: dict[str, _Prompt] = {}
        self._evicted_by_reason: Counter[str] = Counter()
        self._submitted = 0
        self._trained = 0
        self._ever_deferred = 0
        self._completions = 0
        self._selects = 0
        self._step = 0

    @property
    def capacity(self) -> int:
        """Most prompts that may be outstanding at once without breaking the deferral bound."""
        return self._batch_size * (1 + self._max_deferrals)

    def num_to_admit(self, *, delta: int, steps_left: int) -> int:
        """Number of new prompts that bring the outstanding ones to B + delta, or to what can still be trained.

        Args:
            delta: overcommit degree in prompts.
            steps_left: training steps to come, the present one included.

        Raises:
            ValueError: if ``delta`` is outside ``[0, batch_size * max_deferrals]`` or ``steps_left`` below 0.
        """
        delta_bound = self._batch_size * self._max_deferrals
        if not 0 <= delta <= delta_bound:
            raise ValueError(f"delta is {delta}; allowed: 0 to batch_size * max_deferrals = {delta_bound} prompts")
        if steps_left < 0:
            raise ValueError(f"steps_left is {steps_left}; it must be 0 or more")
        target = min(self._batch_size + delta, self._batch_size * steps_left)
        return max(0, target - len(self._outstanding))

    def admit(self, uids: Sequence[str], *, step: int, restored: bool = False) -> None:
        """Counts new prompts as submitted, in this order, at training step ``step``.

        Prompts ``restored`` from a checkpoint exist already, so ``capacity`` cannot refuse them: as after
        ``load_state_dict``, what is over the deferral bound is due at once.

        Raises:
            ValueError: if a uid is known already, or more than ``capacity`` prompts would be outstanding. Nothing is
                admitted then.
        """
        seen = self._outstanding.keys() | self._retired.keys()
        known = [uid for uid, count in Counter(uids).items() if count > 1 or uid in seen]
        if known:
            raise ValueError(f"a uid is admitted once only; known or repeated: {known}")
        if not restored and len(self._outstanding) + len(uids) > self.capacity:
            raise ValueError(
                f"{len(uids)} new prompts and {len(self._outstanding)} outstanding exceed batch_size * "
                f"(1 + max_deferrals) = {self.capacity}; admit at most num_to_admit()"
            )
        self._step = max(self._step, step)
        for uid in uids:
            self._outstanding[uid] = _Prompt(uid, self._submitted, step, counted=self._selects)
            self._submitted += 1

    def start(self, uid: str) -> None:
        """A first token of this prompt exists. Idempotent; a uid that is not outstanding is a late event: ignored."""
        if prompt := self._outstanding.get(uid):
            prompt.started = True

    def carry(self, uid: str) -> None:
        """A request of this prompt was aborted and its tokens are kept: deferred once by the latest ``select``.

        Idempotent within one step. Not counted for a prompt admitted after the latest ``select``, which cannot have
        deferred it. A uid that is not outstanding is a late event: ignored.
        """
        if prompt := self._outstanding.get(uid):
            prompt.started = True
            self._defer(prompt)

    def complete(self, uid: str) -> None:
        """All sessions of this prompt have settled; remembers the order. Idempotent, late events are ignored."""
        prompt = self._outstanding.get(uid)
        if prompt and prompt.completed is None:
            prompt.completed = self._completions
            self._completions += 1

    def evict(self, uids: Iterable[str], *, reason: str) -> None:
        """Retires prompts that will never be trained: failed, filtered, stale, ...

        A uid that was evicted before, or occurs twice, is counted once.

        Raises:
            ValueError: if a uid was trained or never admitted. Nothing is evicted then.
        """
        uids = list(uids)
        for uid in uids:
            retired = self._retired.get(uid)
            if uid not in self._outstanding and (retired is None or retired.trained):
                state = "trained already" if retired else "not known"
                raise ValueError(f"cannot evict {uid!r} ({reason}): it is {state}; evict outstanding prompts only")
        for uid in uids:
            if uid in self._outstanding:
                self._retire(uid, step=self._step, trained=False)
                self._evicted_by_reason[reason] += 1

    def ready(self, sampleable: Collection[str]) -> bool:
        """True if B of the sampleable prompts can be trained now so that the deferral bound still holds after it.

        Raises:
            ValueError: if a uid in ``sampleable`` was never admitted.
        """
        return self._choose(sampleable) is not None

    def select(self, sampleable: Collection[str], *, step: int) -> list[str]:
        """Chooses exactly B prompts, marks them trained and defers the others that have tokens.

        Order: most deferrals first, then order of completion, then order of admission.

        Raises:
            ValueError: if not ``ready(sampleable)``, with what is missing, or if a uid was never admitted.
        """
        chosen = self._choose(sampleable)
        if chosen is None:
            raise ValueError(f"no batch can be selected at step {step}: {self.describe_wait(sampleable)}")
        self._step = max(self._step, step)
        self._selects += 1
        self._forget_retired()
        for prompt in chosen:
            self._retire(prompt.uid, step=step, trained=True)
        self._trained += len(chosen)
        for prompt in self._outstanding.values():
            if prompt.has_tokens:
                self._defer(prompt)
        return [prompt.uid for prompt in chosen]

    def describe_wait(self, sampleable: Collection[str], *, limit: int = 8) -> str:
        """Says in words what keeps a batch from being ready; for the message of an expired deadline."""
        if self._choose(sampleable) is not None:
            return "a batch is ready"
        settled = set(sampleable)
        pending = [prompt for prompt in self._outstanding.values() if prompt.uid not in settled]
        urgent = sorted(pending, key=lambda prompt: (self._slack(prompt), prompt.index))
        names = ", ".join(f"{prompt.uid} (deferred {prompt.deferrals}x)" for prompt in urgent[:limit])
        return (
            f"{len(self._outstanding) - len(pending)} of {len(self._outstanding)} outstanding prompts are sampleable, "
            f"a batch needs {self._batch_size} with the most deferred ones in it; waiting for "
            f"{len(pending)} prompts, first {names or 'none: admit more'}"
        )

    def ledger(self) -> Ledger:
        """The counts now; ``balanced`` holds after every call."""
        evicted = self._evicted_by_reason.total()
        ledger = Ledger(self._submitted, self._trained, evicted, len(self._outstanding))
        assert ledger.balanced, ledger
        return ledger

    def evicted_by_reason(self) -> dict[str, int]:
        """Evicted prompts by the reason given."""
        return dict(self._evicted_by_reason)

    def deferred(self) -> DeferredStats:
        """Statistics of the deferred prompts that are outstanding now."""
        ages = [prompt.deferrals for prompt in self._outstanding.values() if prompt.deferrals]
        if not ages:
            return DeferredStats(num=0, age_mean=0.0, age_max=0)
        return DeferredStats(num=len(ages), age_mean=sum(ages) / len(ages), age_max=max(ages))

    def deferrals(self, uid: str) -> int:
        """How often this prompt was deferred. Raises ValueError for a uid neither outstanding nor lately retired."""
        return self._lookup(uid).deferrals

    def ages(self, uids: Iterable[str]) -> list[int]:
        """Steps from admission to retirement, or to the present step if outstanding. Raises ValueError if unknown."""
        ages = []
        for prompt in map(self._lookup, uids):
            end = self._step if prompt.retired_step is None else prompt.retired_step
            ages.append(max(0, end - prompt.admitted_step))
        return ages

    def outstanding(self) -> list[str]:
        """Uids of the outstanding prompts, in order of admission."""
        return list(self._outstanding)

    @property
    def total_deferred(self) -> int:
        """Number of distinct prompts that were ever deferred."""
        return self._ever_deferred

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state. In-flight prompts stay outstanding; ages and the order of admission are kept."""
        prompts = [
            {
                "uid": prompt.uid,
                "index": prompt.index,
                "admitted_step": prompt.admitted_step,
                "started": prompt.started,
                "completed": prompt.completed,
                "deferrals": prompt.deferrals,
                "counted_for_latest_select": prompt.counted == self._selects,
            }
            for prompt in self._outstanding.values()
        ]
        return {
            "outstanding": prompts,
            "submitted": self._submitted,
            "trained": self._trained,
            "evicted_by_reason": dict(self._evicted_by_reason),
            "ever_deferred": self._ever_deferred,
            "completions": self._completions,
            "step": self._step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict()``. B and ``max_deferrals`` are those of this controller, not of the saved one.

        With a smaller B or ``max_deferrals`` than at the time of saving, prompts already over the bound are due at
        once and the bound holds again as soon as they are trained.

        Raises:
            ValueError: if the saved ledger does not add up.
        """
        evicted = Counter({reason: int(count) for reason, count in state["evicted_by_reason"].items()})
        ledger = Ledger(state["submitted"], state["trained"], evicted.total(), len(state["outstanding"]))
        if not ledger.balanced:
            raise ValueError(f"the saved ledger is {ledger}; submitted must be trained + evicted + outstanding")
        self._selects = 1
        self._outstanding = {}
        for saved in sorted(state["outstanding"], key=lambda saved: saved["index"]):
            fields = dict(saved)
            counted = self._selects if fields.pop("counted_for_latest_select") else self._selects - 1
            self._outstanding[saved["uid"]] = _Prompt(**fields, counted=counted)
        self._retired = {}
        self._evicted_by_reason = evicted
        self._submitted = state["submitted"]
        self._trained = state["trained"]
        self._ever_deferred = state["ever_deferred"]
        self._completions = state["completions"]
        self._step = state["step"]

    def _slack(self, prompt: _Prompt) -> int:
        return max(0, self._max_deferrals - prompt.deferrals)

    def _preference(self, prompt: _Prompt) -> tuple[int, int, int]:
        assert prompt.completed is not None, prompt
        return (-prompt.deferrals, prompt.completed, prompt.index)

    def _choose(self, sampleable: Collection[str]) -> list[_Prompt] | None:
        """The next batch in order of preference, or None if there is none yet that keeps the bound."""
        candidates = self._announce(sampleable)
        if len(candidates) < self._batch_size:
            return None
        chosen = sorted(candidates, key=self._preference)[: self._batch_size]
        return chosen if self._keeps_bound(chosen) else None

    def _keeps_bound(self, chosen: Sequence[_Prompt]) -> bool:
        """True if, for every j, what is left with slack <= j after this choice fits into j batches."""
        due = Counter(map(self._slack, self._outstanding.values()))
        taken = Counter(map(self._slack, chosen))
        due_within = taken_within = 0
        for j in range(self._max_deferrals + 1):
            due_within += due[j]
            taken_within += taken[j]
            if taken_within < min(self._batch_size, due_within - self._batch_size * j):
                return False
        return True

    def _announce(self, sampleable: Collection[str]) -> list[_Prompt]:
        """The outstanding ones among ``sampleable``; those never announced complete now, in order of admission.

        Rows of a retired prompt may still be listed until verl clears them; they are passed over.
        """
        candidates = []
        for uid in sampleable:
            if prompt := self._outstanding.get(uid):
                candidates.append(prompt)
            elif uid not in self._retired:
                raise ValueError(f"sampleable prompt {uid!r} was never admitted; every admission must pass admit()")
        unannounced = [prompt for prompt in candidates if prompt.completed is None]
        for prompt in sorted(unannounced, key=lambda prompt: prompt.index):
            self.complete(prompt.uid)
        return candidates

    def _defer(self, prompt: _Prompt) -> None:
        if prompt.counted == self._selects:
            return
        prompt.counted = self._selects
        self._ever_deferred += prompt.deferrals == 0
        prompt.deferrals += 1

    def _retire(self, uid: str, *, step: int, trained: bool) -> None:
        prompt = self._outstanding.pop(uid)
        prompt.trained, prompt.retired_step, prompt.retired_at = trained, step, self._selects
        self._retired[uid] = prompt

    def _forget_retired(self) -> None:
        """Retired uids are remembered for late events only; without a limit they would grow over a run."""
        horizon = self._selects - self._max_deferrals - 2
        self._retired = {uid: prompt for uid, prompt in self._retired.items() if prompt.retired_at >= horizon}

    def _lookup(self, uid: str) -> _Prompt:
        prompt = self._outstanding.get(uid) or self._retired.get(uid)
        if prompt is None:
            raise ValueError(f"prompt {uid!r} is neither outstanding nor lately retired")
        return prompt
