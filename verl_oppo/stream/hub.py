"""The chunk hub of one scorer: what waits to be prefilled, on which rank, and what may be forgotten.

Called by the pump. Pure Python and numpy; it knows neither calls nor clocks. Losing a chunk here costs time and nothing
else: the score call computes what was never prefilled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from verl_oppo.scoring.prefix_cache import as_ids, common_prefix_length
from verl_oppo.scoring.scorer import Chunk, TokenIds

MAX_TRAJECTORIES = 65536
"""Trajectories with a pin, and ended ones whose late chunks are known for what they are; the oldest go first."""


@dataclass
class HubCounters:
    """Invariant: received = taken + dropped + stale + waiting, in tokens, counted from the first chunk on."""

    chunks_received: int = 0
    """Late chunks of ended trajectories included; their tokens count nowhere."""
    tokens_received: int = 0
    tokens_taken: int = 0
    chunks_dropped: int = 0
    """Chunks that went, wholly or in part, because memory was short or because an earlier one had gone so."""
    tokens_dropped: int = 0
    tokens_stale: int = 0
    """Tokens that nobody needs: repeated, or of a trajectory that ended or was lost before their turn came."""


def no_ids() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass
class Segment:
    """Waiting tokens at absolute positions `offset` to `end - 1`, and how many chunks they came in."""

    offset: int
    ids: np.ndarray
    chunks: int = 1

    @property
    def end(self) -> int:
        return self.offset + len(self.ids)


def contradict(left: Segment, right: Segment) -> bool:
    """Whether the two have different ids at some position."""
    first, last = max(left.offset, right.offset), min(left.end, right.end)
    if first >= last:
        return False
    return not np.array_equal(
        left.ids[first - left.offset : last - left.offset], right.ids[first - right.offset : last - right.offset]
    )


@dataclass
class PinnedTrajectory:
    """Invariant: `waiting` is sorted, its segments lie at or behind `taken`, and no two of them touch."""

    rank: int
    tokens: int = 0
    """Length as far as it is known: its share of the rank's load."""
    taken: int = 0
    """Positions below it went to the scorer."""
    taken_ids: np.ndarray | None = field(default_factory=no_ids)
    """What went to the scorer, int64 [taken]; None where memory was too short to remember it."""
    broken: bool = False
    """Tokens at `taken` are gone: what lies behind them is of no use until they come again."""
    waiting: list[Segment] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return bool(self.waiting) and self.waiting[0].offset == self.taken

    @property
    def tokens_waiting(self) -> int:
        return sum(len(segment.ids) for segment in self.waiting)

    @property
    def tokens_remembered(self) -> int:
        return 0 if self.taken_ids is None else len(self.taken_ids)

    def first_contradicted(self, segment: Segment) -> int | None:
        """The first position where the segment says otherwise than what went to the scorer, None if there is none."""
        if self.taken_ids is None:
            return None
        taken = self.taken_ids[segment.offset : segment.end]
        agreed = common_prefix_length(taken, segment.ids)
        return segment.offset + agreed if agreed < len(taken) else None


