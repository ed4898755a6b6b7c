"""The scorer on verl's FSDP engines: values of a `value_model` engine, log-probs of a `language_model` engine.

Built by the worker classes in `workers`, one per rank around that rank's engine. What is computed is verl's own:
the engine's module, its autocast and its `prepare_model_outputs`; only the inputs differ, since rows bring a cache.
It knows neither Ray nor the stream.

Every forward is collective (FSDP gathers each layer's weights from all ranks), so all ranks run as many as the busiest
one: a rank with nothing left runs a dummy row.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from verl_oppo.scoring import support
from verl_oppo.scoring.engine_weights import EngineWeights
from verl_oppo.scoring.paged_kv import Layout, PagedCache, Segment, packed_layout, padded_layout
from verl_oppo.scoring.paged_scorer import PagedScorer
from verl_oppo.scoring.scorer import ScorerSettings


class FSDPScorer(EngineWeights, PagedScorer):
    """Implements `scorer.Scorer` on one rank's engine. Invariants: those of its bases."""

    def __init__(self, engine: FSDPEngineWithLMHead, settings: ScorerSettings) -> None:
        """`engine` must be initialized. Collective. Raises ValueError for what cannot be served, see `support`."""
        support.check_supported(engine.model_config, engine.engine_config, settings.key)
        config = engine.module.config
        support.check_attention_implementation(config._attn_implementation, settings.key)
        if hasattr(engine.module, "v_head"):
            raise ValueError(
                f"{settings.key} cannot stream: the value head is trl's v_head, allowed is a token classification model"
            )
        self._engine = engine
        self._attention = config._attn_implementation
        self._dtype = engine._autocast_dtype
        is_value_model = isinstance(engine, FSDPEngineWithValueHead)
        self._output_name = "values" if is_value_model else "log_probs"
        text = config.get_text_config()
        super().__init__(
            settings,
            PagedCache(text.num_hidden_layers),
            vocab_size=text.vocab_size,
            token_bytes=support.bytes_per_token(config, self._dtype),
            lookahead=0 if is_value_model else 1,
        )
        self._check_cache_size()

    # The forward ----------------------------------------------------------------------------------------------------

    def _layout(self, segments: list[Segment]) -> Layout:
        if not self._pads_rows():
            return packed_layout(segments, get_device_id())
        return padded_layout(segments, get_device_id(), self._dtype if self._attention == "eager" else None)

    @torch.no_grad()
    def _forward(self, layout: Layout, segments: list[Segment]) -> list[np.ndarray]:
        self._kv.lay_out(layout, self._slots_wanted())
        autocast = (
            nullcontext()
            if self._dtype == torch.float32
            else torch.autocast(device_type=get_device_name(), dtype=self._dtype)
        )
        with autocast:
            output = self._engine.module(
                input_ids=layout.input_ids,
                position_ids=layout.position_ids,
                past_key_values=self._kv,
                use_cache=True,
                **layout.attention_kwargs,
            )
            if not segments:
                return []
            outputs = self._head_outputs(layout.unpad(output.logits)[None], segments)
        return np.split(outputs, np.cumsum([segment.new for segment in segments])[:-1])

    def _head_outputs(self, logits: torch.Tensor, segments: list[Segment]) -> np.ndarray:
        """What verl makes of the logits [1, tokens, labels or vocabulary] of a packed batch, float32 [tokens]."""
        ids, labels = (
            torch.from_numpy(np.concatenate(parts)).to(logits.device)
            for parts in ([segment.ids for segment in segments], [segment.labels for segment in segments])
        )
        offsets = torch.tensor(np.cumsum([0, *(segment.new for segment in segments)]), device=logits.device)
        micro_batch = tu.get_tensordict(
            {"input_ids": torch.nested.nested_tensor_from_jagged(ids, offsets)},
            {"use_remove_padding": True, "use_fused_kernels": False, "pad_mode": DatasetPadMode.NO_PADDING},
        )
        temperature = self._settings.temperature
        output_args = {
            "temperature_is_one": float(temperature) == 1.0,
            "temperature_rmpad": torch.full(ids.shape, temperature, device=logits.device),
            "input_ids_rmpad_rolled": labels,
            "pad_size": 0,
        }
        model_output = self._engine.prepare_model_outputs(
            SimpleNamespace(logits=logits), output_args, micro_batch, logits_processor_func=None
        )
        return model_output[self._output_name].values().float().cpu().numpy()

    def _pads_rows(self) -> bool:
        return self._attention not in support.PACKED_ATTENTION

    # Ranks and weights ----------------------------------------------------------------------------------------------

    def _group(self) -> torch.distributed.ProcessGroup | None:
        """All data-parallel ranks: every forward gathers their weights."""
        return self._engine.get_data_parallel_group() if self._engine.get_data_parallel_size() > 1 else None

    def _weights_offloaded(self) -> bool:
        return support.streams_weights(self._engine)

    def _weights_device(self) -> str:
        return next(self._engine.module.parameters()).device.type
