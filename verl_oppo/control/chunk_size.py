"""The chunk size: how many new tokens the actor decodes before they are streamed downstream.

The trainer asks for the size at the start of a step and reports at its end what the step cost: generation plus exposed
scoring time per generated token of the batch, so a size that slows decoding down pays for it. It knows steps and
costs only. A size of None is the whole response, i.e. no streaming: streaming must be able to lose to not streaming.

Source: OPPO (arXiv 2509.25762), the intra-step overlap section: candidates of 128, 256 and 512 tokens are tried about
every 50 steps. How the paper scores a trial is not stated; the objective and the medians are ours.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

TRACE_LENGTH = 1000


@dataclass(frozen=True)
class Trial:
    """One observed step. ``size`` in tokens (None: whole response), cost in seconds per generated token."""

    step: int
    size: int | None
    cost_s_per_token: float
    exploring: bool


@dataclass(frozen=True)
class Exploration:
    """One finished exploration: ``medians[i]`` is the median cost of ``candidates[i]``; ``best`` won."""

    first_step: int
    last_step: int
    candidates: tuple[int | None, ...]
    medians: tuple[float, ...]
    best: int | None


class ChunkSizePolicy(Protocol):
    """What the trainer needs of a tuner; ``ChunkSizeTuner`` and ``FixedChunkSize`` have it."""

    def size(self, step: int, *, busy: bool = False) -> int | None: ...

    def observe(self, step: int, cost_s_per_token: float | None) -> None: ...

    def trace(self) -> list[Trial]: ...

    def explorations(self) -> list[Exploration]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def make_chunk_size_policy(
    chunk_size: int | str, candidates: Sequence[int | None], explore_period: int, explore_steps: int
) -> ChunkSizePolicy:
    """``intra_step.chunk_size``: the tuner for ``auto``, else a fixed number of tokens.

    Raises:
        ValueError: as the constructors do.
    """
    if chunk_size == "auto":
        return ChunkSizeTuner(candidates, explore_period, explore_steps)
    return FixedChunkSize(chunk_size)


class FixedChunkSize:
    """The same size at every step; records costs for the report like the tuner. Invariant: ``size`` never changes."""

    def __init__(self, size: int | None) -> None:
        """Raises ValueError unless ``size`` is 1 or more tokens, or None for the whole response."""
        _check_size(size)
        self._size = size
        self._trials: deque[Trial] = deque(maxlen=TRACE_LENGTH)

    def size(self, step: int, *, busy: bool = False) -> int | None:
        """Tokens per chunk at this step."""
        return self._size

    def observe(self, step: int, cost_s_per_token: float | None) -> None:
        """Records what the step cost; None if it was not measured. Raises ValueError as the tuner does."""
        if cost_s_per_token is not None:
            self._trials.append(Trial(step, self._size, _checked_cost(cost_s_per_token), exploring=False))

    def trace(self) -> list[Trial]:
        """The last ``TRACE_LENGTH`` observed steps, oldest first."""
        return list(self._trials)

    def explorations(self) -> list[Exploration]:
        """None: there is nothing to explore."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state: the trace. The size is the config's."""
        return {"trials": [asdict(trial) for trial in self._trials]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the trace, of either kind of policy."""
        self._trials = deque((Trial(**trial) for trial in state["trials"]), maxlen=TRACE_LENGTH)


class ChunkSizeTuner:
    """Explores the candidates every ``explore_period`` steps and runs the best one in between.

    In an exploration the candidates take turns, so that a drift of the response lengths hits all alike, until each was
    observed ``explore_steps`` times; the least median cost wins, at a tie the size in use, then the earlier candidate.
    A busy step (checkpoint or validation due), and one that was not measured, does not count; the turn is taken later.

    Invariant: ``size`` is always one of the candidates; each exploration observes each candidate equally often.
    """

    def __init__(self, candidates: Sequence[int | None], explore_period: int, explore_steps: int) -> None:
        """``candidates`` in tokens, None being the whole response; the first one runs until the first exploration ends.

        ``explore_period`` is counted in steps from the start of one exploration to the start of the next.

        Raises:
            ValueError: if there is no candidate, one is below 1 or occurs twice, ``explore_steps`` is below 1, or
                ``explore_period`` leaves no step for the best one.
        """
        if not candidates or len(set(candidates)) != len(candidates):
            raise ValueError(f"candidates are {list(candidates)}; allowed: one or more chunk sizes, each once")
        for candidate in candidates:
            _check_size(candidate)
        if explore_steps < 1:
            raise ValueError(f"explore_steps is {explore_steps}; it must be 1 or more steps")
        if explore_period <= len(candidates) * explore_steps:
            least = len(candidates) * explore_steps + 1
            raise ValueError(f"explore_period is {explore_period}; allowed: {least} or more steps")
        self._candidates = tuple(candidates)
        self._explore_period = explore_period
        self._explore_steps = explore_steps
        self._best = self._candidates[0]
        self._explored_from: int | None = None
        self._costs: list[list[float]] | None = None
        self._asked: Trial | None = None
        self._trials: deque[Trial] = deque(maxlen=TRACE_LENGTH)
        self._explorations: list[Exploration] = []

    def size(self, step: int, *, busy: bool = False) -> int | None:
        """Tokens per chunk at this step; None is the whole response. Asking again for the same step changes nothing.

        Args:
            step: training step.
            busy: a checkpoint or a validation is due in this step, so its cost says nothing about the chunk size.
        """
        if self._asked is None or self._asked.step != step:
            if self._costs is None and self._is_due(step):
                self._explored_from = step
                self._costs = [[] for _ in self._candidates]
            exploring = self._costs is not None and not busy
            self._asked = Trial(step, self._next_candidate() if exploring else self._best, math.nan, exploring)
        return self._asked.size

    def observe(self, step: int, cost_s_per_token: float | None) -> None:
        """Takes what the step cost, in seconds per generated token; None if it was not measured.

        Raises:
            ValueError: if the cost is negative, NaN or infinite, or ``step`` is not the last one asked for.
        """
        if self._asked is None or self._asked.step != step:
            asked = None if self._asked is None else self._asked.step
            raise ValueError(f"observe() got step {step}; allowed: the step size() was last asked for, {asked}")
        if cost_s_per_token is None:
            return
        trial = Trial(step, self._asked.size, _checked_cost(cost_s_per_token), self._asked.exploring)
        self._trials.append(trial)
        if trial.exploring:
            assert self._costs is not None
            self._costs[self._candidates.index(trial.size)].append(trial.cost_s_per_token)
            self._finish_exploration(step)

    def trace(self) -> list[Trial]:
        """The last ``TRACE_LENGTH`` observed steps, oldest first."""
        return list(self._trials)

    def explorations(self) -> list[Exploration]:
        """Every finished exploration, oldest first."""
        return list(self._explorations)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state, a running exploration included."""
        return {
            "candidates": list(self._candidates),
            "best": self._best,
            "explored_from": self._explored_from,
            "costs": self._costs,
            "trials": [asdict(trial) for trial in self._trials],
            "explorations": [asdict(exploration) for exploration in self._explorations],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict()`` of either kind of policy.

        With other candidates than the saved ones only the trace and a best one that is still a candidate are kept,
        and the next step starts an exploration.
        """
        self._asked = None
        self._trials = deque((Trial(**trial) for trial in state["trials"]), maxlen=TRACE_LENGTH)
        self._explorations = [_exploration_from(saved) for saved in state.get("explorations", [])]
        best = state.get("best", self._candidates[0])
        self._best = best if best in self._candidates else self._candidates[0]
        same = tuple(state.get("candidates", ())) == self._candidates
        self._explored_from = state["explored_from"] if same else None
        self._costs = [list(costs) for costs in state["costs"]] if same and state["costs"] is not None else None

    def _is_due(self, step: int) -> bool:
        return self._explored_from is None or step >= self._explored_from + self._explore_period

    def _next_candidate(self) -> int | None:
        assert self._costs is not None
        turn = min(range(len(self._candidates)), key=lambda i: len(self._costs[i]))
        return self._candidates[turn]

    def _finish_exploration(self, step: int) -> None:
        """Picks the best one once each candidate was observed often enough."""
        assert self._costs is not None and self._explored_from is not None
        if min(map(len, self._costs)) < self._explore_steps:
            return
        medians = tuple(map(median, self._costs))
        winners = [size for size, cost in zip(self._candidates, medians, strict=True) if cost == min(medians)]
        self._best = self._best if self._best in winners else winners[0]
        self._explorations.append(Exploration(self._explored_from, step, self._candidates, medians, self._best))
        self._costs = None


def _check_size(size: int | None) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"chunk size is {size!r}; allowed: 1 or more tokens, or None for the whole response")


def _checked_cost(cost_s_per_token: float) -> float:
    if not math.isfinite(cost_s_per_token) or cost_s_per_token < 0:
        raise ValueError(f"cost_s_per_token is {cost_s_per_token}; allowed: a finite number of 0 or more seconds")
    return float(cost_s_per_token)


def _exploration_from(saved: Mapping[str, Any]) -> Exploration:
    fields = dict(saved)
    fields["candidates"], fields["medians"] = tuple(saved["candidates"]), tuple(saved["medians"])
    return Exploration(**fields)
