"""Intra-step overlap as the trainer sees it: who takes chunks, when the stream is open, and the final calls.

`PPOTrainerOppo` owns one `IntraStepStream` and calls it from its hooks. The stream itself (hub, pump, translators) runs
in the actor of `stream.service`; the scorers in verl's worker groups. It does not know advantages or losses.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from transformers import PretrainedConfig
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.padding_utils import SYNTHETIC_PADDING_SEQ_LEN
from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.config import omega_conf_to_dataclass

from verl_oppo.config.schema import OppoConfig
from verl_oppo.scoring import reward_loop, reward_support, support
from verl_oppo.scoring.device_memory import MemoryNeed, memory_needed, reason_not_to_stream
from verl_oppo.scoring.reward_loop_worker import REWARD, ScoreRecord
from verl_oppo.scoring.scorer import Scored, ScorerSettings, Trajectory
from verl_oppo.scoring.workers import ActorRolloutRefWorkerOppo, CriticWorkerOppo
from verl_oppo.stream.consumer import ConsumerSettings, ConsumerStats
from verl_oppo.stream.service import StreamClient
from verl_oppo.stream.target import WorkerGroupTarget
from verl_oppo.trainer.support import computes_in_float32

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S = 120.0
"""Longest wait for a rollout server to answer a call that computes nothing."""
SETUP_TIMEOUT_S = 600.0
"""Longest wait for a scorer to be built inside a worker."""
DRAIN_TIMEOUT_S = 300.0
"""Longest wait for the prefill call in flight when the stream closes."""


DATA_MESHES = {"critic": "train", "reference": "ref"}
"""Meshes by which verl's workers register their data-parallel ranks."""
DEFAULT_CACHE_BYTES = 4 << 30
"""Upper bound of a scorer's cache on one rank, bytes."""


