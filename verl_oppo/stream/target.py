"""What the pump calls: the protocol of a scorer's ranks taken together, and the one on a verl worker group.

It issues one call to all ranks and gathers the answers; that there is one call at a time, and how long it may last, is
the pump's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from verl_oppo.scoring.scorer import Chunk, PrefillReply, ScoreReply, Trajectory

logger = logging.getLogger(__name__)

OTHER_RANKS_S = 10.0
"""Seconds that the other ranks get to answer once one has failed; a collective with a dead rank may never end."""


class ScorerTarget(Protocol):
    """All ranks of one scorer; `scoring.scorer.Scorer` says what the calls do on each of them.

    A ValueError refuses the input: nothing has changed on any rank and the next call is served. Whatever else a call
    raises says that the scorer is broken.
    """

    @property
    def num_ranks(self) -> int: ...

    @property
    def processes(self) -> frozenset[Any]:
        """The worker processes; targets that have some in common never get two calls at a time."""
        return frozenset()

    async def prefill(self, chunks_by_rank: list[list[Chunk]]) -> list[PrefillReply]: ...

    async def score(self, trajectories_by_rank: list[list[Trajectory]], keep: bool = False) -> list[ScoreReply]: ...

    async def invalidate(self) -> None: ...

    async def drop(self, trajectory_ids: list[str]) -> None: ...

    async def open_stream(self) -> None: ...

    async def close_stream(self) -> None: ...


class WorkerGroupTarget:
    """The `oppo_*` methods of `scoring.workers.ScoringMethods` on the raw actor handles of a `RayWorkerGroup`.

    Invariant: a call has ended on all ranks when it returns or raises a ValueError. The worker processes of one rank
    (a tensor-parallel group) get the same arguments, and the answer of the first of them counts.
    """

    def __init__(
        self, handles: Sequence[ActorHandle], prefix: str = "", data_ranks: Sequence[int] | None = None
    ) -> None:
        """`prefix`: "" for a worker group by itself, the role and "_" for one fused by verl, as in "critic_".

        `data_ranks`: the data-parallel rank of each worker, as verl's `RayWorkerGroup._query_dispatch_info` says;
        left out, each worker is a rank by itself.

        `verl.single_controller.ray.base.create_colocated_worker_cls` puts it before each method's name, and
        `RayWorkerGroup.spawn` takes it away again on the group, not on the actors. Raises ValueError if the actors
        have no such methods, or if `data_ranks` leaves out a rank.
        """
        if not handles:
            raise ValueError("handles is empty, allowed is one actor handle per rank")
        probe = f"{prefix}oppo_prefill"
        if not hasattr(handles[0], probe):
            raise ValueError(f"prefix is {prefix!r}, but the workers have no method {probe}: {handles[0]!r}")
        self._handles = list(handles)
        self._prefix = prefix
        self._data_ranks = list(range(len(handles)) if data_ranks is None else data_ranks)
        if len(self._data_ranks) != len(handles) or set(self._data_ranks) != set(range(max(self._data_ranks) + 1)):
            raise ValueError(f"data_ranks is {self._data_ranks}, allowed is one per worker, none left out from 0 on")
        self._first_of_rank = [self._data_ranks.index(rank) for rank in range(max(self._data_ranks) + 1)]

    @property
    def num_ranks(self) -> int:
        return len(self._first_of_rank)

    @property
    def processes(self) -> frozenset[ActorHandle]:
        return frozenset(self._handles)

    async def prefill(self, chunks_by_rank: list[list[Chunk]]) -> list[PrefillReply]:
        return await self._call("oppo_prefill", chunks_by_rank)

    async def score(self, trajectories_by_rank: list[list[Trajectory]], keep: bool = False) -> list[ScoreReply]:
        return await self._call("oppo_score", trajectories_by_rank, **({"keep": True} if keep else {}))

    async def invalidate(self) -> None:
        await self._call("oppo_invalidate")

    async def drop(self, trajectory_ids: list[str]) -> None:
        await self._call("oppo_drop", [trajectory_ids] * self.num_ranks)

    async def open_stream(self) -> None:
        await self._call("oppo_stream_open")

    async def close_stream(self) -> None:
        await self._call("oppo_stream_close")

    async def _call(self, method: str, argument_of_rank: list[Any] | None = None, **kwargs: Any) -> list[Any]:
        """One call on every worker, issued together and gathered together; one answer per rank."""
        assert argument_of_rank is None or len(argument_of_rank) == self.num_ranks
        name = f"{self._prefix}{method}"
        calls = [
            asyncio.ensure_future(getattr(handle, name).remote(*arguments, **kwargs))
            for handle, arguments in zip(self._handles, self._arguments(argument_of_rank), strict=True)
        ]
        try:
            _, unanswered = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if unanswered:
                _, unanswered = await asyncio.wait(unanswered, timeout=OTHER_RANKS_S)
        except asyncio.CancelledError:
            ranks = [rank for rank, call in enumerate(calls) if not call.done()]
            logger.error(f"{name} is given up, no answer from ranks {ranks} of {len(self._handles)}")
            raise
        finally:
            for call in calls:
                call.add_done_callback(retrieve)
        errors = [call.exception() for call in calls if call.done() and call.exception() is not None]
        if not errors:
            return [calls[first].result() for first in self._first_of_rank]
        raise self._worst(errors, name, [rank for rank, call in enumerate(calls) if call in unanswered])

    def _arguments(self, argument_of_rank: list[Any] | None) -> list[tuple[Any, ...]]:
        if argument_of_rank is None:
            return [()] * len(self._handles)
        return [(argument_of_rank[rank],) for rank in self._data_ranks]

    def _worst(self, errors: list[BaseException], name: str, unanswered: list[int]) -> BaseException:
        """The error that explains the others: a death, else what no rank survived, else the refusal."""
        for error in errors:
            if isinstance(error, RayActorError):
                return error
        for error in errors:
            if not isinstance(error, ValueError):
                return error
        if unanswered:
            broken = RuntimeError(f"{name}: ranks {unanswered} of {len(self._handles)} are still busy, others failed")
            broken.__cause__ = errors[0]
            return broken
        return errors[0]


def retrieve(call: asyncio.Future[Any]) -> None:
    """Marks a call's exception as seen, so that asyncio does not report it a second time."""
    if not call.cancelled():
        call.exception()
