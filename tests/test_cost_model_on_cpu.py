"""The cost model of emulated accelerators: its arithmetic, what it refuses, and the constants that are shipped."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_oppo.platform.cost_model import CostModel, shared_progress_s

ROOT = Path(__file__).resolve().parent.parent

COST = CostModel(
    time_scale=2.0,
    device_share_factor=2.0,
    actor_devices_per_reward_device=7.0,
    decode_step_s=0.01,
    decode_sequence_s=0.001,
    decode_cached_token_s=0.00001,
    prefill_call_s=0.02,
    prefill_token_s=0.0001,
    train_token_s=0.0003,
    weight_sync_s=0.5,
)


def shipped_cost() -> CostModel:
    values = OmegaConf.load(ROOT / "verl_oppo" / "config" / "emulate" / "on.yaml")
    return CostModel.from_mapping({key: value for key, value in values.items() if key != "enable"})


def test_costs_are_linear_and_scaled() -> None:
    assert COST.engine_step_s(decode_sequences=16, cached_tokens=1000) == pytest.approx(2 * (0.01 + 0.016 + 0.01))
    assert COST.engine_step_s(prefill_tokens=300) == pytest.approx(2 * (0.01 + 0.03))
    mixed = COST.engine_step_s(300, 16, 1000)
    assert mixed == pytest.approx(COST.engine_step_s(300) + COST.engine_step_s(0, 16, 1000) - 2 * 0.01), (
        "one step's base"
    )
    assert COST.forward_s(128) == pytest.approx(2 * (0.02 + 0.0128))
    assert COST.train_s(1000) == pytest.approx(0.6)
    assert COST.sync_s() == pytest.approx(1.0)
    assert replace(COST, time_scale=1.0).forward_s(128) == pytest.approx(COST.forward_s(128) / 2)


@pytest.mark.parametrize(
    ("actor_devices", "reward_devices", "load"), [(1, 1, 7.0), (7, 1, 1.0), (2, 1, 3.5), (1, 2, 14.0)]
)
def test_reward_device_pays_for_the_actor_devices_that_are_not_there(
    actor_devices: int, reward_devices: int, load: float
) -> None:
    assert COST.reward_load(actor_devices, reward_devices) == pytest.approx(load)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("decode_step_s", -1e-3, "0 or more"),
        ("train_token_s", math.nan, "finite"),
        ("weight_sync_s", math.inf, "finite"),
        ("prefill_call_s", "0.1", "finite"),
        ("prefill_token_s", True, "finite"),
        ("time_scale", 0, "above 0"),
        ("actor_devices_per_reward_device", 0.0, "above 0"),
        ("device_share_factor", 0.9, "1 or more"),
    ],
)
def test_bad_constant_is_refused_by_name(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"^emulate\.{name} is .*allowed: .*{allowed}"):
        replace(COST, **{name: value})


def test_unknown_and_missing_constants_are_refused() -> None:
    with pytest.raises(ValueError, match="emulate.decode_s is not a key"):
        CostModel.from_mapping(asdict(COST) | {"decode_s": 1.0})
    with pytest.raises(ValueError, match="emulate.sync_s is not a key|emulate.weight_sync_s is missing"):
        CostModel.from_mapping({key: value for key, value in asdict(COST).items() if key != "weight_sync_s"})


def test_shipped_constants_follow_from_the_facts_they_cite() -> None:
    cost, flops = shipped_cost(), 0.45 * 312e12
    published = {1: 84.28, 14336: 77.69}
    assert cost.decode_step_s == pytest.approx(1 / published[1], rel=0.01)
    assert cost.decode_step_s > 2 * 7.62e9 / 2.04e12, "not faster than reading the weights"
    per_cached = (1 / published[14336] - 1 / published[1]) / 14335
    assert cost.decode_cached_token_s == pytest.approx(per_cached, rel=0.02)
    assert cost.prefill_call_s == pytest.approx(1 / 40.38, rel=0.01)
    assert cost.prefill_token_s == cost.decode_sequence_s == pytest.approx(2 * 7.07e9 / flops, rel=0.01)
    assert cost.train_token_s == pytest.approx(6 * 7.07e9 / flops, rel=0.01)


def test_progress_on_a_shared_device() -> None:
    assert shared_progress_s(1.0, 0.0, 2.0) == 1.0, "alone"
    assert shared_progress_s(1.0, 1.0, 2.0) == pytest.approx(0.5), "shared all the time"
    assert shared_progress_s(1.0, 0.5, 2.0) == pytest.approx(0.75), "half of the time alone"
    assert shared_progress_s(1.0, 2.0, 2.0) == pytest.approx(1 / 3), "with two others"
    assert shared_progress_s(1.0, 1.0 + 1e-9, 1.7) == pytest.approx(shared_progress_s(1.0, 1.0, 1.7)), "no jump"
    assert shared_progress_s(1.0, 1.0, 1.0) == 1.0, "no contention"
    assert shared_progress_s(0.0, 0.0, 2.0) == 0.0
