"""Tiny Qwen2 models of the demo: actor (also the reference), critic and reward model, untrained.

Called when the assets are made. Training them is `warm_start.py`'s business, saving them `assets.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

HEAD_SIZE = 32
"""The smallest attention head that vLLM's CPU backend has a kernel for."""

Classifier = TypeVar("Classifier", Qwen2ForSequenceClassification, Qwen2ForTokenClassification)


@dataclass(frozen=True)
class ModelSettings:
    """Size of the tiny models; the vocabulary is always the tokenizer's."""

    num_layers: int = 2
    hidden_size: int = 64
    num_kv_heads: int = 1
    max_positions: int = 2048

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"demo model setting num_layers is {self.num_layers!r}, allowed is 1 or more")
        if self.hidden_size < HEAD_SIZE or self.hidden_size % HEAD_SIZE:
            raise ValueError(
                f"demo model setting hidden_size is {self.hidden_size!r}, allowed is a multiple of {HEAD_SIZE}"
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"demo model setting num_kv_heads is {self.num_kv_heads!r}, allowed is a divisor of {self.num_heads}"
            )
        if self.max_positions < 64:
            raise ValueError(f"demo model setting max_positions is {self.max_positions!r}, allowed is 64 or more")

    @property
    def num_heads(self) -> int:
        return self.hidden_size // HEAD_SIZE


def model_config(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, **kwargs: object) -> Qwen2Config:
    """Configuration whose vocabulary is exactly the tokenizer's.

    verl masks ids at and above `len(tokenizer)` in vLLM but not in its trainer, so a larger vocabulary would make the
    log-probs of rollout and trainer differ.
    """
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        max_position_embeddings=settings.max_positions,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=settings.hidden_size**-0.5,
        dtype=torch.float32,
        **kwargs,
    )


def build_actor(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(model_config(settings, tokenizer))


def build_classifier(
    cls: type[Classifier], settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, backbone: PreTrainedModel | None
) -> Classifier:
    """A model with one scalar per position (critic) or per sequence (reward model) and a head of zeros.

    Weights of `backbone`, where given, are copied under the head; verl would give a head that is absent from the
    checkpoint random weights.
    """
    model = cls(model_config(settings, tokenizer, num_labels=1))
    if backbone is not None:
        model.model.load_state_dict(backbone.model.state_dict())
    for parameter in model.score.parameters():
        torch.nn.init.zeros_(parameter)
    return model
