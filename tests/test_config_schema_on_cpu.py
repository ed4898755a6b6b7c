"""trainer.v1.oppo: defaults, and a ValueError with key, value and what is allowed for every bad value."""

import dataclasses
import re

import pytest

from verl_oppo.config import schema
from verl_oppo.config.schema import InterStepConfig, IntraStepConfig, OppoConfig


def test_an_empty_mapping_gives_the_defaults():
    config = OppoConfig.from_mapping({})
    assert config == OppoConfig.from_mapping(None) == OppoConfig()
    inter_step = {
        "enable": True,
        "rule": "least_squares",
        "delta_init": 4,
        "delta_min": 0,
        "delta_max": 16,
        "delta_inc": 1,
        "delta_dec": 1,
        "window": 8,
        "max_deferrals": 4,
        "max_inflight_per_replica": 900,
    }
    intra_step = {
        "enable": True,
        "reward": "auto",
        "critic": False,
        "reference": False,
        "chunk_size": "auto",
        "candidates": (128, 256, 512, None),
        "explore_period": 50,
        "explore_steps": 3,
        "verify": 0,
    }
    assert inter_step.items() <= dataclasses.asdict(config.inter_step).items()
    assert intra_step.items() <= dataclasses.asdict(config.intra_step).items()
    assert config.algorithm is None


def test_values_are_taken_over():
    config = OppoConfig.from_mapping(
        {
            "inter_step": {"rule": "paper", "window": 2, "delta_init": 0, "delta_max": 0, "max_deferrals": 0},
            "intra_step": {"reward": "fsdp", "chunk_size": 64, "candidates": [64, None], "explore_period": 1},
            "algorithm": "online_dpo",
        }
    )
    assert (config.inter_step.rule, config.inter_step.window, config.inter_step.delta_max) == ("paper", 2, 0)
    assert (config.intra_step.chunk_size, config.intra_step.candidates) == (64, (64, None))
    assert config.algorithm == "online_dpo"


@pytest.mark.parametrize(
    ("section", "key", "value", "allowed"),
    [
        ("inter_step", "enable", "yes", "true or false"),
        ("inter_step", "enable", 1, "true or false"),
        ("inter_step", "rule", "greedy", "one of least_squares, paper, proportional, constant"),
        ("inter_step", "rule", None, "one of least_squares"),
        ("inter_step", "delta_init", -1, "a whole number of 0 or more"),
        ("inter_step", "delta_init", 17, "delta_min = 0 to delta_max = 16"),
        ("inter_step", "delta_init", True, "a whole number"),
        ("inter_step", "delta_min", -1, "a whole number of 0 or more"),
        ("inter_step", "delta_min", 17, "0 to delta_max = 16"),
        ("inter_step", "delta_min", 5, None),
        ("inter_step", "delta_max", -1, "a whole number of 0 or more"),
        ("inter_step", "delta_max", 16.0, "a whole number"),
        ("inter_step", "delta_inc", 0, "a whole number of 1 or more"),
        ("inter_step", "delta_dec", 0, "a whole number of 1 or more"),
        ("inter_step", "window", 1, "a whole number of 3 or more (for rule least_squares)"),
        ("inter_step", "window", 2, "a whole number of 3 or more (for rule least_squares)"),
        ("inter_step", "window", None, "a whole number"),
        ("inter_step", "max_deferrals", -1, "a whole number of 0 or more"),
        ("inter_step", "max_deferrals", "4", "a whole number"),
        ("inter_step", "stall_timeout_s", 0, "a whole number of 1 or more"),
        ("inter_step", "max_inflight_per_replica", 0, "a whole number from 1 to 984"),
        ("inter_step", "max_inflight_per_replica", 985, "max_concurrency = max(1000, max_num_seqs + 16)"),
        ("intra_step", "enable", None, "true or false"),
        ("intra_step", "critic", "auto", "true or false"),
        ("intra_step", "reference", 0, "true or false"),
        ("intra_step", "reward", "sglang", "one of auto, off, vllm, fsdp, megatron"),
        ("intra_step", "reward", False, "one of auto, off, vllm, fsdp, megatron"),
        ("intra_step", "chunk_size", 0, "auto or a whole number of 1 or more tokens"),
        ("intra_step", "chunk_size", "whole", "auto or a whole number of 1 or more tokens"),
        ("intra_step", "chunk_size", True, "auto or a whole number of 1 or more tokens"),
        ("intra_step", "chunk_size", None, "auto or a whole number of 1 or more tokens"),
        ("intra_step", "candidates", [], "a list of one or more chunk sizes"),
        ("intra_step", "candidates", 128, "a list of one or more chunk sizes"),
        ("intra_step", "candidates", [128, 128], "each chunk size once"),
        ("intra_step", "explore_period", 0, "a whole number of 1 or more"),
        ("intra_step", "explore_period", 12, "above candidates x explore_steps = 12 steps"),
        ("intra_step", "explore_steps", 0, "a whole number of 1 or more"),
        ("intra_step", "verify", -1, "a whole number of 0 or more"),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_what_is_allowed(section, key, value, allowed):
    if allowed is None:
        value, allowed = 5, "delta_min = 5 to delta_max = 16"
        message = f"trainer.v1.oppo.{section}.delta_init is 4; allowed: {allowed}"
    else:
        message = f"trainer.v1.oppo.{section}.{key} is {value!r}; allowed: "
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        OppoConfig.from_mapping({section: {key: value}})
    assert allowed in str(error.value)


@pytest.mark.parametrize("candidate", [0, True, "128", 1.5])
def test_a_bad_candidate_is_named_by_its_position(candidate):
    message = f"trainer.v1.oppo.intra_step.candidates[1] is {candidate!r}; allowed: a whole number of 1 or more"
    with pytest.raises(ValueError, match=re.escape(message)):
        OppoConfig.from_mapping({"intra_step": {"candidates": [64, candidate]}})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"interstep": {}},
            "trainer.v1.oppo.interstep is not a key of OPPO; allowed under trainer.v1.oppo: inter_step",
        ),
        (
            {"inter_step": {"delta": 1}},
            "trainer.v1.oppo.inter_step.delta is not a key of OPPO; allowed under .*: enable",
        ),
        ({"intra_step": {"chunk": 1}}, "trainer.v1.oppo.intra_step.chunk is not a key of OPPO; .*chunk_size"),
        ({"inter_step": 4}, "trainer.v1.oppo.inter_step is 4; allowed: a mapping with the keys enable, rule"),
        ({"algorithm": ""}, "trainer.v1.oppo.algorithm is ''; allowed: null or one of online_dpo"),
        ({"algorithm": 3}, "trainer.v1.oppo.algorithm is 3"),
    ],
)
def test_unknown_keys_and_wrong_shapes_are_refused(mapping, message):
    with pytest.raises(ValueError, match=message):
        OppoConfig.from_mapping(mapping)


