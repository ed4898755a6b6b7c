"""The pump: the only issuer of calls to one scorer, one at a time, each with a deadline.

Owned by the stream service, on its event loop. verl's fused workers are async Ray actors: two calls in flight can swap
places on one rank and hang the collectives, so prefill, score and all the rest pass through here. It does not know what
a target computes or where, nor where chunks come from.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl_oppo.scoring.scorer import Chunk, Scored, Trajectory
from verl_oppo.stream.consumer import CallTimes, ConsumerSettings, ConsumerStats, Span
from verl_oppo.stream.hub import ChunkHub, HubCounters
from verl_oppo.stream.target import ScorerTarget, retrieve

logger = logging.getLogger(__name__)

MAX_SPANS = 4096
"""Time spans kept for a plot; the oldest go first."""

Reply = TypeVar("Reply")
Item = TypeVar("Item", Chunk, Trajectory)


class CallGate:
    """Lets one call at a time into the worker processes behind it.

    Shared by the pumps whose targets live in the same processes, as verl fuses critic and reference with the actor.
    Invariant: a broken call breaks the gate for all of them, since its processes may never answer again.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.failure: BaseException | None = None


def new_future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass
class Request:
    """A call that somebody waits for; `answer` may be cancelled by then."""

    what: str
    call: Callable[[], Awaitable[Any]] | None = None
    answer: asyncio.Future[Any] = field(default_factory=new_future)

    def succeed(self, result: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            # One error may be raised many times, and each time would make its traceback longer.
            self.answer.set_exception(error.with_traceback(None))


@dataclass
class ScoreRequest(Request):
    trajectories: list[Trajectory] = field(default_factory=list)
    keep: bool = False

    @property
    def ids(self) -> set[str]:
        return {each.trajectory_id for each in self.trajectories}

    @property
    def tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.trajectories)


