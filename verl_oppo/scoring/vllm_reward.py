"""Reward servers as a target of the stream: growing prefixes warm vLLM's prefix cache, one replica per trajectory.

Lives in the stream service, on handles of `vllm_reward_server.vLLMRewardServer`; imports no vLLM. The pump pins a
trajectory to a rank, which is a replica here, so that its final request finds what its prefixes have cached. It knows
nothing about tokenizers: the ids are the reward model's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.actor import ActorHandle

from verl_oppo.scoring.growing_text import extended
from verl_oppo.scoring.prefix_cache import as_ids
from verl_oppo.scoring.scorer import CallReport, Chunk, PrefillReply, Scored, ScoreReply, Trajectory

UNUSABLE_TOKENS = 1
"""Of `max_model_len`: vLLM's scheduler keeps a place for a sampled token (`Scheduler.schedule`, `num_new_tokens`), also
of a request that samples none. One of the full length whose prefill is chunked is never finished and never refused."""


@dataclass(frozen=True)
class RewardServerInfo:
    """What a reward server serves."""

    block_size: int
    """Tokens of a block of its prefix cache: only full blocks are found again."""
    longest_input: int
    """Tokens of the longest input it answers."""
    caches_prefixes: bool
    """False for models whose attention or pooling looks ahead: streaming would hide nothing."""
    classifies: bool


class VllmRewardTarget:
    """A `stream.target.ScorerTarget` whose ranks are replicas of verl's reward server.

    Invariant: a replica is asked for a prefix only when that has a full block more than the last time, and never for
    more than its context; a score is asked for with the final ids, whatever was prefilled.
    """

    def __init__(self, servers: Sequence[ActorHandle], infos: Sequence[RewardServerInfo]) -> None:
        """First server of each replica, and what each says of itself (`oppo_describe`)."""
        if not servers or len(servers) != len(infos):
            raise ValueError(f"{len(servers)} servers with {len(infos)} descriptions, allowed is one of each or more")
        self._servers = list(servers)
        self._infos = list(infos)
        self._known: dict[str, np.ndarray] = {}
        self._prefilled: dict[str, int] = {}

    @property
    def num_ranks(self) -> int:
        return len(self._servers)

    @property
    def processes(self) -> frozenset[Any]:
        """None that another target shares; vLLM orders its own requests."""
        return frozenset()

    async def prefill(self, chunks_by_rank: list[list[Chunk]]) -> list[PrefillReply]:
        return await asyncio.gather(*map(self._prefill, range(self.num_ranks), chunks_by_rank))

    async def score(self, trajectories_by_rank: list[list[Trajectory]], keep: bool = False) -> list[ScoreReply]:
        """`Scored.outputs` holds the score alone."""
        replies = await asyncio.gather(*map(self._score, range(self.num_ranks), trajectories_by_rank))
        if not keep:
            self._forget(each.trajectory_id for trajectories in trajectories_by_rank for each in trajectories)
        return replies

    async def invalidate(self) -> None:
        """Empties the servers' prefix caches."""
        self._forget(list(self._known))
        await asyncio.gather(*[server.clear_kv_cache.remote() for server in self._servers])

    async def drop(self, trajectory_ids: list[str]) -> None:
        """Forgets the ids; vLLM's blocks go when their turn comes."""
        self._forget(trajectory_ids)

    async def open_stream(self) -> None:
        """Nothing to do: the servers are never put to sleep."""

    async def close_stream(self) -> None:
        """Nothing to do, see `open_stream`."""

    async def _prefill(self, rank: int, chunks: list[Chunk]) -> PrefillReply:
        started = time.monotonic()
        report = CallReport()
        names = dict.fromkeys(chunk.trajectory_id for chunk in chunks if self._extend(chunk, report))
        due = self._due(rank, names)
        report.trajectories, report.forwards = len(names), int(bool(due))
        if due:
            found = await self._servers[rank].oppo_prefill.remote(due)
            report.tokens_computed = sum(len(ids) - found[name] for name, ids in due.items())
            self._prefilled.update({name: len(ids) for name, ids in due.items()})
        report.seconds = time.monotonic() - started
        return PrefillReply({name: self._prefilled.get(name, 0) for name in names}, report)

    def _extend(self, chunk: Chunk, report: CallReport) -> bool:
        known = self._known.get(chunk.trajectory_id, np.empty(0, dtype=np.int64))
        ids = extended(known, chunk)
        if ids is None:
            report.chunks_ignored += 1
            return chunk.trajectory_id in self._known
        if not np.array_equal(ids[: len(known)], known):
            self._prefilled.pop(chunk.trajectory_id, None)
        self._known[chunk.trajectory_id] = ids
        return True

    def _due(self, rank: int, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Whole blocks of each trajectory that has more of them than were prefilled."""
        info = self._infos[rank]
        due = {}
        for name in names:
            length = min(len(self._known[name]), info.longest_input)
            length -= length % info.block_size
            if length > self._prefilled.get(name, 0):
                due[name] = self._known[name][:length]
        return due

    async def _score(self, rank: int, trajectories: list[Trajectory]) -> ScoreReply:
        started = time.monotonic()
        server = self._servers[rank]
        final = [as_ids(each.token_ids) for each in trajectories]
        answers = await asyncio.gather(
            *[server.oppo_score.remote(each.trajectory_id, ids) for each, ids in zip(trajectories, final, strict=True)]
        )
        scored = [
            Scored(each.trajectory_id, np.array([score], dtype=np.float32), cached)
            for each, (score, cached) in zip(trajectories, answers, strict=True)
        ]
        tokens_cached = sum(each.cached_tokens for each in scored)
        report = CallReport(
            trajectories=len(trajectories),
            tokens_computed=sum(map(len, final)) - tokens_cached,
            tokens_cached=tokens_cached,
            forwards=int(bool(trajectories)),
            seconds=time.monotonic() - started,
        )
        return ScoreReply(scored, report)

    def _forget(self, trajectory_ids: Iterable[str]) -> None:
        for trajectory_id in trajectory_ids:
            self._known.pop(trajectory_id, None)
            self._prefilled.pop(trajectory_id, None)
