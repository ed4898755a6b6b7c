"""The stream service as a Ray actor, before a real reward worker fused by verl, and before scorers that fail."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import ActorDiedError
from transformers import Qwen2Config, Qwen2ForSequenceClassification
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.workers.config import RewardModelConfig, RolloutConfig

from verl_oppo.platform import cpu
from verl_oppo.scoring.scorer import CallReport, Chunk, PrefillReply, Scored, ScoreReply, ScorerSettings, Trajectory
from verl_oppo.scoring.workers import RewardWorkerOppo, reward_worker_config
from verl_oppo.stream.consumer import ConsumerSettings
from verl_oppo.stream.service import StreamClient
from verl_oppo.stream.target import WorkerGroupTarget

pytestmark = pytest.mark.timeout(500)
VOCAB_SIZE = 97
LONG_S = 200.0
"""A deadline that only a hanging test meets."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Short, since the paths of Ray's sockets lie below it.
    folder = tempfile.mkdtemp(prefix="ray_")
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
        runtime_env={"env_vars": cpu.cpu_environment()},
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


# A scorer that fails on demand ----------------------------------------------------------------------------------------


# Decorated, so that Ray ships the class by value: its process cannot import this module.
@ray.remote(num_cpus=0)
class ScriptedScorer:
    """One rank whose trajectories' names say what becomes of the call: stuck, bad, or a score."""

    def oppo_prefill(self, chunks: list[Chunk]) -> PrefillReply:
        self._obey(chunks)
        return PrefillReply({chunk.trajectory_id: len(chunk.token_ids) for chunk in chunks}, CallReport(seconds=1.0))

    def oppo_score(self, trajectories: list[Trajectory], keep: bool = False) -> ScoreReply:
        self._obey(trajectories)
        outputs = [Scored(each.trajectory_id, np.float32(each.token_ids), int(keep)) for each in trajectories]
        return ScoreReply(outputs, CallReport(seconds=1.0))

    def oppo_drop(self, trajectory_ids: list[str]) -> None: ...

    def oppo_invalidate(self) -> None: ...

    def oppo_stream_open(self) -> None: ...

    def oppo_stream_close(self) -> None: ...

    def _obey(self, items: list[Any]) -> None:
        for item in items:
            if item.trajectory_id.startswith("stuck"):
                time.sleep(LONG_S)
            if item.trajectory_id.startswith("bad"):
                raise ValueError(f"trajectory {item.trajectory_id}: token id -1")


@pytest.fixture(scope="module")
def client(cluster: None) -> StreamClient:
    return StreamClient.start()


@pytest.fixture(scope="module")
def healthy(cluster: None) -> ray.actor.ActorHandle:
    return ScriptedScorer.remote()


def add(client: StreamClient, name: str, handle: ray.actor.ActorHandle, **settings: Any) -> None:
    client.call("add_consumer", name, WorkerGroupTarget([handle]), ConsumerSettings(**settings), timeout_s=LONG_S)


def trajectory(name: str) -> Trajectory:
    return Trajectory(name, [1, 2, 3])


def test_a_refusal_reaches_its_own_caller_as_a_value_error(client, healthy):
    add(client, "healthy", healthy)
    answers = [client.handle.score.remote("healthy", [trajectory(name)]) for name in ("a", "bad7", "b")]
    assert [one.trajectory_id for one in ray.get(answers[0], timeout=LONG_S)] == ["a"]
    with pytest.raises(ValueError, match="trajectory bad7: token id -1"):
        ray.get(answers[1], timeout=LONG_S)
    assert list(ray.get(answers[2], timeout=LONG_S)[0].outputs) == [1, 2, 3]
    assert client.call("score", "healthy", [trajectory("a")], keep=True, timeout_s=LONG_S)[0].cached_tokens == 1
    assert client.call("score", "healthy", [], timeout_s=LONG_S) == []