class Pump:
    """Calls to one target.

    Invariant: at most one call is in flight; a prefill starts only while the pump is open and nobody waits for an
    answer. Every answer comes, or the scorer's own error, within the deadlines of the calls before it; after a broken
    call no other is made, and every request gets that call's error.
    """

    def __init__(
        self, name: str, target: ScorerTarget, settings: ConsumerSettings, gate: CallGate | None = None
    ) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._target = target
        self._settings = settings
        self._gate = gate or CallGate()
        self._hub = ChunkHub(target.num_ranks, settings.max_held_tokens)
        self._is_open = False
        self._stream_opened = False
        self._requests: deque[Request] = deque()
        self._serving: list[Request] = []
        # Parts of a refused prefill, ever smaller until the trajectory at fault is known.
        self._suspects: deque[list[Chunk]] = deque()
        self._in_flight: tuple[str, float] | None = None
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._stats = ConsumerStats()
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)

    # Asked by the service -------------------------------------------------------------------------------------------

    def push(self, chunks: Sequence[Chunk]) -> None:
        """Takes in chunks and never waits. A malformed one ends the stream of its own trajectory."""
        if self.failure is not None:
            return
        for chunk in chunks:
            try:
                self._hub.put(chunk)
            except ValueError as error:
                self.refuse(chunk.trajectory_id, error)
        self._wake.set()

    def refuse(self, trajectory_id: str, error: ValueError) -> None:
        """Streams no more of this trajectory; a score call says what is wrong with it, if anything is."""
        self._hub.drop([trajectory_id])
        self._stats.trajectories_refused += 1
        level = logging.WARNING if self._stats.trajectories_refused == 1 else logging.DEBUG
        logger.log(level, f"trajectory {trajectory_id} is no longer streamed to {self.name}: {error}")

    async def open(self) -> None:
        """Lets prefill calls begin. Raises what broke the scorer, if anything did."""
        await self._ask("opening the stream", self._open_stream)

    async def close(self, timeout_s: float) -> None:
        """Lets no prefill begin, and waits for the call in flight and those asked for before.

        Raises:
            TimeoutError: they did not end within `timeout_s` seconds; the pump is closed all the same.
            BaseException: what broke the scorer, if anything did. Its processes may still be busy.
        """
        self._is_open = False
        closed = self._enqueue(Request("closing the stream", self._close_stream))
        await asyncio.wait({closed}, timeout=timeout_s)
        if not closed.done():
            raise TimeoutError(f"the stream is not drained within {timeout_s} s; {self.waiting_for()}")
        await closed

    async def score(self, trajectories: Sequence[Trajectory], keep: bool = False) -> list[Scored]:
        """Outputs on the final ids, in the order of the trajectories, whether the pump is open or not.

        What hub and scorer hold of the trajectories is freed, unless `keep`. Raises the scorer's own error: ValueError
        for input that it refuses, anything else if it is broken.
        """
        if not trajectories:
            return []
        what = f"scoring {len(trajectories)} trajectories"
        return await self._enqueue(ScoreRequest(what, trajectories=list(trajectories), keep=keep))

    async def invalidate(self) -> None:
        """Empties the scorer's cache. A trajectory counts again once it is streamed from its start."""

        async def invalidate() -> None:
            self._suspects.clear()
            self._hub.lost_all()
            await self._target.invalidate()

        await self._ask("invalidating the cache", invalidate)

    async def drop(self, trajectory_ids: Collection[str]) -> None:
        """Forgets trajectories here and in the scorer."""
        sent = self._hub.drop(trajectory_ids)
        if sent or self.failure is not None:
            await self._ask(f"dropping {len(sent)} trajectories", lambda: self._target.drop(sent))

    def break_with(self, error: BaseException) -> None:
        """For good: every request, now and later, gets this error; nothing is called or kept any more."""
        if self.failure is not None:
            return
        logger.error(f"the stream to {self.name} has failed", exc_info=error)
        self.failure = error
        self._is_open = False
        self._hub.clear()
        self._suspects.clear()
        for request in (*self._serving, *self._requests):
            request.fail(error)
        self._requests.clear()
        self._wake.set()

    def waiting_for(self) -> str:
        """What is in flight and what was asked for, in words."""
        if self._in_flight is None:
            state = "nothing is in flight"
        else:
            what, since = self._in_flight
            state = f"a call ({what}) is in flight for {time.monotonic() - since:.1f} s"
        waiting = [request.what for request in (*self._serving, *self._requests) if not request.answer.done()]
        more = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
        return f"{self.name}: {state}, asked for: {', '.join(waiting[:3]) or 'nothing'}{more}"

    def stats(self, reset: bool = True) -> ConsumerStats:
        """Counts since the last reset."""
        self._stats.hub = self._hub.counters
        self._stats.tokens_waiting = self._hub.tokens_waiting
        self._stats.spans = list(self._spans)
        stats = copy.deepcopy(self._stats)
        if reset:
            self._stats = ConsumerStats()
            self._hub.counters = HubCounters()
            self._spans.clear()
        return stats

    # The runner -----------------------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> asyncio.Future[Any]:
        if self.failure is not None:
            request.fail(self.failure)
            return request.answer
        if self._runner is None:
            self._runner = asyncio.get_running_loop().create_task(self._run())
        self._requests.append(request)
        self._wake.set()
        return request.answer

    async def _ask(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        return await self._enqueue(Request(what, call))

    async def _run(self) -> None:
        """Requests first, then prefill; whatever goes wrong on the way is told to everybody who waits."""
        try:
            while self.failure is None:
                self._wake.clear()
                async with self._gate.lock:
                    if self._gate.failure is not None:
                        raise self._gate.failure
                    is_busy = await self._step()
                if not is_busy:
                    await self._wake.wait()
        except BaseException as error:
            was_stopped = isinstance(error, asyncio.CancelledError)
            self.break_with(RuntimeError(f"the stream to {self.name} was stopped") if was_stopped else error)
            if not isinstance(error, Exception):
                raise

    async def _step(self) -> bool:
        """One request, one batch of score requests, or one prefill; False if there is nothing to do."""
        if self._requests:
            await self._serve(self._next_requests())
        elif self._is_open and (chunks := self._next_prefill()):
            await self._prefill(chunks)
        else:
            return False
        return True

    async def _call(self, kind: str, call: Callable[[], Awaitable[Reply]]) -> Reply:
        """One call, alone in the target's processes: whoever calls this holds the gate's lock."""
        assert self._gate.lock.locked() and self._in_flight is None
        started, self._in_flight = time.time(), (kind, time.monotonic())
        try:
            task = asyncio.ensure_future(call())
            await asyncio.wait({task}, timeout=self._settings.call_timeout_s)
            return self._answer_of(task, kind)
        except ValueError:
            raise
        except BaseException as error:
            self._gate.failure = error
            raise
        finally:
            self._in_flight = None
            self._count(kind, started, time.time())

    def _answer_of(self, task: asyncio.Future[Reply], kind: str) -> Reply:
        if not task.done():
            # Not awaited: what is stuck may not even end when it is cancelled.
            task.add_done_callback(retrieve)
            task.cancel()
            raise TimeoutError(
                f"{self.name}: a call ({kind}) is not answered within {self._settings.key}.call_timeout_s, "
                f"{self._settings.call_timeout_s} s"
            )
        if task.cancelled():
            raise RuntimeError(f"{self.name}: a call ({kind}) was cancelled by its target")
        return task.result()

    def _count(self, kind: str, started: float, ended: float) -> None:
        if kind in ("prefill", "score"):
            times: CallTimes = getattr(self._stats, kind)
            times.calls += 1
            times.wall_s += ended - started
            self._spans.append((kind, started, ended))

    def _by_rank(self, items: Sequence[Item]) -> list[list[Item]]:
        by_rank: list[list[Item]] = [[] for _ in range(self._target.num_ranks)]
        for item in items:
            by_rank[self._hub.rank_of(item.trajectory_id, len(item.token_ids))].append(item)
        return by_rank

    # Prefill --------------------------------------------------------------------------------------------------------

    def _next_prefill(self) -> list[Chunk]:
        while self._suspects:
            # Some may have been scored or dropped while the refused call was in flight, or since.
            if part := [chunk for chunk in self._suspects.popleft() if not self._hub.has_ended(chunk.trajectory_id)]:
                return part
        return [chunk for chunks in self._hub.take(self._settings.max_tokens_per_prefill) for chunk in chunks]

    async def _prefill(self, chunks: list[Chunk]) -> None:
        try:
            replies = await self._call("prefill", lambda: self._target.prefill(self._by_rank(chunks)))
        except ValueError as error:
            await self._narrow_down(chunks, error)
            return
        self._stats.prefill.add([reply.report for reply in replies])
        cached = {trajectory_id for reply in replies for trajectory_id in reply.cached}
        self._hub.lost(chunk.trajectory_id for chunk in chunks if chunk.trajectory_id not in cached)

    async def _narrow_down(self, chunks: list[Chunk], error: ValueError) -> None:
        """A refused call is repeated in two halves, until one trajectory is left, which is streamed no more."""
        if len(chunks) > 1:
            half = len(chunks) // 2
            self._suspects.extendleft([chunks[half:], chunks[:half]])
            return
        self.refuse(chunks[0].trajectory_id, error)
        await self._call("drop", lambda: self._target.drop([chunks[0].trajectory_id]))

    # Requests -------------------------------------------------------------------------------------------------------

    def _next_requests(self) -> list[Request]:
        """The oldest request, and if it is for scores those right behind it that go well with it."""
        first = self._requests.popleft()
        batch = [first]
        if not isinstance(first, ScoreRequest):
            return batch
        ids, tokens = first.ids, first.tokens
        while self._requests and isinstance(following := self._requests[0], ScoreRequest):
            tokens += following.tokens
            if following.keep != first.keep or ids & following.ids or tokens > self._settings.max_tokens_per_score:
                break
            ids |= following.ids
            batch.append(self._requests.popleft())
        return batch

    async def _serve(self, batch: list[Any]) -> None:
        self._serving = batch
        if isinstance(batch[0], ScoreRequest):
            await self._serve_scores(batch)
        else:
            try:
                batch[0].succeed(await self._call(batch[0].what, batch[0].call))
            except ValueError as error:
                batch[0].fail(error)
        self._serving = []

    async def _serve_scores(self, batch: list[ScoreRequest]) -> None:
        """Where the scorer refuses a batch each request is served alone, so that only the one at fault fails."""
        try:
            scored = await self._score([each for request in batch for each in request.trajectories], batch[0].keep)
        except ValueError as error:
            if len(batch) == 1:
                batch[0].fail(error)
                return
            for request in batch:
                await self._serve_scores([request])
            return
        for request in batch:
            request.succeed([scored[each.trajectory_id] for each in request.trajectories])

    async def _score(self, trajectories: list[Trajectory], keep: bool) -> dict[str, Scored]:
        replies = await self._call("score", lambda: self._target.score(self._by_rank(trajectories), keep))
        self._stats.score.add([reply.report for reply in replies])
        scored = {one.trajectory_id: one for reply in replies for one in reply.scored}
        ids = [each.trajectory_id for each in trajectories]
        assert scored.keys() == set(ids), f"{self.name} scored {sorted(scored)}, asked for were {sorted(ids)}"
        if not keep:
            self._hub.drop(ids)
            return scored
        self._suspects = deque(
            [chunk for chunk in part if chunk.trajectory_id not in scored] for part in self._suspects
        )
        for each in trajectories:
            self._hub.scored(each.trajectory_id, each.token_ids)
        return scored

    async def _open_stream(self) -> None:
        if not self._stream_opened:
            await self._target.open_stream()
        self._stream_opened = self._is_open = True

    async def _close_stream(self) -> None:
        self._is_open = False
        if self._stream_opened:
            await self._target.close_stream()
        self._stream_opened = False
