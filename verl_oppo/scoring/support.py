"""What a scorer cannot do is refused here at start, with the key, the value and what is allowed.

Called by the scorers when they are built, and by the trainer to size a cache before anything runs. It reads
configurations only, no weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig
from safetensors import safe_open
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PretrainedConfig
from verl.workers.config import FSDPEngineConfig, HFModelConfig, McoreEngineConfig
from verl.workers.engine.fsdp import FSDPEngine

from verl_oppo.scoring.prefix_cache import FIRST_BLOCK
from verl_oppo.scoring.scorer import ScorerSettings

PADDED_ATTENTION = ("sdpa", "eager")
"""Attention implementations that take a 4D mask."""
PACKED_ATTENTION = ("flash_attention_2", "flash_attention_3")
"""Attention implementations that take cumulative sequence lengths."""

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype, tensor_parallel: int = 1) -> int:
    """Bytes that one cached token takes on a device: keys and values of all layers in the compute type.

    Each of `tensor_parallel` ranks has its share of the KV heads, and one where there are fewer heads than ranks.
    """
    text = config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2 * text.num_hidden_layers * max(1, kv_heads // tensor_parallel) * head_size * dtype.itemsize


def cache_blocks(settings: ScorerSettings, token_bytes: int) -> int:
    """Blocks that trajectories can use within `cache_bytes`; raises ValueError if one longest trajectory does not fit.

    One block is the padding tokens' own.
    """
    block_bytes = settings.block_size * token_bytes
    blocks = settings.cache_bytes // block_bytes - FIRST_BLOCK
    needed = -(-settings.longest_trajectory // settings.block_size)
    if blocks < needed:
        raise ValueError(
            f"{settings.key}.cache_bytes is {settings.cache_bytes}, allowed is {(needed + FIRST_BLOCK) * block_bytes} "
            f"or more: the cache must hold one longest trajectory ({settings.longest_trajectory} tokens, "
            f"{token_bytes} bytes per token, blocks of {settings.block_size} tokens)"
        )
    return blocks


def check_supported(model: HFModelConfig, engine: FSDPEngineConfig, key: str) -> None:
    """Raises ValueError for an engine or a model that a prefix cache does not serve; `key` names who asks."""
    if engine.strategy not in ("fsdp", "fsdp2"):
        raise _refusal(key, "strategy", engine.strategy, "fsdp or fsdp2")
    if engine.ulysses_sequence_parallel_size > 1:
        raise _refusal(
            key,
            "ulysses_sequence_parallel_size",
            engine.ulysses_sequence_parallel_size,
            "1: with sequence parallelism a rank's cache would hold only its shard of the heads",
        )
    if model.use_fused_kernels:
        raise _refusal(
            key, "use_fused_kernels", True, "False: the fused forward returns no logits of a position by itself"
        )
    if engine.full_determinism:
        raise _refusal(
            key, "full_determinism", True, "False: cached and uncached forwards are not bit-identical, do not stream"
        )
    if engine.qat.enable:
        raise _refusal(key, "qat.enable", True, "False: its scales depend on the batch")
    if model.lora_rank > 0 and model.model_type == "language_model":
        raise _refusal(
            key, "lora_rank", model.lora_rank, "0: the reference is the actor without its adapter then, do not stream"
        )
    check_attention(model.hf_config, key)


def check_attention(config: PretrainedConfig, key: str) -> None:
    """Raises ValueError unless every layer attends causally to the whole prefix, from keys that the prefix decides."""
    text = config.get_text_config()
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise _refusal(key, "model_type", config.model_type, "a text-only model")
    if getattr(config, "is_encoder_decoder", False) or not getattr(text, "is_causal", True):
        raise _refusal(key, "model_type", config.model_type, "a decoder with causal attention")
    other_layers = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"})
    if other_layers:
        raise _refusal(key, "layer_types", other_layers, "full_attention in every layer")
    window = getattr(text, "sliding_window", None)
    if window is not None and getattr(text, "use_sliding_window", True):
        raise _refusal(key, "sliding_window", window, "null: attention to the whole prefix")
    for name in ("kv_lora_rank", "num_kv_shared_layers", "attention_chunk_size"):
        if getattr(text, name, None):
            raise _refusal(key, name, getattr(text, name), "a model without it: plain keys and values in every layer")
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise _refusal(
            key, "rope_type", rope_type, "a rotary embedding that does not change with the longest sequence of a batch"
        )


MEGATRON_ENGINE = {
    "pipeline_model_parallel_size": ((1,), "a rank holds only some of the layers"),
    "virtual_pipeline_model_parallel_size": ((None, 1), "a rank holds several pieces of the layers"),
    "context_parallel_size": ((1,), "a rank sees only part of every sequence"),
    "dynamic_context_parallel": ((False,), "a rank sees only part of every sequence"),
    "expert_model_parallel_size": ((1,), "every rank would have to run as many forwards"),
    "sequence_parallel": ((False,), "a rank sees only part of every chunk between the layers"),
    "use_megatron_fsdp": ((False,), "every rank would have to run as many forwards"),
}
"""Fields of verl's McoreEngineConfig with what is allowed, the value to set first, and why nothing else is."""