def test_a_killed_scorer_ends_the_waiting_scores_with_its_own_error_and_no_other_consumer(client, healthy):
    doomed = ScriptedScorer.remote()
    add(client, "doomed", doomed)
    add(client, "beside", healthy)
    client.call("open", ["doomed"], timeout_s=LONG_S)
    client.call("push", [Chunk("stuck", 0, [1])], timeout_s=LONG_S)
    waiting = [client.handle.score.remote("doomed", [trajectory(name)]) for name in "ab"]
    wait_until(lambda: "asked for: scoring 1 trajectories, scoring" in client.call("waiting_for", timeout_s=LONG_S))
    ray.kill(doomed)
    for answer in waiting:
        with pytest.raises(ActorDiedError):
            ray.get(answer, timeout=LONG_S)
    for method, args in [("score", ("doomed", [trajectory("c")])), ("close", (["doomed", "beside"], LONG_S))]:
        with pytest.raises(ActorDiedError):
            client.call(method, *args, timeout_s=LONG_S)
    assert list(client.call("score", "beside", [trajectory("c")], timeout_s=LONG_S)[0].outputs) == [1, 2, 3]


def test_a_stuck_scorer_is_given_up_at_its_deadline_by_all_consumers_in_its_process(client):
    stuck = ScriptedScorer.remote()
    add(client, "given_up", stuck, call_timeout_s=2.0)
    add(client, "same_process", stuck)
    answers = [client.handle.score.remote("given_up", [trajectory(name)]) for name in ("stuck", "a")]
    for answer in answers:
        with pytest.raises(
            TimeoutError, match=r"given_up: a call \(score\) is not answered within .*call_timeout_s, 2.0 s"
        ):
            ray.get(answer, timeout=LONG_S)
    with pytest.raises(TimeoutError, match=r"given_up: a call \(score\) is not answered"):
        client.call("score", "same_process", [trajectory("b")], timeout_s=LONG_S)


def test_a_caller_gives_up_at_its_own_deadline_and_says_what_it_waited_for(client):
    add(client, "slow", ScriptedScorer.remote())
    expected = r"has not answered score within 0.2 s; .*slow: a call \(score\) is in flight for .* asked for: scoring 1"
    with pytest.raises(TimeoutError, match=expected):
        client.call("score", "slow", [trajectory("stuck")], timeout_s=0.2)

    async def ask() -> None:
        assert await client.call_async("stats", timeout_s=LONG_S) is not None
        await client.call_async("score", "slow", [trajectory("a")], timeout_s=0.2)

    with pytest.raises(TimeoutError, match=expected):
        asyncio.run(ask())
    with pytest.raises(TimeoutError, match="the stream is not drained within 0.1 s; slow: a call"):
        client.call("close", ["slow"], 0.1, timeout_s=LONG_S)


def test_a_service_that_is_gone_is_an_error_at_once(cluster):
    client = StreamClient.start()
    assert client.call("waiting_for", timeout_s=LONG_S) == "no consumers"
    ray.kill(client.handle)

    def is_gone() -> bool:
        """`ray.kill` returns before the actor is dead: it may answer once more."""
        try:
            client.call("waiting_for", timeout_s=LONG_S)
        except ActorDiedError:
            return True
        return False

    wait_until(is_gone)
    with pytest.raises(ActorDiedError):
        client.call("stats", timeout_s=LONG_S)
    with pytest.raises(ActorDiedError):
        asyncio.run(client.call_async("stats", timeout_s=LONG_S))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# A real reward model, in a worker group fused by verl ----------------------------------------------------------------


def save_reward_model(folder: Path) -> Qwen2ForSequenceClassification:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Ten times the default: with nearly uniform attention a wrong prefix would hardly show.
        initializer_range=0.2,
        pad_token_id=0,
        num_labels=1,
        dtype=torch.float32,
    )
    model = Qwen2ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model