def scorer_settings(
    config: DictConfig, hf_config: PretrainedConfig, num_ranks: int, max_prompts: int, name: str
) -> ScorerSettings:
    """Sizes of a critic's or reference's scorer: the cache holds what `max_prompts` prompts in flight need on a rank.

    Raises ValueError if `DEFAULT_CACHE_BYTES` does not hold one longest trajectory.
    """
    rollout = config.actor_rollout_ref.rollout
    # Padding rows come in verl's own length, whatever the run's is.
    longest = max(rollout.prompt_length + rollout.response_length, SYNTHETIC_PADDING_SEQ_LEN)
    settings = ScorerSettings(
        cache_bytes=DEFAULT_CACHE_BYTES,
        longest_trajectory=longest,
        temperature=rollout.temperature,
        key=f"trainer.v1.oppo.intra_step.{name}",
    )
    # Keys and values in the widest type an engine computes in.
    token_bytes = support.bytes_per_token(hf_config, torch.float32)
    support.cache_blocks(settings, token_bytes)
    trajectories = -(-max_prompts * rollout.n // num_ranks) + 1
    blocks = trajectories * -(-longest // settings.block_size) + 1
    wanted = blocks * settings.block_size * token_bytes
    return replace(settings, cache_bytes=min(DEFAULT_CACHE_BYTES, wanted))


def trajectory_of(key: str) -> str:
    """Trajectory id of a row: a session's first output is what the token tee saw; others were never streamed."""
    session, _, index = key.rpartition("_")
    return session if index == "0" else key


@dataclass(frozen=True)
class FinalCall:
    """Outputs of one batch's final call, in the order of its keys.

    Attributes:
        outputs: one float32 array of (response_len,) for each row.
        response_tokens, cached_response_tokens: over all rows.
        seconds: how long the trainer waited for it.
    """

    outputs: list[np.ndarray]
    response_tokens: int
    cached_response_tokens: int
    seconds: float


@dataclass(frozen=True)
class FusedScorer:
    """A scorer inside verl's fused workers, beside the actor: `role` is the prefix of its methods there."""

    group: RayWorkerGroup
    role: Role
    data_ranks: list[int]
    need: MemoryNeed


class IntraStepStream:
    """The run's stream, or the fact that there is none.

    Invariant: what shares devices with the actor (critic, reference, a colocated reward model) gets prefill calls only
    between `begin` and `end`; where nothing streams, no actor, process or thread exists.
    """

    def __init__(self, config: DictConfig, oppo: OppoConfig) -> None:
        intra_step = oppo.intra_step
        enabled = intra_step.enable and config.actor_rollout_ref.rollout.name == "vllm"
        self._config = config
        self._reward_kind = reward_support.resolve_reward_kind(config, oppo) if enabled else "off"
        self._streams_critic = enabled and intra_step.critic and need_critic(config)
        self._streams_reference = enabled and intra_step.reference and need_reference_policy(config)
        self._max_prompts = config.data.train_batch_size + oppo.inter_step.effective.delta_max
        self._client: StreamClient | None = None
        self._servers: list[ray.actor.ActorHandle] = []
        self._reward_loop_manager: reward_loop.RewardLoopManagerOppo | None = None
        self._reward_records: dict[str, ScoreRecord] = {}
        self._chunk_size: int | None = None
        self._fused: dict[str, FusedScorer] = {}
        if intra_step.enable and not self.active:
            logger.warning("trainer.v1.oppo.intra_step: nothing streams in this run, all scores are verl's own")

    @property
    def active(self) -> bool:
        return self._reward_kind != "off" or self._streams_critic or self._streams_reference

    @property
    def service(self) -> ray.actor.ActorHandle | None:
        """The stream service's actor, once `connect` has started it."""
        return self._client.handle if self._client is not None else None

    @property
    def consumers(self) -> list[str]:
        """Names of the scorers that take chunks."""
        streaming = {
            REWARD: self.streams_reward,
            "critic": self._streams_critic,
            "reference": self._streams_reference,
        }
        return [name for name, streams in streaming.items() if streams]

    @property
    def streams_reward(self) -> bool:
        return self._reward_kind != "off"

    @property
    def streams_critic(self) -> bool:
        return self._streams_critic

    @property
    def streams_reference(self) -> bool:
        return self._streams_reference

    # ---------------------------------- construction ----------------------------------

    def replace_workers(self, role_worker_mapping: dict) -> None:
        """Put worker classes with a scorer inside where verl has its own."""
        if self._streams_critic:
            role_worker_mapping[Role.Critic] = ray.remote(CriticWorkerOppo)
        if self._streams_reference:
            assert Role.ActorRolloutRef in role_worker_mapping, "the reference shares the actor's worker"
            role_worker_mapping[Role.ActorRolloutRef] = ray.remote(ActorRolloutRefWorkerOppo)

    @contextmanager
    def hooks_into_setup(self) -> Iterator[None]:
        """While verl's `_setup` runs: our rollout server and our reward loop manager in place of its own.

        The manager even where nothing streams if a reward model has devices of its own: verl's fails (verl#7368).
        """
        if self.active:
            # verl's vLLM modules import only where vLLM is installed; a run without streaming does without.
            from verl_oppo.rollout.vllm_server import register_replica

            register_replica()
        elif not reward_support.has_own_devices(self._config):
            yield
            return
        original = trainer_base.RewardLoopManager

        def build(config: DictConfig, rm_resource_pool: object = None) -> reward_loop.RewardLoopManagerOppo:
            return reward_loop.RewardLoopManagerOppo(config, rm_resource_pool, kind=self._reward_kind)

        trainer_base.RewardLoopManager = build
        try:
            yield
        finally:
            trainer_base.RewardLoopManager = original

    def connect(self, trainer: trainer_base.PPOTrainer) -> None:
        """Start the service and give it its consumers; called once the worker groups hold their models."""
        if not self.active:
            return
        self._client = StreamClient.start()
        self._servers = list(trainer.llm_server_manager.server_handles)
        if self.streams_reward:
            self._connect_reward(trainer)
        if self._streams_critic:
            critic = omega_conf_to_dataclass(self._config.critic)
            self._connect_fused("critic", trainer.critic_wg, Role.Critic, critic.model.hf_config)
        if self._streams_reference:
            actor = omega_conf_to_dataclass(self._config.actor_rollout_ref.model)
            self._connect_fused("reference", trainer.ref_policy_wg, Role.ActorRolloutRef, actor.hf_config)
        calls = [server.connect_stream.remote(self._client.handle, None) for server in self._servers]
        ray.get(calls, timeout=RPC_TIMEOUT_S)

    def _connect_reward(self, trainer: trainer_base.PPOTrainer) -> None:
        manager = trainer.reward_loop_manager
        self._reward_loop_manager = manager
        if self._reward_kind == "vllm":
            target = manager.vllm_target()
        else:
            pool = trainer.resource_pool_manager.get_resource_pool(Role.RewardModel)
            self.reward_wg = reward_loop.build_reward_worker_group(
                self._config, pool, max_prompts=self._max_prompts, kind=self._reward_kind
            )
            target = reward_loop.reward_group_target(self.reward_wg)
        self._client.call("add_consumer", REWARD, target, ConsumerSettings(), translator=manager.translator())
        manager.attach(self._client)

    def _connect_fused(self, name: str, group: RayWorkerGroup, role: Role, hf_config: PretrainedConfig) -> None:
        """Builds the scorer; whether it takes chunks is decided once the rollout engine is awake beside it."""
        data_ranks = group._query_dispatch_info(DATA_MESHES[name])
        settings = scorer_settings(self._config, hf_config, max(data_ranks) + 1, self._max_prompts, name)
        ray.get(group.oppo_setup(settings), timeout=SETUP_TIMEOUT_S)
        outputs = 1 if name == "critic" else hf_config.get_text_config().vocab_size
        dtype = torch.float32 if computes_in_float32(self._config, name) else torch.bfloat16
        self._fused[name] = FusedScorer(group, role, data_ranks, memory_needed(hf_config, settings, dtype, outputs))

    def _admit_fused(self) -> None:
        """Before the first chunk: those that fit take part, the others compute as in verl, and the log says why."""
        while self._fused:
            name, fused = self._fused.popitem()
            stats = ray.get(fused.group.oppo_stats(), timeout=RPC_TIMEOUT_S)
            reason = reason_not_to_stream(stats, fused.need)
            if reason is None:
                target = WorkerGroupTarget(fused.group.workers, prefix=f"{fused.role}_", data_ranks=fused.data_ranks)
                self._client.call("add_consumer", name, target, ConsumerSettings())
                continue
            logger.warning("trainer.v1.oppo.intra_step.%s: does not stream, since %s", name, reason)
            self._streams_critic = self._streams_critic and name != "critic"
            self._streams_reference = self._streams_reference and name != "reference"

    # ---------------------------------- a step ----------------------------------

    def begin(self, chunk_size: int | None) -> None:
        """The engines decode: chunks flow."""
        self._admit_fused()
        if not self.active:
            return
        if chunk_size != self._chunk_size:
            ray.get([server.set_chunk_size.remote(chunk_size) for server in self._servers], timeout=RPC_TIMEOUT_S)
            self._chunk_size = chunk_size
        self._client.call("open", self.consumers)

    def end(self, everything: bool = False) -> None:
        """Drain: after it the trainer may call the worker groups itself.

        A reward model on devices of its own goes on with what has been decoded, unless `everything` is to be idle.
        """
        closing = [name for name in self.consumers if everything or self._shares_devices(name)]
        if closing:
            self._client.call("close", closing, DRAIN_TIMEOUT_S)

    def _shares_devices(self, name: str) -> bool:
        return name != REWARD or reward_support.is_colocated(self._config)

    def forget(self, uids: Sequence[str], num_sessions: int) -> None:
        """These prompts will not be trained."""
        if self.active and uids:
            trajectories = [f"{uid}_{session}" for uid in uids for session in range(num_sessions)]
            self._client.call("drop", trajectories)
            for trajectory in trajectories:
                self._reward_records.pop(trajectory, None)

    def critic_has_changed(self) -> None:
        if self._streams_critic:
            self._client.call("invalidate", "critic")

    def final_call(self, name: str, batch: KVBatchMeta) -> FinalCall:
        """Outputs on the final ids of a batch, one row a key; padding rows are computed like any other."""
        started = time.monotonic()
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["prompts", "responses"])
        prompts, responses = data["prompts"].unbind(), data["responses"].unbind()
        trajectories = [
            Trajectory(trajectory_of(key), torch.cat([prompt, response]).numpy())
            for key, prompt, response in zip(batch.keys, prompts, responses, strict=True)
        ]
        scored: list[Scored] = self._client.call("score", name, trajectories)
        outputs = [
            one.response(len(prompt), len(response))
            for one, prompt, response in zip(scored, prompts, responses, strict=True)
        ]
        return FinalCall(
            outputs=outputs,
            response_tokens=sum(map(len, responses)),
            cached_response_tokens=sum(
                one.cached_response_tokens(len(prompt)) for one, prompt in zip(scored, prompts, strict=True)
            ),
            seconds=time.monotonic() - started,
        )

    def reward_call(self, batch: KVBatchMeta) -> ScoreRecord:
        """What the reward model's final calls on the batch's rows cost: their tokens summed, the last one's time.

        They ran one by one as trajectories ended, so the step waited only for the one that completed the batch.
        """
        self._reward_records.update(self._reward_loop_manager.take_records())
        records = [self._reward_records.pop(trajectory_of(key), None) for key in batch.keys]
        records = [record for record in records if record is not None]
        return ScoreRecord(
            response_tokens=sum(record.response_tokens for record in records),
            cached_response_tokens=sum(record.cached_response_tokens for record in records),
            seconds=max(records, key=lambda record: record.scored_at).seconds if records else 0.0,
        )

    def forget_rewards(self) -> None:
        """A plain call after it computes everything.

        A worker group freed each trajectory with its final call; vLLM's prefix cache keeps what it has seen.
        """
        if self._reward_kind == "vllm":
            self._client.call("invalidate", REWARD)

    def stats(self) -> dict[str, ConsumerStats]:
        """What each consumer did since the last call, by name."""
        return self._client.call("stats") if self.active else {}

    def check(self) -> None:
        """Raise if the reward can no longer be had; never blocks."""
        if self._reward_loop_manager is not None:
            self._reward_loop_manager.check()
