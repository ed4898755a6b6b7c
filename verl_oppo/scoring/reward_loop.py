"""verl's reward loop where a discriminative reward model is scored through the stream service.

The trainer puts `RewardLoopManagerOppo` where verl builds its manager, and calls `attach` once the stream service is
there. verl's agent loops then have each trajectory scored at its end, colocated or not, so that DAPO can filter before
sampling. Rule-based and generative rewards are verl's own. It does not know which kind of scorer answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from transformers import PretrainedConfig
from verl.experimental.reward_loop import reward_loop
from verl.experimental.reward_loop.reward_loop import RewardLoopManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import HFModelConfig, RewardModelConfig

from verl_oppo.scoring import reward_support
from verl_oppo.scoring.reward_input import RewardInputTranslator
from verl_oppo.scoring.reward_loop_worker import RewardLoopWorkerOppo, ScoreRecord, StreamCalls
from verl_oppo.scoring.scorer import ScorerSettings, ScorerStats
from verl_oppo.scoring.vllm_reward import RewardServerInfo, VllmRewardTarget
from verl_oppo.scoring.workers import DATA_MESH, RewardWorkerOppo, reward_worker_config
from verl_oppo.stream.target import WorkerGroupTarget

STREAMING_KINDS = ("vllm", "fsdp", "megatron")
SETUP_TIMEOUT_S = 600.0
"""Seconds for a reward model to load, or a worker to answer a call that computes nothing."""


class NoRewardServer:
    """Stands for verl's `RewardModelManager` where a worker group holds the reward model. It launches nothing."""

    def __init__(self, config: RewardModelConfig, resource_pool: RayResourcePool | None = None) -> None:
        pass

    def get_router_address(self) -> None:
        return None


@contextmanager
def no_reward_server() -> Iterator[None]:
    """verl's reward loop manager launches no reward server while this lasts."""
    original = reward_loop.RewardModelManager
    reward_loop.RewardModelManager = NoRewardServer
    try:
        yield
    finally:
        reward_loop.RewardModelManager = original


class RewardLoopManagerOppo(RewardLoopManager):
    """verl's manager. `kind` is what `reward_support.resolve_reward_kind` says; with `off` it scores as verl does.

    Invariant: with any other kind each trajectory is scored at its end, no reward server is ever put to sleep or woken,
    and with a kind other than `vllm` there is no reward server.
    """

    def __init__(self, config: DictConfig, rm_resource_pool: RayResourcePool | None = None, *, kind: str) -> None:
        self.kind = kind
        if kind == "vllm" or (kind == "off" and reward_support.has_own_devices(config)):
            keep_awake(config)
        with no_reward_server() if kind in STREAMING_KINDS and kind != "vllm" else nullcontext():
            super().__init__(config, rm_resource_pool)
        self.reward_server_manager = self.reward_model_manager if kind == "vllm" else None
        if self.streams:
            # verl's `compute_rm_score` wakes it and puts it to sleep.
            self.reward_model_manager = None
        self._pings: dict[ray.ObjectRef, int] = {}

    @property
    def streams(self) -> bool:
        return self.kind in STREAMING_KINDS

    @property
    def reward_loop_worker_handles(self) -> list[ray.actor.ActorHandle] | None:
        return self.reward_loop_workers if self.streams else super().reward_loop_worker_handles

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers_class = ray.remote(RewardLoopWorkerOppo)
        super()._init_reward_loop_workers()

    def attach(self, stream: StreamCalls) -> None:
        """Scores come from this stream service from now on, from its consumer `REWARD`."""
        assert self.streams, f"reward kind {self.kind!r} does not stream"
        self._ask_workers("oppo_attach", stream)

    def translator(self) -> RewardInputTranslator:
        """The translator of the consumer `REWARD`."""
        actor_path, reward_path = reward_support.model_paths(self.config)
        return RewardInputTranslator(actor_path, reward_path, reward_support.chat_template_kwargs(self.config))

    def vllm_target(self) -> VllmRewardTarget:
        """The target of the consumer `REWARD` with kind `vllm`. Raises ValueError if the server is no classifier."""
        assert self.reward_server_manager is not None, f"reward kind {self.kind!r} has no reward server"
        servers = self.reward_server_manager.server_handles
        infos: list[RewardServerInfo] = ray.get(
            [server.oppo_describe.remote() for server in servers], timeout=SETUP_TIMEOUT_S
        )
        for info in infos:
            if not info.classifies or not info.caches_prefixes:
                raise ValueError(
                    f"reward.reward_model.model_path is {self.config.reward.reward_model.model_path!r}, whose server "
                    f"says {info}, allowed with trainer.v1.oppo.intra_step.reward=vllm is a classifier with causal "
                    "attention that caches prefixes"
                )
        return VllmRewardTarget(servers, infos)

    def take_records(self) -> dict[str, ScoreRecord]:
        """What the final calls since the last time found, by trajectory id; carried and evicted ones included."""
        records: dict[str, ScoreRecord] = {}
        for taken in self._ask_workers("oppo_take_records"):
            records.update(taken)
        return records

    def check(self) -> None:
        """Raises if a worker is dead or can no longer have scores; never blocks."""
        answered, _ = ray.wait(list(self._pings), num_returns=len(self._pings), timeout=0) if self._pings else ([], [])
        for ref in answered:
            index = self._pings.pop(ref)
            failure = ray.get(ref)
            if failure is not None:
                raise RuntimeError(f"reward loop worker {index} can no longer have scores: {failure}")
        waiting = set(self._pings.values())
        for index, worker in enumerate(self.reward_loop_workers):
            if index not in waiting:
                self._pings[worker.oppo_failure.remote()] = index

    def _ask_workers(self, method: str, *args: Any) -> list[Any]:
        calls = [getattr(worker, method).remote(*args) for worker in self.reward_loop_workers]
        return ray.get(calls, timeout=SETUP_TIMEOUT_S)


