"""verl's reward loop where a discriminative reward model is scored through the stream service.

The trainer puts `RewardLoopManagerOppo` where verl builds its manager, and calls `attach` once the stream service is
there. verl's agent loops then have each trajectory scored at its end, colocated or not, so that DAPO can filter before
sampling. Rule-based and generative rewards are verl's own. It does not know which kind of scorer answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

import ray
from omegaconf import DictConfig, open_dict
from transformers import PretrainedConfig
from verl import DataProto
from verl.experimental.reward_loop import reward_loop
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import HFModelConfig, RewardModelConfig

from verl_oppo.scoring import reward_support
from verl_oppo.scoring.reward_input import RewardInput, RewardInputTranslator
from verl_oppo.scoring.scorer import Scored, ScorerSettings, ScorerStats, Trajectory
from verl_oppo.scoring.vllm_reward import RewardServerInfo, VllmRewardTarget
from verl_oppo.scoring.workers import DATA_MESH, RewardWorkerOppo, reward_worker_config
from verl_oppo.stream.target import WorkerGroupTarget

CONSUMER = "reward"
"""Name of the reward model among the stream's consumers."""
STREAMING_KINDS = ("vllm", "fsdp", "megatron")
SETUP_TIMEOUT_S = 600.0
"""Seconds for a reward model to load, or a worker to answer a call that computes nothing."""


class StreamCalls(Protocol):
    """What is asked of `stream.service.StreamClient`."""

    async def call_async(self, method: str, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class ScoreRecord:
    """What the final call of one trajectory found, in tokens of the reward model's input."""

    response_tokens: int
    cached_response_tokens: int
    seconds: float
    """From the finished trajectory to its score."""
    scored_at: float = 0.0
    """When the score was there, seconds of `time.time()`: tells which trajectory completed a batch."""


class RewardLoopWorkerOppo(RewardLoopWorker):
    """verl's worker; a discriminative reward model's score comes from the stream service once that is attached.

    Invariant: a score is the scorer's answer on the final input, or an error; never a default.
    """

    def __init__(self, config: DictConfig, reward_router_address: str | None = None) -> None:
        super().__init__(config, reward_router_address)
        self._stream: StreamCalls | None = None
        self._failure: str | None = None
        self._records: dict[str, ScoreRecord] = {}
        if self.reward_model_tokenizer is not None:
            self._input = RewardInput(self.input_tokenizer, self.reward_model_tokenizer)

    async def oppo_attach(self, stream: StreamCalls) -> None:
        self._stream = stream

    async def oppo_failure(self) -> str | None:
        """Why scores can no longer be had, once that is so. A refused input is not among the reasons."""
        return self._failure

    async def oppo_take_records(self) -> dict[str, ScoreRecord]:
        """Records by trajectory id since the last call."""
        records, self._records = self._records, {}
        return records

    async def compute_score_disrm(self, data: DataProto) -> dict[str, Any]:
        """Score of one trajectory, with the `reward_extra_info` that verl's agent loop reads and verl leaves out.

        Raises the scorer's own error; ValueError, naming the trajectory, for an input that does not fit.
        """
        if self._stream is not None:
            return {"reward_score": await self._streamed_score(data), "reward_extra_info": {}}
        if self.reward_router_address is None:
            raise RuntimeError("the reward model has no server and the stream service is not attached yet")
        return {"reward_extra_info": {}, **await super().compute_score_disrm(data)}

    async def _streamed_score(self, data: DataProto) -> float:
        started = time.monotonic()
        input_ids = self._input.token_ids(await self._preprocess_reward_inputs(data))
        trajectory = Trajectory(trajectory_id(data), input_ids)
        try:
            (scored,) = await self._stream.call_async("score", CONSUMER, [trajectory])
        except ValueError:
            raise
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        self._records[trajectory.trajectory_id] = self._record(data, input_ids, scored, started)
        return scored.last

    def _record(self, data: DataProto, input_ids: Any, scored: Scored, started: float) -> ScoreRecord:
        first, end = self._input.response_span(list(data.non_tensor_batch["raw_prompt"][0]), input_ids)
        cached = min(end, scored.cached_tokens) - first
        return ScoreRecord(end - first, max(0, cached), time.monotonic() - started, time.time())


def trajectory_id(data: DataProto) -> str:
    """Identity of the trajectory as the token tee has it; a name of its own for a batch that carries none."""
    fields = data.non_tensor_batch
    if "uid" in fields and "session_id" in fields:
        return f"{fields['uid'][0]}_{fields['session_id'][0]}"
    return uuid4().hex


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
    """verl's manager. `kind` is what `reward_support.resolve_reward_kind` says; with `off` all is verl's.

    Invariant: with any other kind each trajectory is scored at its end, no reward server is ever put to sleep or woken,
    and with a kind other than `vllm` there is no reward server.
    """

    def __init__(self, config: DictConfig, rm_resource_pool: RayResourcePool | None = None, *, kind: str) -> None:
        self.kind = kind
        if kind == "vllm":
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
        """Scores come from this stream service from now on, from its consumer `CONSUMER`."""
        assert self.streams, f"reward kind {self.kind!r} does not stream"
        self._ask_workers("oppo_attach", stream)

    def translator(self) -> RewardInputTranslator:
        """The translator of the consumer `CONSUMER`."""
        actor_path, reward_path = reward_support.model_paths(self.config)
        return RewardInputTranslator(actor_path, reward_path, reward_support.chat_template_kwargs(self.config))

    def vllm_target(self) -> VllmRewardTarget:
        """The target of the consumer `CONSUMER` with kind `vllm`. Raises ValueError if the server is no classifier."""
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
