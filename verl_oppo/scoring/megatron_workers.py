"""The reward model on Megatron-Core as a verl worker group of its own: `intra_step.reward=megatron`.

Built by `reward_loop.build_reward_worker_group`, one rank per device of the reward model's resource pool. verl's own
Megatron engine is not used: it builds its models through bridges that need TransformerEngine, and it trains, which a
reward model never does.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig

from verl_oppo.scoring import support
from verl_oppo.scoring.megatron import MegatronScorer
from verl_oppo.scoring.megatron_model import build_model
from verl_oppo.scoring.megatron_weights import load_weights
from verl_oppo.scoring.scorer import ScorerSettings, ScorerStats
from verl_oppo.scoring.workers import DATA_MESH, ScoringMethods


@dataclass(frozen=True)
class MegatronRewardConfig:
    """What `RewardWorkerMegatron` is built from. `dtype` is that of weights and compute, in verl's words."""

    model: HFModelConfig
    dtype: str
    tensor_parallel: int


class RewardWorkerMegatron(ScoringMethods, Worker):
    """`Scored.last` of `oppo_score` is the reward model's score. `reset()` loads the model, then `oppo_setup`.

    Invariant: consecutive ranks are one tensor-parallel group (Megatron-Core's order) and one data-parallel rank of the
    mesh "train", of which the first one's answers count; all of them must get the same lists.
    """

    def __init__(self, config: MegatronRewardConfig) -> None:
        Worker.__init__(self)
        initialize_global_process_group_ray()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.tensor_parallel)
        assert parallel_state.get_tensor_model_parallel_world_size() == config.tensor_parallel
        self._register_dispatch_collect_info(
            mesh_name=DATA_MESH,
            dp_rank=parallel_state.get_data_parallel_rank(),
            is_collect=parallel_state.get_tensor_model_parallel_rank() == 0,
        )
        self.config = config
        self._model: GPTModel | None = None
        self._scorer: MegatronScorer | None = None

    def scorer(self) -> MegatronScorer:
        if self._scorer is None:
            raise RuntimeError(f"{type(self).__name__} has no scorer yet: call oppo_setup after the model is built")
        return self._scorer

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Builds the model and loads the checkpoint. Raises ValueError for a checkpoint that cannot be served."""
        model = self.config.model
        support.check_megatron_model(model.hf_config, self.config.tensor_parallel, "reward.reward_model")
        self._scorer = None
        self._model = build_model(model.hf_config, PrecisionType.to_dtype(self.config.dtype), get_device_id())
        load_weights(self._model, model.local_path, model.hf_config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def oppo_setup(self, settings: ScorerSettings) -> ScorerStats:
        """Builds the scorer. Raises ValueError for what cannot be served."""
        assert self._model is not None, "reset() loads the model first"
        hf_config = self.config.model.hf_config
        support.check_context(hf_config, settings)
        self._scorer = MegatronScorer(self._model, hf_config, settings)
        return self._scorer.stats()
