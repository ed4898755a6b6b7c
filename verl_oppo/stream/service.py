"""The stream service: one CPU actor between the decoding servers and all scorers, with a hub and a pump for each.

The token tees push to it, the trainer opens, closes and asks for scores through `StreamClient`. It knows neither torch
nor verl, and nothing about tokenizers: a consumer whose model reads other ids than the actor has a translator, which
brings what it needs. (Ray itself imports verl here, when it unpacks the handles of a worker group.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from verl_oppo.scoring.scorer import Chunk, Scored, Trajectory
from verl_oppo.stream.consumer import ConsumerSettings, ConsumerStats
from verl_oppo.stream.pump import CallGate, Pump
from verl_oppo.stream.target import ScorerTarget, retrieve

MAX_CONCURRENT_CALLS = 4096
"""Calls that the actor holds at a time: one for each score request that waits, and pushes need a place too."""
CALL_TIMEOUT_S = 720.0
"""Upper bound of one call to the service; longer than two calls to a scorer may last, so that its own error is seen."""
REPORT_TIMEOUT_S = 5.0
"""Seconds to ask a late service what it waits for."""


class ChunkTranslator(Protocol):
    """Turns chunks of the actor's tokens into chunks of one consumer's own input. Lives in the service's process.

    Chunks come in the order of arrival: repeated ones, gaps and late chunks of forgotten trajectories are possible.
    What is put out may repeat or contradict itself, which the hub sorts out; what hardly changes is of most use.
    """

    def register_prompt(
        self, uid: str, messages: Sequence[Mapping[str, Any]], prompt_length: int | None = None
    ) -> None:
        """The raw messages of a prompt, as a rule before its first chunk, and the actor's tokens of it if known."""
        ...

    def translate(self, chunk: Chunk) -> list[Chunk]:
        """Chunks with ids and offsets of the consumer's input. A ValueError ends the stream of this trajectory."""
        ...

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """These are over; unknown ids are fine."""
        ...


@dataclass
class Consumer:
    """One scorer as the service sees it."""

    pump: Pump
    processes: frozenset[Any]
    gate: CallGate
    translator: ChunkTranslator | None