def test_delta_max_must_fit_the_deferral_bound():
    config = OppoConfig.from_mapping({"inter_step": {"delta_max": 16, "max_deferrals": 2}})
    config.check_batch(8)
    message = r"inter_step.delta_max is 16; allowed: 0 to 14 = data.train_batch_size \(7\) x max_deferrals \(2\)"
    with pytest.raises(ValueError, match=message):
        config.check_batch(7)


def test_no_deferral_allows_no_delta_unless_inter_step_is_off():
    never = {"max_deferrals": 0, "delta_max": 1, "delta_init": 0}
    with pytest.raises(ValueError, match="delta_max is 1; allowed: 0 to 0"):
        OppoConfig.from_mapping({"inter_step": never}).check_batch(64)
    OppoConfig.from_mapping({"inter_step": {**never, "enable": False}}).check_batch(64)
    OppoConfig.from_mapping({"inter_step": {**never, "delta_max": 0}}).check_batch(64)


def test_inter_step_switched_off_has_no_delta():
    on, off = InterStepConfig(delta_min=2), InterStepConfig(delta_min=2, enable=False)
    assert on.effective is on
    assert (off.effective.rule, off.effective.delta_init, off.effective.delta_max) == ("constant", 0, 0)
    assert off.effective == on.disabled() and off.effective.max_deferrals == on.max_deferrals


def test_a_fixed_chunk_size_needs_no_room_for_exploration():
    assert IntraStepConfig(chunk_size=7, explore_period=1).chunk_size == 7


def test_every_knob_is_documented_with_its_default_and_when_to_change_it():
    with open(schema.__file__, encoding="utf-8") as file:
        source = file.read()
    for section in (InterStepConfig, IntraStepConfig):
        for knob in dataclasses.fields(section):
            match = re.search(rf'    {knob.name}: [^\n]+\n    """Default ([^"]+)"""', source)
            assert match, f"{section.__name__}.{knob.name} has no docstring that starts with its default"
            assert re.search(r"\b(Change|Lower|Raise|Set|Turn)\b.* (if|it)\b", match[1], re.DOTALL), knob.name
