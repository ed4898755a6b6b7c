"""Which scorers the trainer opens, drains, empties and turns off, on composed configurations; its calls recorded."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from omegaconf import DictConfig
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base

from verl_oppo.scoring.device_memory import GIB, MemoryNeed
from verl_oppo.scoring.scorer import ScorerStats
from verl_oppo.trainer.streaming import DRAIN_TIMEOUT_S, FusedScorer, IntraStepStream
from verl_oppo.trainer.support import load_oppo_config

INTRA_STEP = "trainer.v1.oppo.intra_step"
ALL_STREAM = (f"{INTRA_STEP}.critic=true", f"{INTRA_STEP}.reference=true")
OWN_POOL, COLOCATED = (f"reward.reward_model.enable_resource_pool={own}" for own in ("true", "false"))
NEED = MemoryNeed(layers=2 * GIB, cache=GIB, activations=GIB)


class RecordedService:
    """In place of the stream service's client: what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def call(self, *call: Any) -> None:
        self.calls.append(call)


@pytest.fixture
def make_stream(compose_config: Callable[..., DictConfig]) -> Callable[..., tuple[IntraStepStream, RecordedService]]:
    def make(*overrides: str) -> tuple[IntraStepStream, RecordedService]:
        config = compose_config(*overrides, config_name="oppo_cpu")
        stream, service = IntraStepStream(config, load_oppo_config(config)), RecordedService()
        stream._client = service
        return stream, service

    return make


def test_a_reward_model_on_its_own_devices_prefills_on_while_the_actor_trains(make_stream) -> None:
    stream, service = make_stream(*ALL_STREAM, OWN_POOL)
    stream.end()
    assert service.calls == [("close", ["critic", "reference"], DRAIN_TIMEOUT_S)]


def test_nothing_is_drained_where_nothing_shares_devices_with_the_actor(make_stream) -> None:
    stream, service = make_stream(OWN_POOL)
    stream.end()
    assert service.calls == []


def test_a_colocated_reward_model_is_drained_with_the_others(make_stream) -> None:
    stream, service = make_stream(*ALL_STREAM, COLOCATED)
    stream.end()
    assert service.calls == [("close", ["reward", "critic", "reference"], DRAIN_TIMEOUT_S)]


def test_a_verify_step_drains_every_scorer(make_stream) -> None:
    stream, service = make_stream(*ALL_STREAM, OWN_POOL)
    stream.end(everything=True)
    assert service.calls == [("close", ["reward", "critic", "reference"], DRAIN_TIMEOUT_S)]


@pytest.mark.parametrize(("kind", "emptied"), [("fsdp", []), ("megatron", []), ("vllm", [("invalidate", "reward")])])
def test_a_plain_score_costs_carried_prefixes_their_cache_only_in_vllm(make_stream, kind, emptied) -> None:
    stream, service = make_stream(f"{INTRA_STEP}.reward={kind}", OWN_POOL)
    stream.forget_rewards()
    assert service.calls == emptied


@pytest.mark.parametrize(
    ("overrides", "ours"),
    [([OWN_POOL], True), ([COLOCATED], False), ([OWN_POOL, "reward.reward_model.enable=false"], False)],
)
def test_without_streaming_verls_manager_stays_where_it_works(make_stream, overrides, ours) -> None:
    stream, _ = make_stream(f"{INTRA_STEP}.enable=false", *overrides)
    verls = trainer_base.RewardLoopManager
    with stream.hooks_into_setup():
        assert (trainer_base.RewardLoopManager is not verls) == ours
    assert trainer_base.RewardLoopManager is verls


# Critic and reference beside an awake rollout engine: how much memory a device has free cannot be chosen on a CPU.


def fused(role: Role, stats: ScorerStats) -> FusedScorer:
    worker = SimpleNamespace(**{f"{role}_oppo_prefill": None})
    group = SimpleNamespace(workers=[worker], oppo_stats=lambda: [stats])
    return FusedScorer(group, role, data_ranks=[0], need=NEED)


@pytest.fixture
def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)


def test_a_scorer_that_does_not_fit_takes_no_chunks_and_the_log_says_what_is_missing(
    make_stream, answers_at_once, caplog: pytest.LogCaptureFixture
) -> None:
    stream, service = make_stream(*ALL_STREAM, f"{INTRA_STEP}.reward=off")
    stream._fused = {
        "critic": fused(Role.Critic, ScorerStats(device_free_bytes=3 * GIB)),
        "reference": fused(Role.ActorRolloutRef, ScorerStats(device_free_bytes=5 * GIB)),
    }
    with caplog.at_level(logging.WARNING):
        stream.begin(chunk_size=None)
    assert [call[:2] for call in service.calls] == [("add_consumer", "reference"), ("open", ["reference"])]
    assert (stream.streams_critic, stream.streams_reference) == (False, True)
    (message,) = caplog.messages
    assert f"{INTRA_STEP}.critic" in message and "3.00 GiB" in message and "gathered weights 2.00 GiB" in message


def test_where_no_scorer_fits_the_step_goes_on_without_a_stream(make_stream, answers_at_once) -> None:
    stream, service = make_stream(f"{INTRA_STEP}.reference=true", f"{INTRA_STEP}.reward=off")
    stream._fused = {"reference": fused(Role.ActorRolloutRef, ScorerStats(weights_offloaded=True))}
    stream.begin(chunk_size=64)
    stream.end()
    assert service.calls == [] and not stream.active and stream.consumers == []
