"""Which kind of scorer a run's reward gets, and what is refused at start."""

import json
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

sys.path.insert(0, str(Path(__file__).parent / "reward_scoring"))

import reward_models as models

from verl_oppo.config.schema import IntraStepConfig, OppoConfig
from verl_oppo.demo.models import ModelSettings, build_actor, build_classifier
from verl_oppo.demo.tokenizer import build_actor_tokenizer
from verl_oppo.scoring import support
from verl_oppo.scoring.reward_input import RewardInput
from verl_oppo.scoring.reward_support import (
    required_context,
    resolve_reward_kind,
    reward_dtype,
    reward_scorer_settings,
    template_tokens,
)

ROLLOUT = "reward.reward_model.rollout"
KEEP = f"{ROLLOUT}.free_cache_engine=False"
OWN_POOL = ["reward.reward_model.enable_resource_pool=True", "reward.reward_model.nnodes=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An actor's tokenizer, and reward models of each kind."""
    folder = tmp_path_factory.mktemp("models")
    models.save_tokenizers(folder)
    models.save_reward_model(folder / "reward")
    tokenizer = build_actor_tokenizer()
    for name, model in {
        "generative": build_actor(ModelSettings(), tokenizer),
        "token_wise": build_classifier(Qwen2ForTokenClassification, ModelSettings(), tokenizer, backbone=None),
    }.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    shutil.copytree(folder / "reward", folder / "two_labels")
    config = json.loads((folder / "two_labels" / "config.json").read_text())
    config["id2label"] = {"0": "bad", "1": "good"}
    (folder / "two_labels" / "config.json").write_text(json.dumps(config))
    return folder


def resolve(folder: Path, reward: str, *overrides: str, enable: bool = True) -> str:
    oppo = OppoConfig(intra_step=IntraStepConfig(reward=reward, enable=enable))
    return resolve_reward_kind(models.compose(folder, *overrides), oppo)


def test_auto_takes_the_reward_server_where_it_can_stream(folder):
    assert resolve(folder, "auto", KEEP) == "vllm"
    assert resolve(folder, "auto", *OWN_POOL) == "vllm", "by itself the server need not sleep, whatever the key says"


def test_auto_takes_the_fsdp_worker_group_for_a_head_on_every_token(folder):
    assert resolve(folder, "auto", f"reward.reward_model.model_path={folder / 'token_wise'}") == "fsdp"


@pytest.mark.parametrize("kind", ["vllm", "fsdp", "megatron"])
def test_the_kind_that_is_asked_for_is_taken(folder, kind):
    assert resolve(folder, kind, KEEP) == kind


def test_the_fsdp_worker_group_needs_no_reward_server_settings(folder):
    assert resolve(folder, "fsdp", f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.free_cache_engine=True") == "fsdp"


def test_switched_off_nothing_is_read_or_said(folder, caplog):
    nowhere = "reward.reward_model.model_path=/nowhere"
    assert resolve(folder, "off", nowhere) == "off"
    assert resolve(folder, "fsdp", nowhere, enable=False) == "off"
    assert caplog.records == []


CANNOT_STREAM = {
    "rule-based": (["reward.reward_model.enable=False"], "reward.reward_model.enable"),
    "generative": (["reward.custom_reward_function.path=judge.py"], "reward.custom_reward_function.path"),
    "sglang": ([f"{ROLLOUT}.name=sglang"], f"{ROLLOUT}.name"),
    "asleep": ([f"{ROLLOUT}.free_cache_engine=True"], f"{ROLLOUT}.free_cache_engine"),
    "uncached": ([KEEP, f"{ROLLOUT}.enable_prefix_caching=False"], f"{ROLLOUT}.enable_prefix_caching"),
    "deterministic": ([KEEP, f"{ROLLOUT}.full_determinism=True"], f"{ROLLOUT}.full_determinism"),
}


@pytest.mark.parametrize("case", CANNOT_STREAM)
def test_auto_scores_as_verl_does_what_cannot_stream_and_says_so_once(folder, case, caplog):
    overrides, key = CANNOT_STREAM[case]
    with caplog.at_level(logging.INFO, logger="verl_oppo"):
        assert resolve(folder, "auto", *overrides) == "off"
    (record,) = [record for record in caplog.records if record.name.startswith("verl_oppo")]
    assert "does not stream" in record.getMessage() and key in record.getMessage()


@pytest.mark.parametrize("case", CANNOT_STREAM)
def test_a_kind_that_cannot_stream_is_refused_with_the_key_the_value_and_what_is_allowed(folder, case):
    overrides, key = CANNOT_STREAM[case]
    with pytest.raises(ValueError, match=rf"intra_step\.reward is 'vllm', but {key} is .*, allowed is "):
        resolve(folder, "vllm", *overrides)


@pytest.mark.parametrize("case", ["rule-based", "generative"])
def test_the_fsdp_worker_group_refuses_what_is_no_discriminative_reward_model(folder, case):
    overrides, key = CANNOT_STREAM[case]
    with pytest.raises(ValueError, match=rf"intra_step\.reward is 'fsdp', but {key} is .*, allowed is "):
        resolve(folder, "fsdp", *overrides)


@pytest.mark.parametrize("reward", ["auto", "vllm", "fsdp"])
def test_a_model_without_a_scalar_head_is_refused(folder, reward):
    with pytest.raises(ValueError, match="reward.reward_model.model_path is .*generative.*Qwen2ForCausalLM"):
        resolve(folder, reward, KEEP, f"reward.reward_model.model_path={folder / 'generative'}")


def test_a_head_of_two_labels_is_refused_by_the_fsdp_worker_group(folder):
    with pytest.raises(ValueError, match="num_labels 2, allowed is 1"):
        resolve(folder, "fsdp", f"reward.reward_model.model_path={folder / 'two_labels'}")


def test_a_missing_path_is_refused(folder):
    with pytest.raises(ValueError, match="reward.reward_model.model_path is None, allowed is"):
        resolve(folder, "auto", "reward.reward_model.model_path=null")


@pytest.mark.parametrize("reward", ["auto", "vllm"])
def test_a_reward_context_that_is_too_short_is_refused(folder, reward):
    needed = required_context(models.compose(folder)) + 1
    assert resolve(folder, reward, KEEP, f"{ROLLOUT}.max_model_len={needed}") == "vllm"
    with pytest.raises(ValueError, match=rf"max_model_len is {needed - 1}, allowed is {needed} or more"):
        resolve(folder, reward, KEEP, f"{ROLLOUT}.max_model_len={needed - 1}")


def test_positions_that_are_too_few_are_refused_by_the_fsdp_worker_group(folder):
    with pytest.raises(ValueError, match="allowed is 2048 or less: the reward model's max_position_embeddings"):
        resolve(folder, "fsdp", "data.max_response_length=2000")


def test_the_template_is_measured_with_the_real_tokenizers():
    """The same template: what closes the response. Another one: all that it writes around both messages."""
    actor = build_actor_tokenizer()
    same, other = RewardInput(actor, actor), RewardInput(actor, models.build_other_tokenizer())
    assert template_tokens(same, {}) == len(actor("<|im_end|>\n")["input_ids"])
    message = [{"role": "user", "content": "violin"}]
    prompt = actor.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    response = actor(" violin", add_special_tokens=False)["input_ids"]
    grown = len(other.token_ids(other.text(message, response))) - len(prompt) - len(response)
    assert template_tokens(other, {}) == max(0, grown)


def test_the_cache_holds_what_is_in_flight_up_to_its_bound(folder):
    config: DictConfig = models.compose(folder, "actor_rollout_ref.rollout.n=2")
    hf_config = Qwen2ForCausalLM.config_class.from_pretrained(folder / "reward")
    token_bytes = support.bytes_per_token(hf_config, torch.float32)
    assert reward_dtype(config) == torch.float32
    few, many = (reward_scorer_settings(config, hf_config, 1, max_prompts=prompts) for prompts in (4, 8))
    needed = required_context(config)
    assert few.longest_trajectory == 2 * needed
    assert few.cache_bytes >= 4 * 2 * needed * token_bytes
    assert many.cache_bytes - few.cache_bytes >= 4 * 2 * needed * token_bytes
    two_ranks = reward_scorer_settings(config, hf_config, 2, max_prompts=8)
    assert two_ranks.cache_bytes == few.cache_bytes
    bounded = reward_scorer_settings(config, hf_config, 1, max_prompts=8, cache_bytes=few.cache_bytes)
    assert bounded.cache_bytes == few.cache_bytes
    with pytest.raises(ValueError, match="the cache must hold one longest trajectory"):
        reward_scorer_settings(config, hf_config, 1, max_prompts=8, cache_bytes=token_bytes)


def changed(folder: Path, name: str, **fields: object) -> str:
    """The override that names a copy of the reward model with these fields in its configuration."""
    shutil.copytree(folder / "reward", folder / name, dirs_exist_ok=True)
    config = json.loads((folder / name / "config.json").read_text())
    (folder / name / "config.json").write_text(json.dumps(config | fields))
    return f"reward.reward_model.model_path={folder / name}"


TWO_DEVICES = [*OWN_POOL, "reward.reward_model.n_gpus_per_node=2"]
TENSOR_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"


@pytest.mark.parametrize("overrides", [[*OWN_POOL, "reward.reward_model.n_gpus_per_node=1"], TWO_DEVICES])
def test_a_megatron_reward_model_takes_as_many_devices_as_divide_its_pool(folder, overrides):
    assert resolve(folder, "megatron", *overrides, f"{TENSOR_PARALLEL}=1") == "megatron"
    devices = int(overrides[-1][-1])
    with pytest.raises(
        ValueError,
        match=rf"but {TENSOR_PARALLEL} is 3, allowed is a divisor of reward.reward_model.n_gpus_per_node \({devices}\)",
    ):
        resolve(folder, "megatron", *overrides, f"{TENSOR_PARALLEL}=3")


def test_a_colocated_megatron_reward_model_lies_on_the_trainers_devices(folder):
    assert resolve(folder, "megatron", "trainer.n_gpus_per_node=2", f"{TENSOR_PARALLEL}=2") == "megatron"
    with pytest.raises(ValueError, match=r"a divisor of trainer.n_gpus_per_node \(1\)"):
        resolve(folder, "megatron", "trainer.n_gpus_per_node=1", f"{TENSOR_PARALLEL}=2")


@pytest.mark.parametrize("name", ["pipeline_model_parallel_size", "data_parallel_size"])
def test_a_megatron_reward_model_refuses_other_parallelism_of_its_server(folder, name):
    with pytest.raises(
        ValueError, match=rf"intra_step\.reward is 'megatron', but {ROLLOUT}\.{name} is 2, allowed is 1"
    ):
        resolve(folder, "megatron", *OWN_POOL, f"{ROLLOUT}.{name}=2")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3', allowed is one of llama, qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', allowed is 'silu'"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3, allowed is a multiple of the tensor parallel size, 2"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            "num_key_value_heads is 3, allowed is a multiple or divisor of the tensor parallel size, 2",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}},
            "rope_type is 'yarn', allowed is a rotary embedding that does not scale the attention",
        ),
    ],
)
def test_a_model_that_megatron_core_would_not_be_built_for_is_refused(folder, fields, message):
    path = changed(folder, "changed", **fields)
    with pytest.raises(ValueError, match=f"reward.reward_model.model_path cannot stream: {message}"):
        resolve(folder, "megatron", *TWO_DEVICES, f"{TENSOR_PARALLEL}=2", path)


def test_each_device_of_a_tensor_parallel_group_caches_its_share(folder):
    config = models.compose(folder)
    hf_config = Qwen2ForCausalLM.config_class.from_pretrained(folder / "reward")
    whole, split = (
        reward_scorer_settings(config, hf_config, 1, max_prompts=4, tensor_parallel=size) for size in (1, 2)
    )
    assert split.cache_bytes == whole.cache_bytes, "the model has one KV head, which both devices hold"
    hf_config.num_key_value_heads = 2
    whole, split = (
        reward_scorer_settings(config, hf_config, 1, max_prompts=4, tensor_parallel=size) for size in (1, 2)
    )
    assert split.cache_bytes * 2 == whole.cache_bytes
    assert split.longest_trajectory == whole.longest_trajectory