class StreamService:
    """Hubs and pumps by the name of their consumer ("reward", "critic", "reference").

    Invariant: consumers share nothing but the gate of worker processes they have in common; one that fails is not
    called again and gives everybody its error, the others go on.
    """

    def __init__(self) -> None:
        self._consumers: dict[str, Consumer] = {}

    async def add_consumer(
        self,
        name: str,
        target: ScorerTarget,
        settings: ConsumerSettings,
        translator: ChunkTranslator | None = None,
    ) -> None:
        """Streams to this target too, once it is opened. Raises ValueError if the name is taken."""
        if name in self._consumers:
            raise ValueError(f"consumer {name!r} is there already, allowed is a new name beside {self._names()}")
        gate = self._gate_of(target)
        pump = Pump(name, target, settings, gate)
        self._consumers[name] = Consumer(pump, target.processes, gate, translator)

    async def push(self, chunks: list[Chunk]) -> None:
        """Chunks of the actor's tokens, from the token tees, for every consumer. Raises nothing: see `score`."""
        for consumer in self._consumers.values():
            if consumer.translator is None:
                consumer.pump.push(chunks)
            elif consumer.pump.failure is None:
                consumer.pump.push(translated(chunks, consumer.translator, consumer.pump))

    async def register_prompt(
        self, uid: str, messages: Sequence[Mapping[str, Any]], prompt_length: int | None = None
    ) -> None:
        """See `ChunkTranslator`."""
        for consumer in self._translating():
            consumer.translator.register_prompt(uid, messages, prompt_length)

    async def open(self, names: Sequence[str]) -> None:
        """Lets prefill calls to these begin. Raises what broke one of them, after all were asked."""
        await self._on_each(names, lambda pump: pump.open())

    async def close(self, names: Sequence[str], timeout_s: float) -> None:
        """Returns when no call to these is in flight and none will begin but for a score.

        Raises what broke one of them, or TimeoutError after `timeout_s` seconds, after all were asked.
        """
        await self._on_each(names, lambda pump: pump.close(timeout_s))

    async def score(self, name: str, trajectories: list[Trajectory], keep: bool = False) -> list[Scored]:
        """Outputs on the final ids, in the order of the trajectories; these are over then, unless `keep`.

        Raises the scorer's own error: ValueError for input that it refuses, anything else if it is broken.
        """
        consumer = self._consumer(name)
        scored = await consumer.pump.score(trajectories, keep)
        if consumer.translator is not None and not keep:
            consumer.translator.forget([each.trajectory_id for each in trajectories])
        return scored

    async def invalidate(self, name: str) -> None:
        """The consumer's weights have changed: empties its cache."""
        await self._consumer(name).pump.invalidate()

    async def drop(self, trajectory_ids: list[str]) -> None:
        """These are over for all consumers. Raises what broke one of them, after all were asked."""
        for consumer in self._translating():
            consumer.translator.forget(trajectory_ids)
        await self._on_each(list(self._consumers), lambda pump: pump.drop(trajectory_ids))

    async def stats(self, reset: bool = True) -> dict[str, ConsumerStats]:
        """Counts since the last reset, by consumer."""
        return {name: consumer.pump.stats(reset) for name, consumer in self._consumers.items()}

    async def waiting_for(self) -> str:
        """What each consumer's calls wait for, in words."""
        return "; ".join(consumer.pump.waiting_for() for consumer in self._consumers.values()) or "no consumers"

    def _names(self) -> str:
        return ", ".join(map(repr, self._consumers)) or "none"

    def _consumer(self, name: str) -> Consumer:
        if name not in self._consumers:
            raise ValueError(f"consumer is {name!r}, allowed: {self._names()}")
        return self._consumers[name]

    def _translating(self) -> Iterable[Consumer]:
        return [consumer for consumer in self._consumers.values() if consumer.translator is not None]

    def _gate_of(self, target: ScorerTarget) -> CallGate:
        shared = {id(each.gate): each.gate for each in self._consumers.values() if each.processes & target.processes}
        if len(shared) > 1:
            raise ValueError("a target shares worker processes with two targets that share none, allowed is one pool")
        return next(iter(shared.values()), None) or CallGate()

    async def _on_each(self, names: Sequence[str], call: Callable[[Pump], Awaitable[None]]) -> None:
        pumps = [self._consumer(name).pump for name in names]
        for result in await asyncio.gather(*map(call, pumps), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result


def translated(chunks: list[Chunk], translator: ChunkTranslator, pump: Pump) -> list[Chunk]:
    """The consumer's chunks. A translator that fails otherwise than by ValueError fails the consumer."""
    own: list[Chunk] = []
    for chunk in chunks:
        try:
            own.extend(translator.translate(chunk))
        except ValueError as error:
            pump.refuse(chunk.trajectory_id, error)
        except Exception as error:
            pump.break_with(error)
            return []
    return own


class StreamClient:
    """The service's actor, with a deadline on every call. It may be sent to other processes.

    Invariant: a call returns, or raises within its `timeout_s` and a few seconds to ask what it waited for.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle

    @classmethod
    def start(cls) -> StreamClient:
        """Starts the service; it lives as long as somebody holds its handle."""
        actor = ray.remote(StreamService)
        return cls(actor.options(num_cpus=0, max_concurrency=MAX_CONCURRENT_CALLS).remote())

    def call(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S, **kwargs: Any) -> Any:
        """Calls a method of `StreamService` and waits for its answer.

        Raises:
            TimeoutError: no answer within `timeout_s` seconds; says what the service waits for.
            ray.exceptions.ActorDiedError: the service's process, or a scorer's, is gone.
        """
        answer = getattr(self.handle, method).remote(*args, **kwargs)
        try:
            return ray.get(answer, timeout=timeout_s)
        except GetTimeoutError as error:
            try:
                report = ray.get(self.handle.waiting_for.remote(), timeout=REPORT_TIMEOUT_S)
            except RayError as silence:
                report = f"it does not say what it waits for: {silence}"
            raise late(method, timeout_s, report) from error

    async def call_async(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S, **kwargs: Any) -> Any:
        """`call` for callers on an event loop."""
        answer = asyncio.ensure_future(getattr(self.handle, method).remote(*args, **kwargs))
        await asyncio.wait({answer}, timeout=timeout_s)
        if answer.done():
            return await answer
        report = asyncio.ensure_future(self.handle.waiting_for.remote())
        await asyncio.wait({report}, timeout=REPORT_TIMEOUT_S)
        for abandoned in (answer, report):
            abandoned.add_done_callback(retrieve)
        answered = report.done() and report.exception() is None
        raise late(method, timeout_s, report.result() if answered else "it does not say what it waits for")


def late(method: str, timeout_s: float, report: str) -> TimeoutError:
    return TimeoutError(f"the stream service has not answered {method} within {timeout_s} s; {report}")