class ChunkHub:
    """Waiting chunks, merged per trajectory, each trajectory on one rank until it is dropped.

    Invariant: never more than `max_tokens` tokens are held. Each position of a trajectory is taken in order, without
    gaps and once, unless the scorer has lost the trajectory or a later chunk says otherwise from there on: as in
    `PrefixCache.extend` the later chunk is right.
    """

    def __init__(self, num_ranks: int, max_tokens: int, max_trajectories: int = MAX_TRAJECTORIES) -> None:
        bounds = {"num_ranks": num_ranks, "max_tokens": max_tokens, "max_trajectories": max_trajectories}
        for name, value in bounds.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} of the chunk hub is {value!r}, allowed is an integer of 1 or more")
        self.num_ranks = num_ranks
        self.max_tokens = max_tokens
        self.counters = HubCounters()
        self._max_trajectories = max_trajectories
        self._tokens_waiting = 0
        self._tokens_remembered = 0
        self._loads = [[0, 0] for _ in range(num_ranks)]
        # Order of first sight.
        self._trajectories: OrderedDict[str, PinnedTrajectory] = OrderedDict()
        # Those with waiting tokens, oldest first; a trajectory keeps its place while any of them wait.
        self._queue: OrderedDict[str, None] = OrderedDict()
        # Those whose taken ids are remembered, oldest first.
        self._remembered: OrderedDict[str, None] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    @property
    def tokens_waiting(self) -> int:
        return self._tokens_waiting

    @property
    def tokens_held(self) -> int:
        """Those that wait, and those that were taken and are remembered."""
        return self._tokens_waiting + self._tokens_remembered

    def put(self, chunk: Chunk) -> None:
        """Takes in a chunk, in any order. Raises ValueError, naming the trajectory, if it is malformed."""
        self.counters.chunks_received += 1
        if chunk.trajectory_id in self._ended:
            return
        segment = self._checked(chunk)
        if not len(segment.ids):
            return
        self.counters.tokens_received += len(segment.ids)
        trajectory = self._pinned(chunk.trajectory_id, segment.end)
        if trajectory.broken and segment.offset > trajectory.taken:
            self._count_dropped(segment)
            return
        contradicted = trajectory.first_contradicted(segment)
        if contradicted is not None:
            self._set_taken(chunk.trajectory_id, trajectory, trajectory.taken_ids[:contradicted])
        repeated = min(len(segment.ids), max(0, trajectory.taken - segment.offset))
        self.counters.tokens_stale += repeated
        if repeated == len(segment.ids):
            return
        trajectory.broken = False
        self._merge(trajectory, Segment(segment.offset + repeated, segment.ids[repeated:]))
        self._queue.setdefault(chunk.trajectory_id, None)
        self._make_room()

    def take(self, max_tokens_per_rank: int) -> list[list[Chunk]]:
        """Chunks to prefill now, a list per rank: at most one chunk a trajectory, the longest waiting ones first.

        A chunk that does not fit is cut. Tokens behind a gap keep waiting for what is missing.
        """
        assert max_tokens_per_rank >= 1
        chunks: list[list[Chunk]] = [[] for _ in range(self.num_ranks)]
        room = [max_tokens_per_rank] * self.num_ranks
        for trajectory_id in list(self._queue):
            trajectory = self._trajectories[trajectory_id]
            if not trajectory.is_ready or not room[trajectory.rank]:
                continue
            ids = self._take_from(trajectory_id, trajectory, room[trajectory.rank])
            chunks[trajectory.rank].append(Chunk(trajectory_id, trajectory.taken - len(ids), ids))
            room[trajectory.rank] -= len(ids)
            if not trajectory.waiting:
                del self._queue[trajectory_id]
            if not any(room):
                break
        return chunks

    def rank_of(self, trajectory_id: str, tokens: int = 0) -> int:
        """The trajectory's rank; an unseen one is pinned to the least loaded rank. `tokens`: length known by now."""
        return self._pinned(trajectory_id, tokens).rank

    def drop(self, trajectory_ids: Iterable[str]) -> list[str]:
        """Forgets trajectories for good: late chunks of theirs vanish. Returns those that the scorer has tokens of."""
        sent = []
        for trajectory_id in trajectory_ids:
            if trajectory_id in self._trajectories:
                if self._trajectories[trajectory_id].taken:
                    sent.append(trajectory_id)
                self._forget(trajectory_id)
            self._ended[trajectory_id] = None
            self._ended.move_to_end(trajectory_id)
        while len(self._ended) > self._max_trajectories:
            self._ended.popitem(last=False)
        return sent

    def has_ended(self, trajectory_id: str) -> bool:
        """Whether it was dropped, as far as that is remembered."""
        return trajectory_id in self._ended

    def scored(self, trajectory_id: str, token_ids: TokenIds) -> None:
        """The scorer has, and keeps, exactly these ids of it: nothing of what waits is needed."""
        ids = np.array(as_ids(token_ids))
        self._set_taken(trajectory_id, self._pinned(trajectory_id, len(ids)), ids)
        self._make_room()

    def lost(self, trajectory_ids: Iterable[str]) -> None:
        """The scorer has nothing of these any more: tokens count again once they come again from position 0 on."""
        for trajectory_id in trajectory_ids:
            trajectory = self._trajectories.get(trajectory_id)
            if trajectory is not None and trajectory.taken:
                self._set_taken(trajectory_id, trajectory, no_ids())
                trajectory.broken = True

    def lost_all(self) -> None:
        """The scorer has been emptied."""
        self.lost(list(self._trajectories))

    def clear(self) -> None:
        """Forgets everything but the counters."""
        for trajectory_id in list(self._trajectories):
            self._forget(trajectory_id)
        self._ended.clear()

    # Pins -----------------------------------------------------------------------------------------------------------

    def _pinned(self, trajectory_id: str, tokens: int) -> PinnedTrajectory:
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            rank = min(range(self.num_ranks), key=self._loads.__getitem__)
            trajectory = self._trajectories[trajectory_id] = PinnedTrajectory(rank)
            self._loads[rank][1] += 1
            if len(self._trajectories) > self._max_trajectories:
                self._forget(next(iter(self._trajectories)))
        grown = max(0, tokens - trajectory.tokens)
        trajectory.tokens += grown
        self._loads[trajectory.rank][0] += grown
        return trajectory

    def _forget(self, trajectory_id: str) -> None:
        trajectory = self._trajectories.pop(trajectory_id)
        self._set_taken(trajectory_id, trajectory, no_ids())
        self._loads[trajectory.rank][0] -= trajectory.tokens
        self._loads[trajectory.rank][1] -= 1

    # Waiting tokens -------------------------------------------------------------------------------------------------

    def _checked(self, chunk: Chunk) -> Segment:
        try:
            # A copy: the ids may be a view into a larger message, which would live as long as they wait.
            ids = np.array(as_ids(chunk.token_ids))
        except ValueError as error:
            raise ValueError(f"trajectory {chunk.trajectory_id}: {error}") from error
        if not isinstance(chunk.offset, int | np.integer) or isinstance(chunk.offset, bool) or chunk.offset < 0:
            raise ValueError(
                f"trajectory {chunk.trajectory_id}: chunk offset is {chunk.offset!r}, allowed is 0 or more"
            )
        return Segment(int(chunk.offset), ids)

    def _merge(self, trajectory: PinnedTrajectory, new: Segment) -> None:
        """Joins the segment with all that it touches; where it contradicts them, what lies behind it goes too."""
        waiting = trajectory.waiting
        before = trajectory.tokens_waiting
        first = bisect_left(waiting, new.offset, key=lambda segment: segment.end)
        last = first
        while last < len(waiting) and waiting[last].offset <= new.end:
            last += 1
        touched, joined = waiting[first:last], new
        is_contradicted = any(contradict(segment, new) for segment in touched)
        if touched:
            head = touched[0].ids[: max(0, new.offset - touched[0].offset)]
            tail = no_ids() if is_contradicted else touched[-1].ids[max(0, new.end - touched[-1].offset) :]
            chunks = new.chunks + sum(segment.chunks for segment in touched)
            joined = Segment(new.offset - len(head), np.concatenate([head, new.ids, tail]), chunks)
        waiting[first:] = [joined] if is_contradicted else [joined, *waiting[last:]]
        added = trajectory.tokens_waiting - before
        self._tokens_waiting += added
        self.counters.tokens_stale += len(new.ids) - added

    def _take_from(self, trajectory_id: str, trajectory: PinnedTrajectory, room: int) -> np.ndarray:
        segment = trajectory.waiting[0]
        ids, rest = segment.ids[:room], segment.ids[room:]
        trajectory.taken += len(ids)
        trajectory.waiting[:1] = [Segment(trajectory.taken, rest, segment.chunks)] if len(rest) else []
        self._tokens_waiting -= len(ids)
        self.counters.tokens_taken += len(ids)
        if trajectory.taken_ids is not None:
            trajectory.taken_ids = np.concatenate([trajectory.taken_ids, ids])
            self._tokens_remembered += len(ids)
            self._remembered.setdefault(trajectory_id, None)
        return ids

    def _set_taken(self, trajectory_id: str, trajectory: PinnedTrajectory, ids: np.ndarray) -> None:
        """The scorer holds these ids [tokens] of it and nothing waits."""
        self.counters.tokens_stale += trajectory.tokens_waiting
        self._tokens_waiting -= trajectory.tokens_waiting
        trajectory.waiting.clear()
        self._queue.pop(trajectory_id, None)
        self._tokens_remembered += len(ids) - trajectory.tokens_remembered
        trajectory.taken, trajectory.taken_ids, trajectory.broken = len(ids), ids, False
        if len(ids):
            self._remembered.setdefault(trajectory_id, None)
        else:
            self._remembered.pop(trajectory_id, None)

    def _make_room(self) -> None:
        """What is only remembered goes before what waits.

        Of what waits whole trajectories go, since without the tokens before them the others are of no use.
        """
        while self.tokens_held > self.max_tokens and self._remembered:
            trajectory = self._trajectories[self._remembered.popitem(last=False)[0]]
            self._tokens_remembered -= trajectory.tokens_remembered
            trajectory.taken_ids = None
        while self.tokens_held > self.max_tokens:
            trajectory = self._trajectories[self._queue.popitem(last=False)[0]]
            for segment in trajectory.waiting:
                self._count_dropped(segment)
            self._tokens_waiting -= trajectory.tokens_waiting
            trajectory.waiting.clear()
            trajectory.broken = True

    def _count_dropped(self, segment: Segment) -> None:
        self.counters.chunks_dropped += segment.chunks
        self.counters.tokens_dropped += len(segment.ids)
