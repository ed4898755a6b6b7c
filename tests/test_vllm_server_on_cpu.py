"""The token tee on a real engine: verl's server with a tiny Qwen2 in this process, sinks as real Ray actors."""

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_oppo.platform import cpu
from verl_oppo.rollout.tee import TokenTee, tag_request, trajectory_id

cpu.export_environment()  # verl's import fixes its platform
sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

import ray  # noqa: E402
from measure_tee import LocalServer  # noqa: E402
from verl.workers.config import RolloutConfig  # noqa: E402
from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

from verl_oppo.rollout import partial, vllm_server  # noqa: E402
from verl_oppo.rollout.vllm_server import TeeEngine, vLLMHttpServerOppo, vLLMReplicaOppo  # noqa: E402
from verl_oppo.scoring.vllm_reward_server import vLLMRewardServer  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # starting an engine takes a minute of CPU time

MAX_MODEL_LEN = 2048
PROMPTS = [[5 + i] * (3 + 4 * i) for i in range(6)]
LONG = 1500
"""Tokens of a response that is still being decoded when the test interferes."""
Contexts = dict[str, list[int]]


@ray.remote(num_cpus=0)
class RecordingSink:
    """Keeps the chunks; answers a push only while it is open, and fails it once told to."""

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        self._open = asyncio.Event()
        self._open.set()
        self._refusal = ""

    async def push(self, chunks: list[Any]) -> None:
        if self._refusal:
            raise ValueError(self._refusal)
        self._chunks += chunks
        await self._open.wait()

    async def close(self) -> None:
        self._open.clear()

    async def open(self) -> None:
        self._open.set()

    async def refuse(self, reason: str) -> None:
        self._refusal = reason

    async def chunks(self) -> list[Any]:
        return self._chunks


@pytest.fixture(scope="module")
def local(shared_ray, tmp_path_factory) -> Iterator[LocalServer]:
    local = LocalServer(tmp_path_factory.mktemp("model"), max_num_seqs=16, max_model_len=MAX_MODEL_LEN)
    yield local
    local.close()


@pytest.fixture
def sink(local) -> Iterator[ray.actor.ActorHandle]:
    sink = RecordingSink.remote()
    yield sink
    ray.kill(sink)


def connect(local: LocalServer, sink: ray.actor.ActorHandle, chunk_size: int | None) -> None:
    local.call(local.server.connect_stream(sink, chunk_size))


async def generate(local: LocalServer, request_id: str, prompt: list[int], num_tokens: int) -> Any:
    sampling_params = {"temperature": 1.0, "ignore_eos": True, "max_tokens": num_tokens, "logprobs": True}
    return await local.server.generate(prompt_ids=prompt, sampling_params=sampling_params, request_id=request_id)


async def until(condition: Any, what: str, deadline_s: float = 100) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"no {what} within {deadline_s} s"
        await asyncio.sleep(0.005)


def assembled(local: LocalServer, sink: ray.actor.ActorHandle) -> Contexts:
    """The contexts that the chunks add up to, once nothing is on its way any more. Repeats must agree, gaps fail."""
    stats = local.server._tee.stats

    async def drain() -> None:
        await until(lambda: not stats()["chunks_waiting"] and not stats()["push_in_flight"], "drained stream")

    local.call(drain())
    contexts: Contexts = {}
    for chunk in ray.get(sink.chunks.remote(), timeout=100):
        context = contexts.setdefault(chunk.trajectory_id, [])
        assert chunk.offset <= len(context), f"{chunk.trajectory_id}: gap before {chunk.offset}"
        again = len(context) - chunk.offset
        assert context[chunk.offset :] == chunk.token_ids[:again]
        context += chunk.token_ids[again:]
    return contexts


def expected(prompt: list[int], token_ids: list[int], chunk_size: int) -> list[int] | None:
    num_pushed = len(token_ids) - len(token_ids) % chunk_size
    return prompt + token_ids[:num_pushed] if num_pushed else None


def without_none(contexts: dict[str, list[int] | None]) -> Contexts:
    return {name: context for name, context in contexts.items() if context is not None}


@pytest.mark.parametrize("chunk_size", [1, 7, 64, None])
def test_chunks_of_concurrent_requests_add_up_to_their_contexts(local, sink, chunk_size):
    """Two sessions of a uid are two trajectories; a request without trajectory (validation) is not streamed."""
    connect(local, sink, chunk_size)
    before = local.call(local.server.stream_stats())
    lengths = [3, 7, 63, 64, 65, 150]
    names = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1)]

    async def load() -> list[Any]:
        jobs = [
            generate(local, tag_request(f"fresh{i}", *name), prompt, length)
            for i, (name, prompt, length) in enumerate(zip(names, PROMPTS, lengths, strict=True))
        ]
        return await asyncio.gather(*jobs, generate(local, "validation", [9, 9], 100))

    *outputs, validation = local.call(load())
    assert [len(output.token_ids) for output in outputs] == lengths
    assert len(validation.token_ids) == 100
    wanted: Contexts = {}
    if chunk_size is not None:
        wanted = without_none(
            {
                trajectory_id(*name): expected(prompt, output.token_ids, chunk_size)
                for name, prompt, output in zip(names, PROMPTS, outputs, strict=True)
            }
        )
    assert assembled(local, sink) == wanted
    stats = local.call(local.server.stream_stats())
    assert stats["tokens_seen"] - before["tokens_seen"] == sum(lengths)
    assert (stats["chunks_pushed"] > before["chunks_pushed"]) == bool(wanted)
    assert stats["chunks_dropped"] == before["chunks_dropped"]


