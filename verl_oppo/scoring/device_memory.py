"""Whether a scorer that shares the actor's accelerator fits beside the rollout engine that is awake on it.

Called by the trainer's stream before the first chunk goes to critic or reference. It reads sizes only, and knows
neither engines nor Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig
from verl.utils.device import get_device_name, get_torch_device

from verl_oppo.scoring.scorer import ScorerSettings, ScorerStats

GIB = 1 << 30
LIVE_HIDDEN_STATES = 8
"""Hidden states a token that a layer's forward holds at once: residual, norm, queries, keys, values, attention."""
LIVE_MLP_STATES = 3
"""Intermediate states a token: gate, up, and their product."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one rank's device while it prefills; weights that stay sharded are there already."""

    layers: int
    """Weights that are gathered at once: the root's (embedding, head) and one layer's."""
    cache: int
    activations: int

    @property
    def total(self) -> int:
        return self.layers + self.cache + self.activations

    def words(self) -> str:
        parts = {"gathered weights": self.layers, "cache": self.cache, "activations": self.activations}
        return " + ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items())


def memory_needed(config: PretrainedConfig, settings: ScorerSettings, dtype: torch.dtype, outputs: int) -> MemoryNeed:
    """Upper estimate for a decoder in `dtype`; `outputs`: logits a token, 1 for a value head."""
    text = config.get_text_config()
    hidden, intermediate = text.hidden_size, text.intermediate_size
    head_size = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    attention = 2 * hidden * head_size * (text.num_attention_heads + kv_heads)
    root = hidden * (text.vocab_size + outputs)
    token_states = LIVE_HIDDEN_STATES * hidden + LIVE_MLP_STATES * intermediate
    # Log-probs: the logits, and their float32 copy.
    token_bytes = token_states * dtype.itemsize + outputs * (dtype.itemsize + torch.float32.itemsize)
    return MemoryNeed(
        layers=(root + attention + 3 * hidden * intermediate) * dtype.itemsize,
        cache=settings.cache_bytes,
        activations=settings.max_tokens_per_forward * token_bytes,
    )


def free_device_bytes() -> int | None:
    """Bytes that this process could still allocate on its device; None on a CPU."""
    if get_device_name() == "cpu":
        return None
    device = get_torch_device()
    free, _ = device.mem_get_info()
    return free + device.memory_reserved() - device.memory_allocated()


def reason_not_to_stream(stats: Sequence[ScorerStats], need: MemoryNeed) -> str | None:
    """Why this scorer's ranks had better not take chunks, in words; None if nothing speaks against it."""
    if any(each.weights_offloaded for each in stats):
        return (
            "verl's engine brings its weights from host memory in every forward, so that each chunk would copy the "
            "whole model"
        )
    free = min((each.device_free_bytes for each in stats if each.device_free_bytes is not None), default=None)
    if free is not None and free < need.total:
        return (
            f"{free / GIB:.2f} GiB of the device are free beside the awake rollout engine, but {need.words()} are "
            f"needed; lower actor_rollout_ref.rollout.gpu_memory_utilization"
        )
    return None