def reward_group(folder: Path) -> RayWorkerGroup:
    """One rank under the role "reward" of a fused worker, as verl's trainer builds critic and reference."""
    reward_model = RewardModelConfig(
        enable=True, model_path=str(folder), rollout=RolloutConfig(name="vllm", dtype="float32")
    )
    config = reward_worker_config(reward_model, model={"load_tokenizer": False})
    worker = RayClassWithInitArgs(ray.remote(RewardWorkerOppo), config=config)
    return RayWorkerGroup(
        RayResourcePool([1], use_gpu=False, max_colocate_count=1, name_prefix="stream_reward"),
        create_colocated_worker_cls({"reward": worker}),
        device_name="cpu",
    )


def plain_scores(model: Qwen2ForSequenceClassification, sequences: list[np.ndarray]) -> list[float]:
    """Scores of the model itself, one sequence at a time."""
    with torch.no_grad():
        return [model(input_ids=torch.from_numpy(ids)[None]).logits.item() for ids in sequences]


def test_streamed_scores_of_a_real_reward_model_are_the_plain_ones(client, tmp_path):
    model = save_reward_model(tmp_path)
    group = reward_group(tmp_path)
    reward = group.spawn(["reward"])["reward"]
    reward.reset()
    settings = ScorerSettings(cache_bytes=4 << 20, longest_trajectory=128, block_size=16)
    assert [stats.cached_tokens for stats in ray.get(reward.oppo_setup(settings), timeout=LONG_S)] == [0]
    target = WorkerGroupTarget(group.workers, "reward_")
    client.call("add_consumer", "reward", target, ConsumerSettings(), timeout_s=LONG_S)

    rng = np.random.default_rng(0)
    sequences = {f"t{length}": rng.integers(1, VOCAB_SIZE, length) for length in (3, 40, 66, 100)}
    expected = plain_scores(model, list(sequences.values()))
    client.call("open", ["reward"], timeout_s=LONG_S)
    for offset in range(0, 98, 14):
        doubled = [Chunk(name, 0, ids[: offset + 14]) for name, ids in sequences.items()]
        chunks = [Chunk(name, offset + 14, ids[offset + 14 : offset + 20]) for name, ids in sequences.items()]
        client.call("push", [*chunks, Chunk("bad", offset, [VOCAB_SIZE]), *doubled], timeout_s=LONG_S)

    def is_streamed() -> bool:
        stats = client.call("stats", reset=False, timeout_s=LONG_S)["reward"]
        return stats.trajectories_refused == 1 and stats.tokens_waiting == 0

    wait_until(is_streamed)
    client.call("push", [Chunk(name, 0, ids[:98]) for name, ids in sequences.items()], timeout_s=LONG_S)
    client.call("close", ["reward"], LONG_S, timeout_s=LONG_S)
    final = [Trajectory(name, ids) for name, ids in sequences.items()]
    streamed = client.call("score", "reward", final, timeout_s=LONG_S)
    plain = client.call("score", "reward", [Trajectory(f"plain_{t.trajectory_id}", t.token_ids) for t in final])
    stats = client.call("stats", timeout_s=LONG_S)["reward"]

    for scored in (streamed, plain):
        assert [one.last for one in scored] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert [one.cached_tokens for one in plain] == [0, 0, 0, 0]
    assert [one.cached_tokens for one in streamed] == [3, 40, 66, 100]
    assert stats.score.report.tokens_cached == 209 and stats.prefill.report.tokens_computed == 209
    assert 1 <= stats.prefill.calls == len([span for span in stats.spans if span[0] == "prefill"])
    assert 0 < stats.prefill.busy_s <= stats.prefill.wall_s and 0 < stats.score.busy_s <= stats.score.wall_s
    with pytest.raises(ValueError, match=f"trajectory bad: token id {VOCAB_SIZE}"):
        client.call("score", "reward", [Trajectory("bad", [VOCAB_SIZE])], timeout_s=LONG_S)

    ray.kill(group.workers[0])
    with pytest.raises(ActorDiedError):
        client.call("score", "reward", final, timeout_s=LONG_S)