class SpyEngine:
    """The engine, its outputs noted before the tee sees them."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.outputs: list[tuple[Any, tuple[int, ...], bool]] = []
        self.closed = False

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._engine.generate(*args, **kwargs)
        try:
            async for output in outputs:
                self.outputs.append(snapshot(output))
                yield output
        finally:
            self.closed = True
            await outputs.aclose()


def snapshot(output: Any) -> tuple[Any, tuple[int, ...], bool]:
    return output, tuple(output.outputs[0].token_ids), output.finished


@pytest.mark.parametrize("tagged", [True, False])
def test_outputs_pass_unchanged_in_number_order_and_content(local, sink, tagged):
    connect(local, sink, 3)
    spy = SpyEngine(local.stock_engine)
    request_id = tag_request("fresh", "u", 0) if tagged else "validation"
    sampling_params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

    async def through(engine: Any, request_id: str) -> list[tuple[Any, tuple[int, ...], bool]]:
        prompt = {"prompt_token_ids": PROMPTS[2]}
        outputs = engine.generate(prompt=prompt, sampling_params=sampling_params, request_id=request_id)
        return [snapshot(output) async for output in outputs]

    received = local.call(through(TeeEngine(spy, local.server._tee), request_id))
    assert [(id(output), tokens, finished) for output, tokens, finished in received] == [
        (id(output), tokens, finished) for output, tokens, finished in spy.outputs
    ]
    assert spy.closed
    stock = local.call(through(local.stock_engine, "stock"))
    assert received[-1][1:] == stock[-1][1:]
    assert bool(assembled(local, sink)) == tagged


def test_requests_that_show_only_new_tokens_are_left_alone(local, sink):
    connect(local, sink, 1)
    sampling_params = SamplingParams(max_tokens=5, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def run() -> int:
        prompt, request_id = {"prompt_token_ids": [4, 5]}, tag_request("fresh", "u", 0)
        outputs = local.tee_engine.generate(prompt, sampling_params, request_id)
        return sum([len(output.outputs[0].token_ids) async for output in outputs])

    assert local.call(run()) == 5
    assert assembled(local, sink) == {}


def test_abort_in_the_middle_pushes_the_rest_and_resuming_goes_on(local, sink):
    """A resumed request is a new one on prompt + partial tokens, as verl's resuming client sends it."""
    chunk_size = 7
    connect(local, sink, chunk_size)
    names = [("u", 0), ("u", 1), ("v", 0)]
    prompts = PROMPTS[: len(names)]

    async def start_and_abort() -> list[Any]:
        seen = local.server._tee.stats()["tokens_seen"]
        jobs = [
            asyncio.ensure_future(generate(local, tag_request("first", *name), prompt, LONG))
            for name, prompt in zip(names, prompts, strict=True)
        ]
        await until(lambda: local.server._tee.stats()["tokens_seen"] > seen + 60, "60 tokens")
        await local.server.abort_all_requests()
        return await asyncio.gather(*jobs)

    partials = local.call(start_and_abort(), timeout_s=120)
    assert [output.stop_reason for output in partials] == ["aborted"] * len(names)
    contexts = [prompt + output.token_ids for prompt, output in zip(prompts, partials, strict=True)]
    carried = {trajectory_id(*name): context for name, context in zip(names, contexts, strict=True)}
    assert all(len(output.token_ids) > 0 for output in partials)
    assert assembled(local, sink) == carried

    async def resume() -> list[Any]:
        await local.server.resume_generation()
        jobs = [
            generate(local, tag_request("second", *name), context, 20)
            for name, context in zip(names, contexts, strict=True)
        ]
        return await asyncio.gather(*jobs)

    outputs = local.call(resume())
    wanted = {
        trajectory_id(*name): expected(context, output.token_ids, chunk_size)
        for name, context, output in zip(names, contexts, outputs, strict=True)
    }
    assert assembled(local, sink) == wanted


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_caller_that_leaves_early_aborts_the_engines_request(local, sink, how):
    connect(local, sink, 1)
    request_states = local.stock_engine.output_processor.request_states

    async def leave() -> None:
        request_id = tag_request("fresh", "u", 0)
        if how == "cancel":
            job = asyncio.ensure_future(generate(local, request_id, PROMPTS[0], LONG))
            await until(lambda: request_states, "request")
            job.cancel()
            await asyncio.wait([job])
            assert job.cancelled()
        else:
            sampling_params = SamplingParams(max_tokens=LONG, ignore_eos=True)
            outputs = local.server.engine.generate({"prompt_token_ids": PROMPTS[0]}, sampling_params, request_id)
            async for _ in outputs:
                assert request_states
                break
            await outputs.aclose()
        await until(lambda: not request_states, "end of the request")

    local.call(leave())


