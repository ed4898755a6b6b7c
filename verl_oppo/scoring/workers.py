"""verl's worker classes with a scorer inside: critic, reference and reward model.

The trainer puts them where verl has its own (`role_worker_mapping`) and calls the `oppo_*` methods through the worker
group, always one call at a time and to its end: verl's fused workers are async Ray actors, and two calls in flight can
swap places on one rank and hang the collectives. In a worker group fused by verl each method gets its role as prefix
and loses it again in `RayWorkerGroup.spawn`, as verl's own methods do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RewardModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import BaseEngine
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_oppo.scoring import support
from verl_oppo.scoring.fsdp import FSDPScorer
from verl_oppo.scoring.paged_scorer import PagedScorer
from verl_oppo.scoring.scorer import Chunk, PrefillReply, ScoreReply, ScorerSettings, ScorerStats, Trajectory

DATA_MESH = "train"
"""Name of the mesh whose data-parallel ranks take lists of their own; verl's TrainingWorker registers it by this."""


class ScoringMethods:
    """The registered methods every scoring worker has, besides `oppo_setup`, which builds the scorer.

    `oppo_prefill` and `oppo_score` take a list per rank (`Dispatch.DP_COMPUTE`), the same one for all ranks of a
    tensor-parallel group, the others one argument for all. All are non-blocking and return one Ray reference per rank:
    get them all before the next call.
    """

    scorer: Callable[[], PagedScorer]
    """A worker's own method: this rank's scorer. Raises RuntimeError before `oppo_setup`."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def oppo_prefill(self, chunks: Iterable[Chunk]) -> PrefillReply:
        return self.scorer().prefill(chunks)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def oppo_score(self, trajectories: Sequence[Trajectory], keep: bool = False) -> ScoreReply:
        return self.scorer().score(trajectories, keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def oppo_invalidate(self) -> None:
        self.scorer().invalidate()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def oppo_drop(self, trajectory_ids: Iterable[str]) -> None:
        self.scorer().drop(trajectory_ids)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def oppo_stream_open(self) -> None:
        self.scorer().open_stream()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def oppo_stream_close(self) -> None:
        self.scorer().close_stream()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def oppo_stats(self) -> ScorerStats:
        return self.scorer().stats()


class ScoringTrainingWorker(ScoringMethods, TrainingWorker):
    """A verl TrainingWorker that scores with its own engine.

    Invariant: whatever changes the weights empties the cache, whether the trainer says so or not.
    """

    _scorer: PagedScorer | None = None

    def scorer(self) -> PagedScorer:
        if self._scorer is None:
            raise RuntimeError(f"{type(self).__name__} has no scorer yet: call oppo_setup after the model is built")
        return self._scorer

    def _scorer_class(self) -> Callable[[BaseEngine, ScorerSettings], PagedScorer]:
        if self.engine_config.strategy != "megatron":
            return FSDPScorer
        # Imported where verl has built its Megatron engine, and so has Megatron-Core.
        from verl_oppo.scoring.megatron import MegatronEngineScorer

        return MegatronEngineScorer

    def forget_cache(self) -> None:
        """The weights change or have changed: nothing cached is of the present model."""
        if self._scorer is not None:
            self._scorer.invalidate()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def oppo_setup(self, settings: ScorerSettings) -> ScorerStats:
        """Builds the scorer, once the model is there, or a new one. Raises ValueError for what cannot be served."""
        if self._scorer is not None:
            self._scorer.close_stream()
            self._scorer.invalidate()
        self._scorer = self._scorer_class()(self.engine, settings)
        return self._scorer.stats()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        self.forget_cache()
        super().reset()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        self.forget_cache()
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict | None:
        # Here and not only in train_batch, which it calls: the memory is free before the optimizer is loaded.
        self.forget_cache()
        return super().train_mini_batch(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict | None:
        self.forget_cache()
        return super().train_batch(data)


class CriticWorkerOppo(ScoringTrainingWorker):
    """For `Role.Critic`. `oppo_score` gives values; `infer_batch` stays verl's plain path."""


class RefWorkerOppo(ScoringTrainingWorker):
    """A reference by itself. `oppo_score` gives log-probs; the cache outlives steps, since nothing trains it."""


class ActorRolloutRefWorkerOppo(ScoringMethods, ActorRolloutRefWorker):
    """For `Role.ActorRolloutRef` and `Role.RefPolicy`: the `oppo_*` methods score with the reference inside."""

    ref_worker_cls = RefWorkerOppo

    def scorer(self) -> PagedScorer:
        return self._reference().scorer()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def oppo_setup(self, settings: ScorerSettings) -> ScorerStats:
        """See `ScoringTrainingWorker.oppo_setup`. Raises ValueError in a worker without a reference of its own."""
        return self._reference().oppo_setup(settings)

    def _reference(self) -> RefWorkerOppo:
        if self.ref is None:
            raise ValueError(
                f"trainer.v1.oppo.intra_step.reference cannot stream: the worker's role is {self.role!r}, allowed is a "
                f"role with a reference of its own (with LoRA the reference is the actor without its adapter)"
            )
        return self.ref


class RewardWorkerOppo(ScoringTrainingWorker):
    """A worker group of its own: `Scored.last` of `oppo_score` is the reward model's score.

    Built from `reward_worker_config`, then `reset()` (loads the model) and `oppo_setup`, as verl starts its critic.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def oppo_setup(self, settings: ScorerSettings) -> ScorerStats:
        support.check_context(self.model_config.hf_config, settings)
        return super().oppo_setup(settings)


def reward_worker_config(
    reward_model: RewardModelConfig | DictConfig,
    engine: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> TrainingWorkerConfig:
    """What `RewardWorkerOppo` is built from, out of verl's `reward.reward_model`.

    `engine` overrides fields of verl's FSDPEngineConfig (strategy fsdp2, `rollout.dtype` for weights and compute),
    `model` those of HFModelConfig. Raises ValueError for a reward model without a scalar head.
    """
    if not reward_model.model_path:
        raise ValueError(
            f"reward.reward_model.model_path is {reward_model.model_path!r}, allowed is a checkpoint's path"
        )
    dtype = reward_model.rollout.dtype
    model_config = HFModelConfig(
        **{"path": reward_model.model_path, "enable_gradient_checkpointing": False, "use_remove_padding": False}
        | (model or {})
    )
    support.check_scalar_head(model_config.local_path, model_config.hf_config)
    engine_config = FSDPEngineConfig(
        **{
            "strategy": "fsdp2",
            "model_dtype": dtype,
            "mixed_precision": {"param_dtype": dtype, "reduce_dtype": "float32", "buffer_dtype": "float32"},
            "use_torch_compile": False,
            # verl's forward-only engines stream their weights from host memory in every forward. The optimizer that
            # comes with False holds no state, since it never steps.
            "forward_only": False,
        }
        | (engine or {})
    )
    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=1),
        checkpoint_config=CheckpointConfig(),
    )