def megatron_obstacle(engine: McoreEngineConfig | DictConfig) -> tuple[str, object, str] | None:
    """Why nothing streams into a Megatron engine: a field, its value, and what is allowed."""
    for name, (allowed, why) in MEGATRON_ENGINE.items():
        value = engine.get(name, allowed[0])
        if name == "sequence_parallel" and engine.tensor_model_parallel_size == 1:
            continue  # which verl switches off by itself
        if value not in allowed:
            return name, value, f"{allowed[0]}, since {why}; without streaming it trains as ever"
    return None


def check_megatron_engine(engine: McoreEngineConfig | DictConfig, key: str) -> None:
    """Raises ValueError for a Megatron engine in which nothing streams; `key` names who asks."""
    obstacle = megatron_obstacle(engine)
    if obstacle is not None:
        raise _refusal(key, *obstacle)


MEGATRON_MODELS = ("llama", "qwen2")
"""Model types that `megatron_model` and `megatron_weights` know."""


def check_megatron_model(config: PretrainedConfig, tensor_parallel: int, key: str) -> None:
    """Raises ValueError for a model that is not built on Megatron-Core, or not split over so many ranks."""
    if config.model_type not in MEGATRON_MODELS:
        raise _refusal(key, "model_type", config.model_type, f"one of {', '.join(MEGATRON_MODELS)}")
    check_attention(config, key)
    for name, allowed in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if getattr(config, name, allowed) != allowed:
            raise _refusal(key, name, getattr(config, name), repr(allowed))
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") == "yarn":
        raise _refusal(key, "rope_type", "yarn", "a rotary embedding that does not scale the attention")
    for name in ("num_attention_heads", "intermediate_size"):
        if getattr(config, name) % tensor_parallel:
            raise _refusal(
                key, name, getattr(config, name), f"a multiple of the tensor parallel size, {tensor_parallel}"
            )
    kv_heads = config.num_key_value_heads
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        raise _refusal(
            key,
            "num_key_value_heads",
            kv_heads,
            f"a multiple or divisor of the tensor parallel size, {tensor_parallel}",
        )


def streams_weights(engine: FSDPEngine) -> bool:
    """Whether every forward brings the weights from host memory, as verl's forward-only engines on a GPU do."""
    if isinstance(engine.module, FullyShardedDataParallel):
        return engine.module.cpu_offload.offload_params
    return engine._uses_fsdp2_cpu_offload_policy


def check_attention_implementation(implementation: str, key: str) -> None:
    """Raises ValueError for an attention implementation that serves no ragged batch."""
    allowed = (*PADDED_ATTENTION, *PACKED_ATTENTION)
    if implementation not in allowed:
        raise _refusal(key, "attn_implementation", implementation, f"one of {', '.join(allowed)}")


def check_scalar_head(path: str, config: PretrainedConfig, key: str = "reward.reward_model.model_path") -> None:
    """Raises ValueError unless the checkpoint at `path` has a trained head with one output per token.

    verl loads it as token classification, whose head is `score`; a head by another name would be left at random.
    """
    architectures = list(getattr(config, "architectures", None) or ())
    if not any(name.endswith(("ForSequenceClassification", "ForTokenClassification")) for name in architectures):
        raise ValueError(
            f"{key} is {path!r} with architectures {architectures}, allowed is a *ForSequenceClassification or "
            f"*ForTokenClassification model; let a generative reward model be scored by verl's own reward loop"
        )
    if config.num_labels != 1:
        raise ValueError(f"{key} is {path!r} with num_labels {config.num_labels}, allowed is 1: a scalar head")
    head = [name for name in _weight_names(path) if name.rsplit(".", 2)[-2:] == ["score", "weight"]]
    if not head:
        raise ValueError(f"{key} is {path!r} without a weight named score.weight, allowed is a head of that name")


def _weight_names(path: str) -> set[str]:
    """Names of the weights in a checkpoint's safetensors or PyTorch files."""
    names: set[str] = set()
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            names.update(weights.keys())
    if not names:
        for file in sorted(Path(path).glob("pytorch_model*.bin")):
            names.update(torch.load(file, mmap=True, weights_only=True, map_location="cpu"))
    return names


def check_context(config: PretrainedConfig, settings: ScorerSettings) -> None:
    """Raises ValueError if the model's positions do not reach to the end of the longest trajectory."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None:
        return
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("yarn", "linear"):
        positions = int((rope.get("original_max_position_embeddings") or positions) * rope.get("factor", 1.0))
    if settings.longest_trajectory > positions:
        raise ValueError(
            f"{settings.key}.longest_trajectory (prompt + response + template) is {settings.longest_trajectory}, "
            f"allowed is {positions} or less: the reward model's max_position_embeddings"
        )


def _refusal(key: str, name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{key} cannot stream: {name} is {value!r}, allowed is {allowed}")
