"""The scorers on Megatron-Core's GPTModel with a scalar head: a value per token, of which a reward is the last one.

Built by the worker classes, one per rank around that rank's part of the model: `MegatronScorer` around a model of our
own, `MegatronEngineScorer` around the one that verl's Megatron engine trains. They know neither Ray nor the stream.

The ranks of one tensor-parallel group are one scorer: they must be called with the same lists, and since all they
decide follows from these, their forwards match. Data-parallel ranks hold whole copies and never wait for each other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import PretrainedConfig
from verl.utils.device import get_device_id
from verl.utils.megatron_utils import get_megatron_module_device, unwrap_model
from verl.workers.engine.megatron import MegatronEngineWithLMHead

from verl_oppo.scoring import support
from verl_oppo.scoring.engine_weights import EngineWeights
from verl_oppo.scoring.megatron_model import PagedGPT
from verl_oppo.scoring.paged_kv import Layout, Segment, padded_layout
from verl_oppo.scoring.paged_scorer import PagedScorer
from verl_oppo.scoring.scorer import ScorerSettings


def check_model(model: object, key: str) -> None:
    """Raises ValueError unless attention is what `PagedGPT` computes: plain, over all keys, with rotary positions."""
    if type(model) is not GPTModel:
        raise ValueError(f"{key} cannot stream: the model is a {type(model).__name__}, allowed is GPTModel")
    if model.position_embedding_type != "rope":
        raise ValueError(
            f"{key} cannot stream: position_embedding_type is {model.position_embedding_type!r}, allowed is 'rope'"
        )
    allowed = {
        "multi_latent_attention": (False,),
        "rotary_interleaved": (False,),
        "window_size": (None,),
        "softmax_scale": (None,),
        "softmax_type": ("vanilla",),
        "num_moe_experts": (None, 0),
        "fp8": (None, False),
        "sequence_parallel": (False,),
        "context_parallel_size": (1,),
        "pipeline_model_parallel_size": (1,),
    }
    for name, values in allowed.items():
        value = getattr(model.config, name, values[0])
        if value not in values:
            raise ValueError(f"{key} cannot stream: the model's {name} is {value!r}, allowed is {values[0]!r}")


class MegatronScorer(PagedScorer):
    """Implements `scorer.Scorer` on one rank of a tensor-parallel group.

    Invariant: `PagedScorer`'s; and all ranks of the group hold the same trajectories, each its own heads' keys and
    values.
    """

    def __init__(self, model: GPTModel, hf_config: PretrainedConfig, settings: ScorerSettings) -> None:
        """`model` must hold its weights. Collective. Raises ValueError for what cannot be served, see `support`."""
        tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
        support.check_attention(hf_config, settings.key)
        check_model(model, settings.key)
        self._model = PagedGPT(model)
        super().__init__(
            settings,
            self._model.cache,
            vocab_size=hf_config.vocab_size,
            token_bytes=support.bytes_per_token(hf_config, model.config.params_dtype, tensor_parallel),
            lookahead=0,
        )
        self._check_cache_size()

    def open_stream(self) -> None:
        """Nothing to do: the weights stay on the device."""

    def close_stream(self) -> None:
        """Nothing to undo."""

    def _layout(self, segments: list[Segment]) -> Layout:
        return padded_layout(segments, get_device_id())

    def _forward(self, layout: Layout, segments: list[Segment]) -> list[np.ndarray]:
        values = layout.unpad(self._model(layout, self._slots_wanted()))[:, 0].float().cpu().numpy()
        return np.split(values, np.cumsum([segment.new for segment in segments])[:-1]) if segments else []

    def _eval_mode(self) -> AbstractContextManager:
        return nullcontext()

    def _group(self) -> torch.distributed.ProcessGroup | None:
        """All ranks: what one of them refuses none must take in."""
        return torch.distributed.group.WORLD if torch.distributed.get_world_size() > 1 else None

    def _busiest_rank(self, amount: int) -> int:
        """This rank's own: only the tensor-parallel group's forwards are collective, and its ranks have equal work."""
        return amount


class MegatronEngineScorer(EngineWeights, MegatronScorer):
    """The same inside verl's Megatron engine, on the weights that it trains. Invariants: those of its bases."""

    def __init__(self, engine: MegatronEngineWithLMHead, settings: ScorerSettings) -> None:
        """`engine` must be initialized. Collective. Raises ValueError for what cannot be served, see `support`."""
        support.check_megatron_engine(engine.engine_config, settings.key)
        self._engine = engine
        super().__init__(unwrap_model(engine.module[0]), engine.model_config.hf_config, settings)

    def _weights_device(self) -> str:
        return get_megatron_module_device(self._engine.module)
