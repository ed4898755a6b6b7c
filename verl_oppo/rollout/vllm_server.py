"""verl's vLLM server with a token tee: decode outputs pass unchanged, and their tokens go to a sink chunk by chunk.

`register_replica` puts `vLLMReplicaOppo` under verl's name `vllm`, in the process that builds verl's
`LLMServerManager`; that process then connects the servers by `connect_stream`. Everything else is verl's. It does not
know what the sink does with the chunks. Importing it imports vLLM.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from verl_oppo.rollout.tee import Push, RequestStream, TokenTee, trajectory_of
from verl_oppo.scoring.scorer import Chunk
from verl_oppo.scoring.vllm_reward_server import vLLMRewardServer

ABORTED = "abort"
"""vLLM's finish reason of a request that verl's client resumes later."""


def shows_all_tokens(sampling_params: SamplingParams) -> bool:
    """Whether each output holds all tokens of the one sequence so far; so it is in each request of verl's server."""
    return sampling_params.n == 1 and sampling_params.output_kind == RequestOutputKind.CUMULATIVE


async def observed(
    outputs: AsyncGenerator[RequestOutput, None], stream: RequestStream
) -> AsyncGenerator[RequestOutput, None]:
    """The same outputs, each shown to the stream; closing this generator closes `outputs`, which aborts the request."""
    try:
        async for output in outputs:
            if output.outputs:
                completion = output.outputs[0]
                stream.observe(output.prompt_token_ids, completion.token_ids, completion.finish_reason == ABORTED)
            yield output
    finally:
        stream.end()
        await outputs.aclose()


class TeeEngine:
    """vLLM's engine client; only `generate` is more than its own.

    Invariant: a caller gets the engine's outputs themselves, all of them, in order, none held back. Without a sink, and
    for requests that carry no trajectory, it gets the engine's own generator.
    """

    def __init__(self, engine: AsyncLLM, tee: TokenTee) -> None:
        self._engine = engine
        self._tee = tee

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        outputs = self._engine.generate(prompt, sampling_params, request_id, **kwargs)
        trajectory = trajectory_of(request_id) if self._tee.active else None
        if trajectory is None or not shows_all_tokens(sampling_params):
            return outputs
        return observed(outputs, self._tee.open(trajectory))


def push_to(sink: ray.actor.ActorHandle) -> Push:
    """Pushes to an actor's `push(chunks: list[Chunk])`; the reference lives until the actor has answered."""

    def push(chunks: list[Chunk]) -> "asyncio.Future[Any]":
        return asyncio.wrap_future(sink.push.remote(chunks).future())

    return push


class vLLMHttpServerOppo(vLLMHttpServer):
    """verl's server, whose engine is seen through a tee. Invariant: the tee is inert until `connect_stream`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tee = TokenTee()

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        self.engine = TeeEngine(self.engine, self._tee)

    async def connect_stream(self, sink: ray.actor.ActorHandle, chunk_size: int | None) -> None:
        """Push the tokens of training requests that start from now on to `sink.push(list[Chunk])`.

        `chunk_size` in generated tokens; None pushes nothing ("whole response"). Raises ValueError if it is below 1.
        """
        self._tee.connect(push_to(sink), chunk_size)

    async def set_chunk_size(self, chunk_size: int | None) -> None:
        """Raises ValueError if it is below 1."""
        self._tee.set_chunk_size(chunk_size)

    async def stream_stats(self) -> dict[str, Any]:
        """`TokenTee.stats` of this server."""
        return self._tee.stats()


class vLLMReplicaOppo(vLLMReplica):
    """verl's replica: servers of the policy have a tee, those of reward models take chunks, a teacher's are verl's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(self._server_cls())

    def _server_cls(self) -> type[vLLMHttpServer]:
        if self.is_reward_model:
            return vLLMRewardServer
        return vLLMHttpServer if self.is_teacher_model else vLLMHttpServerOppo


def register_replica() -> None:
    """Make verl build `vLLMReplicaOppo` for `rollout.name=vllm` in this process. Safe to call repeatedly."""
    RolloutReplicaRegistry.register("vllm", lambda: vLLMReplicaOppo)