def keep_awake(config: DictConfig) -> None:
    """A reward server on devices of its own keeps its memory; verl would put it to sleep and never wake it there."""
    rollout = config.reward.reward_model.rollout
    assert not rollout.free_cache_engine or not reward_support.is_colocated(config)
    with open_dict(config):
        rollout.free_cache_engine = False


def build_reward_worker_group(
    config: DictConfig,
    resource_pool: RayResourcePool,
    settings: ScorerSettings | None = None,
    max_prompts: int = 0,
    kind: str = "fsdp",
) -> RayWorkerGroup:
    """The reward model on verl's FSDP engine or, with `kind` megatron, on Megatron-Core, ready for `oppo_*` calls.

    One worker per device of the pool; `reward_group_target` is what the stream calls. `settings` sizes its cache; left
    out, the cache holds what `max_prompts` prompts (by default one batch) need, see
    `reward_support.reward_scorer_settings`. Raises ValueError for a reward model that cannot be served.
    """
    assert kind in ("fsdp", "megatron"), f"a reward of kind {kind!r} has no worker group"
    tensor_parallel = reward_support.tensor_parallel(config) if kind == "megatron" else 1
    worker_cls, hf_config = _megatron_worker(config, tensor_parallel) if kind == "megatron" else _fsdp_worker(config)
    if settings is None:
        settings = reward_support.reward_scorer_settings(
            config,
            hf_config,
            num_ranks=resource_pool.world_size // tensor_parallel,
            max_prompts=max_prompts or config.data.train_batch_size,
            tensor_parallel=tensor_parallel,
        )
    group = RayWorkerGroup(resource_pool=resource_pool, ray_cls_with_init=worker_cls, device_name=config.trainer.device)
    group.reset()
    stats: list[ScorerStats] = ray.get(group.oppo_setup(settings), timeout=SETUP_TIMEOUT_S)
    assert len(stats) == resource_pool.world_size
    return group


def reward_group_target(group: RayWorkerGroup) -> WorkerGroupTarget:
    """What the stream calls: one rank per data-parallel rank of the group."""
    return WorkerGroupTarget(group.workers, data_ranks=group._query_dispatch_info(DATA_MESH))


def _fsdp_worker(config: DictConfig) -> tuple[RayClassWithInitArgs, PretrainedConfig]:
    worker_config = reward_worker_config(
        config.reward.reward_model,
        engine=engine_overrides(config),
        model=model_overrides(config),
    )
    worker_cls = RayClassWithInitArgs(cls=ray.remote(RewardWorkerOppo), config=worker_config)
    return worker_cls, worker_config.model_config.hf_config


def _megatron_worker(config: DictConfig, tensor_parallel: int) -> tuple[RayClassWithInitArgs, PretrainedConfig]:
    # Megatron-Core is an optional package, asked for by this kind only.
    from verl_oppo.scoring.megatron_workers import MegatronRewardConfig, RewardWorkerMegatron

    reward_model = config.reward.reward_model
    model = HFModelConfig(path=reward_model.model_path, load_tokenizer=False)
    worker_config = MegatronRewardConfig(model, reward_model.rollout.dtype, tensor_parallel)
    return RayClassWithInitArgs(cls=ray.remote(RewardWorkerMegatron), config=worker_config), model.hf_config


def engine_overrides(config: DictConfig) -> dict[str, Any]:
    """The actor's FSDP strategy; weights offloaded between two streams if the actor's are and both share devices."""
    actor = config.actor_rollout_ref.actor
    strategy = actor.strategy if actor.strategy in ("fsdp", "fsdp2") else "fsdp2"
    offload = actor.get("fsdp_config", {}).get("param_offload", False)
    return {"strategy": strategy, "param_offload": bool(offload) and reward_support.is_colocated(config)}


def model_overrides(config: DictConfig) -> dict[str, Any]:
    """The attention implementation that the actor is told to use, since both run on the same devices."""
    implementation = (config.actor_rollout_ref.model.get("override_config", None) or {}).get(
        "attn_implementation", None
    )
    return {} if implementation is None else {"override_config": {"attn_implementation": implementation}}
