"""Megatron-Core's GPTModel as a scoring model: built for a checkpoint, and run over rows that bring a cache.

Used by the Megatron scorer and its workers. Weights are `megatron_weights`' business. It knows neither verl nor Ray.

Megatron-Core's own inference contexts do not serve here: all rows of a static one share one offset, and the dynamic one
needs CUDA and flash attention. So keys and values live in `paged_kv` as for FSDP, and attention gets an explicit mask:
TransformerEngine's kernels would align a chunk at an offset by `attn_mask_type`, which Megatron-Core sets to no mask
there (`Attention._adjust_key_value_for_inference`), and let its tokens see later ones.

Legend: B rows, Q new tokens of the longest row, H heads of this tensor-parallel rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from verl_oppo.scoring.paged_kv import Layout, PagedCache

FUSIONS = ("apply_rope_fusion", "fused_single_qkv_rope")
"""Of TransformerConfig: kernels that take one angle per position, where here each row has positions of its own."""


class ScalarHead(torch.nn.Linear):
    """One number per token, in the place of GPTModel's `output_layer`; the same on every tensor-parallel rank."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, sequence_parallel: bool = False) -> None:
        super().__init__(hidden_size, 1, bias=True, dtype=dtype)
        self.sequence_parallel = sequence_parallel

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Takes hidden states [Q, B, hidden] and returns [Q, B, 1], float32. `weight` is the vocabulary's, unused."""
        logits = super().forward(input_).float()
        if self.sequence_parallel:
            logits = gather_from_sequence_parallel_region(logits, tensor_parallel_output_grad=False)
        return logits, None


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding: every rank holds as many; the padding is never looked up."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def transformer_config(hf_config: PretrainedConfig, dtype: torch.dtype, on_cpu: bool) -> TransformerConfig:
    """Megatron-Core's settings for a Qwen2 or Llama checkpoint, for inference and without kernels of other packages."""
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_size(hf_config),
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf_config.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def head_size(hf_config: PretrainedConfig) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def build_model(
    hf_config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str, *, scalar_head: bool = True
) -> GPTModel:
    """A GPTModel without weights, in evaluation mode; Megatron-Core's parallel state must be initialized.

    With a scalar head it gives a number per token, otherwise this rank's part of the vocabulary's logits.
    """
    config = transformer_config(hf_config, dtype, on_cpu=torch.device(device).type == "cpu")
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=padded_vocab_size(hf_config.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=hf_config.max_position_embeddings,
        # Shared, the output layer takes no memory of its own until the scalar head takes its place.
        share_embeddings_and_output_weights=scalar_head or hf_config.tie_word_embeddings,
        position_embedding_type="rope",
    )
    if scalar_head:
        model.share_embeddings_and_output_weights = False
        model.output_layer = ScalarHead(hf_config.hidden_size, dtype)
    model.rotary_pos_emb.inv_freq = LlamaRotaryEmbedding(hf_config).inv_freq
    return model.to(device).eval().requires_grad_(False)


def plain_forward(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """The module's own forward, whether a `PagedGPT` has put its own before it or not."""
    forward = module.forward
    ours = isinstance(forward, partial) and isinstance(getattr(forward.func, "__self__", None), PagedGPT)
    return forward.args[0] if ours else forward


class PagedGPT:
    """A GPTModel that can run over rows of any cached length.

    Invariant: outside of `__call__` the model is what it was: the same modules, weights' names and forward, so that it
    can be one that somebody else trains. A model has one of these at a time: a new one takes the old one's place.
    """

    def __init__(self, model: GPTModel) -> None:
        assert model.pre_process and model.post_process and model.position_embedding_type == "rope"
        self.model = model
        self.cache = PagedCache(len(model.decoder.layers))
        self._running = False
        for index, layer in enumerate(model.decoder.layers):
            core = layer.self_attention.core_attention
            core.forward = partial(self._attention, plain_forward(core), index)
        model.rotary_pos_emb.forward = partial(self._angles, plain_forward(model.rotary_pos_emb))

    @torch.no_grad()
    def __call__(self, layout: Layout, num_slots: int) -> torch.Tensor:
        """Output layer's result [B, Q, 1], or [B, Q, this rank's part of the vocabulary]."""
        self.cache.lay_out(layout, num_slots)
        with self._paged():
            return self.model(layout.input_ids, layout.position_ids, attention_mask=None)

    @contextmanager
    def _paged(self) -> Iterator[None]:
        config = self.model.config
        fusions = {name: getattr(config, name) for name in FUSIONS}
        self._running = True
        try:
            for name in fusions:
                setattr(config, name, False)
            yield
        finally:
            self._running = False
            for name, value in fusions.items():
                setattr(config, name, value)

    def _attention(
        self,
        plain: Callable[..., torch.Tensor],
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of a layer's new tokens [Q, B, H, D] to its cached and new ones: [Q, B, H * D]."""
        if not self._running:
            return plain(query, key, value, *args, **kwargs)
        # Rows first, and their tokens' heads before their tokens: [B, H, Q, D].
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        keys, values = self.cache.layers[index].update(key, value)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=self.cache.layout.attention_kwargs["attention_mask"],
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        return attended.permute(2, 0, 1, 3).flatten(2)

    def _angles(self, plain: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Rotary angles of each row's own positions [Q, B, 1, D], where Megatron-Core has [Q, 1, 1, D]."""
        if not self._running:
            return plain(*args, **kwargs)
        rotary = self.model.rotary_pos_emb
        positions = self.cache.layout.position_ids.transpose(0, 1)[..., None, None].float()
        if rotary.seq_len_interpolation_factor is not None:
            positions = positions / rotary.seq_len_interpolation_factor
        angles = positions * rotary.inv_freq.to(positions.device)
        return torch.cat([angles, angles], dim=-1)
