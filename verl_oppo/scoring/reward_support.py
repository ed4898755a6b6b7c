"""Which kind of scorer a run's reward gets, and what is refused at start, with the key, the value and what is allowed.

Called by the trainer before anything is launched. It reads configurations and tokenizers, no weights. `auto` never
refuses what verl itself can do: where it cannot stream it says so once in the log, and the reward is scored as in verl.
What verl cannot do either is refused whatever is asked for, since verl's own client retries for minutes.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import PretrainedConfig
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig
from verl.workers.rollout.utils import get_max_position_embeddings

from verl_oppo.config.schema import INTRA_STEP, OppoConfig
from verl_oppo.scoring import support
from verl_oppo.scoring.reward_input import RewardInput
from verl_oppo.scoring.scorer import ScorerSettings
from verl_oppo.scoring.vllm_reward import UNUSABLE_TOKENS

logger = logging.getLogger(__name__)

REWARD_MODEL = "reward.reward_model"
RETOKENISED_GROWTH = 2
"""Times the expected length that an input may have in the reward model's tokens: sampled text can tokenise longer."""
DEFAULT_CACHE_BYTES = 4 << 30
"""Upper bound of the FSDP reward model's cache per rank, bytes, where nothing else is asked for."""
PROBE = "x"


@dataclass(frozen=True)
class Obstacle:
    """Why the reward cannot stream: a key, its value, and what is allowed."""

    key: str
    value: object
    allowed: str

    def __str__(self) -> str:
        return f"{self.key} is {self.value!r}, allowed is {self.allowed}"


def resolve_reward_kind(config: DictConfig, oppo: OppoConfig) -> str:
    """`off`, `vllm`, `fsdp` or `megatron`.

    Raises ValueError if the kind asked for cannot stream, or if verl itself could not score with this reward model.
    """
    asked = oppo.intra_step.reward
    if not oppo.intra_step.enable or asked == "off":
        return "off"
    obstacle = _no_discriminative_model(config)
    if obstacle is None:
        model = HFModelConfig(path=config.reward.reward_model.model_path)
        kind = _kind_of(model, config) if asked == "auto" else asked
        _check_usable(config, model, kind)
        obstacle = _obstacle_to(kind, config, model)
        if obstacle is None:
            return kind
    if asked != "auto":
        raise ValueError(f"{INTRA_STEP}.reward is {asked!r}, but {obstacle}")
    logger.warning(f"{INTRA_STEP}: the reward is scored as in verl, it does not stream: {obstacle}")
    return "off"


def is_colocated(config: DictConfig) -> bool:
    """Whether the reward model shares its devices with the rollout and the training."""
    return not config.reward.reward_model.enable_resource_pool


def has_own_devices(config: DictConfig) -> bool:
    """Whether there is a discriminative reward model and it shares its devices with nobody."""
    return _no_discriminative_model(config) is None and not is_colocated(config)


def model_paths(config: DictConfig) -> tuple[str, str]:
    """Where the actor's and the reward model's tokenizers are, as verl's reward loop finds them."""
    actor = config.actor_rollout_ref.model
    return actor.get("tokenizer_path", None) or actor.path, config.reward.reward_model.model_path