def test_a_sink_that_does_not_answer_delays_nothing_and_misses_nothing(local, sink):
    connect(local, sink, 1)
    ray.get(sink.close.remote(), timeout=100)
    names = [("u", session) for session in range(len(PROMPTS))]

    async def load() -> list[Any]:
        jobs = [
            generate(local, tag_request("fresh", *name), prompt, 60)
            for name, prompt in zip(names, PROMPTS, strict=True)
        ]
        return await asyncio.gather(*jobs)

    outputs = local.call(load())
    stats = local.call(local.server.stream_stats())
    assert stats["push_in_flight"]
    assert stats["chunks_waiting"] == len(names)
    ray.get(sink.open.remote(), timeout=100)
    wanted = {
        trajectory_id(*name): prompt + output.token_ids
        for name, prompt, output in zip(names, PROMPTS, outputs, strict=True)
    }
    assert assembled(local, sink) == wanted


@pytest.mark.parametrize("fault", ["killed", "refuses"])
def test_a_dead_sink_stops_the_tee_and_not_the_decoding(local, sink, fault, caplog):
    connect(local, sink, 1)
    ray.get(sink.chunks.remote(), timeout=100)
    if fault == "killed":
        ray.kill(sink)
    else:
        ray.get(sink.refuse.remote("no room"), timeout=100)

    async def load() -> Any:
        output = await generate(local, tag_request("fresh", "u", 0), PROMPTS[1], 40)
        await until(lambda: not local.server._tee.active, "end of the stream")
        return output

    with caplog.at_level(logging.WARNING):
        assert len(local.call(load()).token_ids) == 40
        assert len(local.call(generate(local, tag_request("fresh", "u", 1), PROMPTS[1], 40)).token_ids) == 40
    assert len([record for record in caplog.records if "no longer streamed" in record.message]) == 1
    stopped_by = local.call(local.server.stream_stats())["stopped_by"]
    assert ("ActorDiedError" if fault == "killed" else "no room") in stopped_by

    successor = RecordingSink.remote()
    connect(local, successor, 40)
    output = local.call(generate(local, tag_request("fresh", "u", 2), PROMPTS[1], 40))
    assert assembled(local, successor) == {"u_2": PROMPTS[1] + output.token_ids}
    ray.kill(successor)


def test_chunk_size_can_be_set_and_is_checked(local, sink):
    connect(local, sink, None)
    local.call(local.server.set_chunk_size(5))
    output = local.call(generate(local, tag_request("fresh", "u", 0), PROMPTS[0], 9))
    assert assembled(local, sink) == {"u_0": PROMPTS[0] + output.token_ids[:5]}
    with pytest.raises(ValueError, match="allowed is an integer of 1 or more"):
        local.call(local.server.set_chunk_size(0))


def test_without_a_sink_the_caller_gets_the_engines_own_generator():
    own = object()
    engine = SimpleNamespace(generate=lambda *args, **kwargs: own, other="its own")
    tee = TeeEngine(engine, TokenTee())
    assert tee.generate("prompt", SamplingParams(), tag_request("fresh", "u", 0)) is own
    assert tee.other == "its own"
    with pytest.raises(AttributeError):
        tee.absent  # noqa: B018


@pytest.mark.parametrize("role", ["policy", "reward", "teacher"])
def test_the_policys_servers_have_a_tee_and_a_reward_models_take_chunks(role):
    vllm_server.register_replica()
    vllm_server.register_replica()
    replica_cls = RolloutReplicaRegistry.get("vllm")
    assert replica_cls is vLLMReplicaOppo
    config = RolloutConfig(name="vllm", tensor_model_parallel_size=1)
    replica = replica_cls(0, config, None, 1, is_reward_model=role == "reward", is_teacher_model=role == "teacher")
    server_cls = replica.server_class.__ray_actor_class__
    expected = {"policy": vLLMHttpServerOppo, "reward": vLLMRewardServer, "teacher": vLLMHttpServer}
    assert server_cls.__name__ == expected[role].__name__
    assert hasattr(server_cls, "connect_stream") == (role == "policy")
    assert hasattr(server_cls, "oppo_describe") == (role == "reward")


@pytest.mark.parametrize("full_determinism", [True, False])
def test_client_names_the_trajectory_in_training_only(full_determinism):
    rollout = SimpleNamespace(full_determinism=full_determinism)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    client = partial.LLMServerClientOppo(config, None, controller=None, max_inflight=1)
    assert client._vllm_request_id("caller").startswith("oppo|") is False
    token = partial.current_session.set(partial.TokenLedger("uid", 2))
    try:
        ids = {client._vllm_request_id("caller") for _ in range(3)}
    finally:
        partial.current_session.reset(token)
    if full_determinism:
        assert ids == {"caller"}
    else:
        assert len(ids) == 3
        assert all(each.startswith("oppo|uid_2|") for each in ids)
