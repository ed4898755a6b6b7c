"""A scorer in the test's own process that is slow, stuck or dying on demand, and what tests of the pump say to it."""

import asyncio

import numpy as np

from verl_oppo.scoring.prefix_cache import PrefixCache
from verl_oppo.scoring.scorer import CallReport, Chunk, PrefillReply, Scored, ScoreReply, Trajectory
from verl_oppo.stream.consumer import ConsumerSettings
from verl_oppo.stream.pump import Pump

LONG_S = 30.0
"""A deadline that only a hanging test meets."""


class FakeScorer:
    """A target in this process, slow, stuck or dying on demand; its score is the running sum of the ids.

    It refuses ids below 0, as a scorer refuses ids outside its vocabulary, before anything has changed.
    """

    def __init__(self, num_ranks: int = 1, processes: str = "own") -> None:
        self.num_ranks = num_ranks
        self.processes = frozenset([processes])
        self.caches = [PrefixCache(num_blocks=1000, block_size=4, lookahead=0) for _ in range(num_ranks)]
        self.calls: list[tuple[str, list[str]]] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.called = asyncio.Event()
        self.breaks_with: BaseException | None = None
        self.in_flight = 0

    async def _begin(self, method: str, names: list[str]) -> None:
        self.calls.append((method, names))
        self.called.set()
        assert self.in_flight == 0, "one call at a time"
        self.in_flight += 1
        try:
            await self.goes_on.wait()
            await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
        if self.breaks_with is not None:
            raise self.breaks_with

    def _check(self, items_by_rank) -> None:
        for item in (item for items in items_by_rank for item in items):
            if min(item.token_ids, default=0) < 0:
                raise ValueError(f"trajectory {item.trajectory_id}: token id {min(item.token_ids)}")

    async def prefill(self, chunks_by_rank) -> list[PrefillReply]:
        await self._begin("prefill", names_of(chunks_by_rank))
        self._check(chunks_by_rank)
        replies = []
        for cache, chunks in zip(self.caches, chunks_by_rank, strict=True):
            known = {chunk.trajectory_id for chunk in chunks if cache.extend(chunk)}
            report = CallReport(
                tokens_computed=sum(len(chunk.token_ids) for chunk in chunks), seconds=float(len(chunks))
            )
            replies.append(PrefillReply({name: len(cache.known(name)) for name in known}, report))
        return replies

    async def score(self, trajectories_by_rank, keep: bool = False) -> list[ScoreReply]:
        await self._begin("score", names_of(trajectories_by_rank))
        self._check(trajectories_by_rank)
        replies = []
        for cache, trajectories in zip(self.caches, trajectories_by_rank, strict=True):
            scored = []
            for each in trajectories:
                before = cache.known(each.trajectory_id) if each.trajectory_id in cache else np.empty(0)
                cache.rewrite(each.trajectory_id, np.asarray(each.token_ids))
                outputs = np.cumsum(each.token_ids).astype(np.float32)
                scored.append(Scored(each.trajectory_id, outputs, len(before)))
            if not keep:
                cache.drop(each.trajectory_id for each in trajectories)
            replies.append(
                ScoreReply(scored, CallReport(tokens_cached=sum(s.cached_tokens for s in scored), seconds=2.0))
            )
        return replies

    async def invalidate(self) -> None:
        await self._begin("invalidate", [])
        for cache in self.caches:
            cache.clear()

    async def drop(self, trajectory_ids) -> None:
        await self._begin("drop", sorted(trajectory_ids))
        for cache in self.caches:
            cache.drop(trajectory_ids)

    async def open_stream(self) -> None:
        await self._begin("open_stream", [])

    async def close_stream(self) -> None:
        await self._begin("close_stream", [])

    def hold(self) -> None:
        """The next call is slow, until `release`."""
        self.goes_on.clear()
        self.called.clear()

    def release(self) -> None:
        self.goes_on.set()

    def made(self, *methods: str) -> list[tuple[str, list[str]]]:
        return [call for call in self.calls if call[0] in methods]


def names_of(items_by_rank) -> list[str]:
    return [item.trajectory_id for items in items_by_rank for item in items]


def chunk(name: str, offset: int = 0, length: int = 4) -> Chunk:
    return Chunk(name, offset, list(range(offset, offset + length)))


def trajectory(name: str, length: int = 8) -> Trajectory:
    return Trajectory(name, list(range(length)))


def sums(length: int = 8) -> list[int]:
    return list(np.cumsum(range(length)))


async def opened(target: FakeScorer, **settings) -> Pump:
    pump = Pump("critic", target, ConsumerSettings(**{"call_timeout_s": LONG_S} | settings))
    await pump.open()
    return pump


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def settle() -> None:
    """Until everything has happened that can: the fake scorer answers within a few turns of the event loop."""
    await turns(300)


async def soon(call) -> asyncio.Task:
    """The call as a task that has got as far as it can without the scorer."""
    task = asyncio.ensure_future(call)
    await turns(5)
    return task