def chat_template_kwargs(config: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(config.data.get("apply_chat_template_kwargs", None) or OmegaConf.create({}))


def template_tokens(tokenizers: RewardInput, actor_template_kwargs: Mapping[str, Any]) -> int:
    """Tokens that a reward model's input has beyond the actor's prompt and response, for one message."""
    message = [{"role": "user", "content": PROBE}]
    prompt = tokenizers.actor_tokenizer.apply_chat_template(
        message, add_generation_prompt=True, tokenize=True, return_dict=False, **actor_template_kwargs
    )
    response = tokenizers.reward_tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    whole = tokenizers.token_ids(tokenizers.render(message, PROBE))
    return max(0, len(whole) - len(prompt) - len(response))


def required_context(config: DictConfig) -> int:
    """Tokens of the longest prompt, response and template, in a tokenizer that is no wordier than the actor's.

    Raises ValueError if the reward model has no chat template.
    """
    tokenizers = RewardInput.from_paths(*model_paths(config))
    if tokenizers.reward_tokenizer.chat_template is None:
        raise _refusal(
            f"{REWARD_MODEL}.model_path", model_paths(config)[1], "a model whose tokenizer has a chat template"
        )
    rollout = config.actor_rollout_ref.rollout
    overhead = template_tokens(tokenizers, chat_template_kwargs(config))
    return rollout.prompt_length + rollout.response_length + overhead


def reward_scorer_settings(
    config: DictConfig,
    hf_config: PretrainedConfig,
    num_ranks: int,
    max_prompts: int,
    cache_bytes: int | None = None,
    tensor_parallel: int = 1,
) -> ScorerSettings:
    """Sizes of the scorer of a reward model in a worker group, per device.

    The cache holds what `max_prompts` prompts in flight need, B + delta of them on `num_ranks` data-parallel ranks, up
    to `cache_bytes` a device. Raises ValueError if that does not even hold one longest trajectory.
    """
    required = required_context(config)
    longest = max(required, min(RETOKENISED_GROWTH * required, get_max_position_embeddings(hf_config)))
    limit = DEFAULT_CACHE_BYTES if cache_bytes is None else cache_bytes
    settings = ScorerSettings(cache_bytes=limit, longest_trajectory=longest, key=f"{INTRA_STEP}.reward")
    token_bytes = support.bytes_per_token(hf_config, reward_dtype(config), tensor_parallel)
    support.cache_blocks(settings, token_bytes)
    trajectories = -(-max_prompts * config.actor_rollout_ref.rollout.n // num_ranks)
    blocks = trajectories * -(-required // settings.block_size) + -(-longest // settings.block_size) + 1
    wanted = blocks * settings.block_size * token_bytes
    return ScorerSettings(cache_bytes=min(limit, wanted), longest_trajectory=longest, key=settings.key)


def reward_dtype(config: DictConfig) -> torch.dtype:
    return PrecisionType.to_dtype(config.reward.reward_model.rollout.dtype)


def tensor_parallel(config: DictConfig) -> int:
    """Devices that hold one copy of a Megatron reward model, by the key that sizes verl's reward server too."""
    return config.reward.reward_model.rollout.tensor_model_parallel_size


def _no_discriminative_model(config: DictConfig) -> Obstacle | None:
    reward = config.reward
    if not reward.reward_model.enable:
        return Obstacle(f"{REWARD_MODEL}.enable", False, "True: a rule-based reward has nothing to prefill")
    if reward.custom_reward_function.path is not None:
        return Obstacle(
            "reward.custom_reward_function.path",
            reward.custom_reward_function.path,
            "null: only the function knows what a generative reward model reads",
        )
    if not reward.reward_model.model_path:
        raise _refusal(f"{REWARD_MODEL}.model_path", reward.reward_model.model_path, "a checkpoint's path")
    return None


def _architectures(model: HFModelConfig) -> list[str]:
    return list(getattr(model.hf_config, "architectures", None) or ())


def _kind_of(model: HFModelConfig, config: DictConfig) -> str:
    """What `auto` means: vllm for what verl's server classifies, fsdp for a head on every token."""
    token_wise = any(name.endswith("ForTokenClassification") for name in _architectures(model))
    return "fsdp" if token_wise else "vllm"


def _check_usable(config: DictConfig, model: HFModelConfig, kind: str) -> None:
    """Raises ValueError for what verl's own server could not score with either."""
    path = f"{REWARD_MODEL}.model_path"
    if kind != "vllm":
        support.check_scalar_head(model.local_path, model.hf_config, path)
    elif any(name.endswith("ForCausalLM") for name in _architectures(model)) and not _is_converted(config):
        raise _refusal(
            path,
            model.path,
            f"a *ForSequenceClassification model, not {_architectures(model)}: a generative reward model needs "
            "reward.custom_reward_function.path",
        )
    _check_context(config, model.hf_config, kind)


def _check_context(config: DictConfig, hf_config: PretrainedConfig, kind: str) -> None:
    """Raises ValueError if the longest prompt, response and template do not fit into what the reward model reads."""
    required = required_context(config)
    if kind != "vllm":
        support.check_context(hf_config, ScorerSettings(1, required, key=f"{INTRA_STEP}.reward"))
        return
    max_model_len = config.reward.reward_model.rollout.get("max_model_len", None)
    context = get_max_position_embeddings(hf_config) if max_model_len is None else max_model_len
    if required + UNUSABLE_TOKENS > context:
        raise _refusal(
            f"{REWARD_MODEL}.rollout.max_model_len",
            context,
            f"{required + UNUSABLE_TOKENS} or more: actor_rollout_ref.rollout.prompt_length, response_length and the "
            "reward model's chat template have to fit, or its server fails on every long trajectory",
        )


def _is_converted(config: DictConfig) -> bool:
    """Whether the user tells vLLM to serve the checkpoint as something else than its architecture says."""
    engine_kwargs = config.reward.reward_model.rollout.get("engine_kwargs", None) or {}
    return bool({"hf_overrides", "convert", "runner"} & set(engine_kwargs.get("vllm", None) or {}))


def _obstacle_to(kind: str, config: DictConfig, model: HFModelConfig) -> Obstacle | None:
    """Why a reward model that verl can serve cannot stream."""
    if kind == "megatron":
        return _obstacle_to_megatron(config, model)
    if kind != "vllm":
        return None
    rollout = config.reward.reward_model.rollout
    key = f"{REWARD_MODEL}.rollout"
    name = None if OmegaConf.is_missing(rollout, "name") else rollout.name
    if name != "vllm":
        return Obstacle(f"{key}.name", name, "vllm: other engines' servers have no call that warms the prefix cache")
    classifier = any(name.endswith("ForSequenceClassification") for name in _architectures(model))
    if not classifier and not _is_converted(config):
        return Obstacle(f"{REWARD_MODEL}.model_path", model.path, "a *ForSequenceClassification model")
    if not rollout.enable_prefix_caching:
        return Obstacle(f"{key}.enable_prefix_caching", False, "True")
    if rollout.get("full_determinism", False):
        return Obstacle(f"{key}.full_determinism", True, "False: cached and uncached scores are not bit-identical")
    if is_colocated(config) and rollout.free_cache_engine:
        return Obstacle(
            f"{key}.free_cache_engine",
            True,
            "False for a reward model colocated with the rollout: its server must not sleep between two chunks, since "
            "waking resets its prefix cache; share the memory by gpu_memory_utilization of both",
        )
    return None


def _obstacle_to_megatron(config: DictConfig, model: HFModelConfig) -> Obstacle | None:
    """Why the reward model cannot be built on Megatron-Core, on the devices of its resource pool."""
    reward_model, key = config.reward.reward_model, f"{REWARD_MODEL}.rollout"
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return Obstacle(f"{INTRA_STEP}.reward", "megatron", "another kind where megatron-core is not installed")
    size = tensor_parallel(config)
    for name in ("pipeline_model_parallel_size", "data_parallel_size"):
        if reward_model.rollout.get(name, 1) != 1:
            why = "the scorer holds all layers on each rank" if name.startswith("pipeline") else "what devices are left"
            return Obstacle(f"{key}.{name}", reward_model.rollout[name], f"1: {why}")
    owner = config.trainer if is_colocated(config) else reward_model
    if owner.n_gpus_per_node % size:
        devices = "trainer" if is_colocated(config) else REWARD_MODEL
        return Obstacle(
            f"{key}.tensor_model_parallel_size",
            size,
            f"a divisor of {devices}.n_gpus_per_node ({owner.n_gpus_per_node}), whose devices hold the reward model",
        )
    support.check_megatron_model(model.hf_config, size, f"{REWARD_MODEL}.model_path")
    return None


def _refusal(key: str, value: object, allowed: str) -> ValueError:
    return ValueError(str(Obstacle(key, value, allowed)))
