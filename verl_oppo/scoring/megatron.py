"""The scorer on Megatron-Core's GPTModel with a scalar head: a value per token; a reward model's score is the last one.

Built by the workers in `megatron_workers`, one per rank around that rank's part of the model. It knows neither Ray nor
the stream.

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

from verl_oppo.scoring import support
from verl_oppo.scoring.megatron_model import PagedGPT
from verl_oppo.scoring.paged_kv import Layout, Segment, padded_layout
from verl_oppo.scoring.paged_scorer import PagedScorer
from verl_oppo.scoring.scorer import ScorerSettings


class MegatronScorer(PagedScorer):
    """Implements `scorer.Scorer` on one rank of a tensor-parallel group.

    Invariant: `PagedScorer`'s; and all ranks of the group hold the same trajectories, each its own heads' keys and
    values.
    """

    def __init__(self, model: GPTModel, hf_config: PretrainedConfig, settings: ScorerSettings) -> None:
        """`model` must hold its weights. Collective. Raises ValueError for what cannot be served, see `support`."""
        tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
        support.check_megatron_model(hf_config, tensor_parallel, settings.key)
        self._model = PagedGPT(model)
        super().__init__(
            settings,
            self._model.cache,
            vocab_size=hf_config.vocab_size,
            token_bytes=support.bytes_per_token(hf_config, model.config.params_dtype) // tensor_parallel,
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
