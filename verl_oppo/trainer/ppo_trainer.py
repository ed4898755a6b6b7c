"""Trainer mode `oppo`: verl's colocated asynchronous trainer with inter-step overlap, as hooks only.

verl's `fit()` and `step()` run unchanged. The hooks decide how many prompts enter a step (`prepare_step`), which replay
buffer waits for them, what happens around abort and resume, and what is saved. The decisions themselves are in
`verl_oppo.control`; the tensors stay with verl.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync

from verl_oppo.algorithms.registry import load_algorithm
from verl_oppo.control.chunk_size import make_chunk_size_policy
from verl_oppo.control.overcommit import OvercommitController
from verl_oppo.metrics import (
    ExposedCall,
    chunk_metrics,
    ledger_metrics,
    overlap_metrics,
    staleness_metrics,
)
from verl_oppo.rollout.controller import RolloutControllerGroup, RolloutState
from verl_oppo.rollout.partial import LLMServerClientOppo
from verl_oppo.scoring.reward_loop_worker import ScoreRecord
from verl_oppo.stream.consumer import ConsumerStats
from verl_oppo.trainer.health import HealthCheck
from verl_oppo.trainer.replay_buffer import OppoReplayBuffer
from verl_oppo.trainer.streaming import FinalCall, IntraStepStream
from verl_oppo.trainer.support import AGENT_LOOP_MANAGER, computes_in_float32, load_oppo_config
from verl_oppo.trainer.trace import TrainerTrace
from verl_oppo.trainer.trained_rows import read_trained_rows
from verl_oppo.trainer.verify import check_equal, largest_difference

logger = logging.getLogger(__name__)

STATE_FILE = "oppo.json"

PlainCall = Callable[..., KVBatchMeta]
"""One of verl's own batch calls: (batch, metrics) -> batch, its output written to TransferQueue."""


@register_trainer("oppo")
class PPOTrainerOppo(PPOTrainerColocateAsync):
    """PPO on the first B of B + delta prompts.

    Invariant: every prompt taken from the data loader is admitted by the rollout controller before it is dispatched,
    so the ledger adds up at every step.
    """

    def __init__(self, config: DictConfig) -> None:
        self.oppo = load_oppo_config(config)
        self.algorithm = load_algorithm(self.oppo)
        inter_step = self.oppo.inter_step.effective
        agent = config.actor_rollout_ref.rollout.agent
        with open_dict(agent):
            agent.agent_loop_manager_class = agent.get("agent_loop_manager_class") or AGENT_LOOP_MANAGER
        self.rollout_controller = RolloutControllerGroup(
            batch_size=config.data.train_batch_size,
            max_deferrals=inter_step.max_deferrals,
            device_name=config.trainer.device,
        )
        self.overcommit = OvercommitController(
            rule=inter_step.rule,
            delta_init=inter_step.delta_init,
            delta_min=inter_step.delta_min,
            delta_max=inter_step.delta_max,
            delta_inc=inter_step.delta_inc,
            delta_dec=inter_step.delta_dec,
            window=inter_step.window,
        )
        intra_step = self.oppo.intra_step
        self.stream = IntraStepStream(config, self.oppo)
        self.chunk_size = make_chunk_size_policy(
            chunk_size=intra_step.chunk_size,
            candidates=intra_step.candidates,
            explore_period=intra_step.explore_period,
            explore_steps=intra_step.explore_steps,
        )
        self._exposed: dict[str, ExposedCall] = {}
        self._plain_s: dict[str, float] = {}
        self._verified: dict[str, float] = {}
        self._health: HealthCheck | None = None
        correction = config.algorithm.get("rollout_correction", None) or {}
        self._trace = TrainerTrace(correction.get("rollout_is_threshold") if correction.get("rollout_is") else None)
        super().__init__(config)

    # ---------------------------------- construction ----------------------------------

    def _build_replay_buffer(self) -> OppoReplayBuffer:
        sampler = self.config.trainer.v1.sampler
        return OppoReplayBuffer(
            controller=self.rollout_controller,
            check_health=self._check_health,
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.oppo,
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
            on_evicted=lambda uids: self.stream.forget(uids, self.config.actor_rollout_ref.rollout.n),
            filter_groups_metric=self._resolve_filter_groups_metric(),
        )

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        most = self.config.data.train_batch_size + self.oppo.inter_step.effective.delta_max
        if most > len(self.train_dataset):
            logger.warning(
                "data.train_batch_size + trainer.v1.oppo.inter_step.delta_max is %d prompts, the data set has %d: the "
                "same prompt can be in flight twice",
                most,
                len(self.train_dataset),
            )

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.stream.replace_workers(self.role_worker_mapping)

    def _setup(self) -> None:
        with self.stream.hooks_into_setup():
            super()._setup()
        self.stream.connect(self)
        self.algorithm.connect(self)

    def get_llm_client(self) -> LLMServerClientOppo:
        """The resuming client; each agent loop worker holds its share of a replica's request slots."""
        num_workers = self.config.actor_rollout_ref.rollout.agent.num_workers
        return self.llm_server_manager.get_client(
            client_cls=LLMServerClientOppo,
            controller=self.rollout_controller.handle,
            stream=self.stream.service,
            max_inflight=self.oppo.inter_step.max_inflight_per_replica // num_workers,
        )

    # ---------------------------------- admission ----------------------------------

    def on_train_begin(self) -> None:
        """No warm-up batches: the first step admits B + delta. Adopts what a checkpoint left in TransferQueue."""
        items = (tq.kv_list("train") or {}).get("train", {})
        restored = [key for key, tag in items.items() if tag.get("is_prompt", False)]
        changed = self.rollout_controller.call("reconcile", restored, step=self.global_steps)
        if changed["added"] or changed["removed"]:
            logger.warning("ledger and TransferQueue differed after the restart: %s", changed)

    def prepare_step(self) -> dict[str, float]:
        """Admit new prompts up to B + delta outstanding."""
        num_due = self._num_due()
        if num_due == self.config.data.train_batch_size:
            # verl's cached rollouts (skip.rollout_tq) are replayed by this method only.
            self._add_batch_to_generate()
        elif num_due > 0:
            self._add_prompts_to_generate(num_due)
        metrics = {"oppo/overcommit/delta": self.overcommit.delta}
        if self.overcommit.slope is not None:
            metrics["oppo/overcommit/slope"] = self.overcommit.slope
        return metrics

    def _num_due(self) -> int:
        steps_left = self.total_training_steps - self.global_steps + 1
        return self.rollout_controller.call("num_to_admit", delta=self.overcommit.delta, steps_left=steps_left)

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch = super()._next_train_batch(num_prompts)
        self.rollout_controller.call("admit", list(batch["uid"]), step=self.global_steps)
        return batch

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """Add prompts; refills of evicted groups come here too and stay under the cap of B + delta."""
        num_prompts = min(num_prompts, self._num_due())
        return super()._add_prompts_to_generate(num_prompts) if num_prompts > 0 else 0

    # ---------------------------------- around generation ----------------------------------

    def on_sample_begin(self) -> None:
        """Chunks flow while the engines decode."""
        super().on_sample_begin()
        self._trace.sample_begins()
        self._exposed = {}
        due = (self.config.trainer.save_freq, self.config.trainer.test_freq)
        is_busy = any(freq > 0 and self.global_steps % freq == 0 for freq in due)
        self._chunk = self.chunk_size.size(self.global_steps, busy=is_busy)
        self.stream.begin(self._chunk)

    def on_sample_end(self) -> None:
        """Abort what is unfinished (tokens kept by the client), free the engines, drain the stream."""
        self._trace.sample_ends()
        waited = time.monotonic() - self.replay_buffer.waiting_since
        self.timing_raw.update(self.rollout_controller.call("mark_abort", waited))
        super().on_sample_end()
        # The plain path is timed on an idle scorer.
        self.stream.end(everything=self._is_verify_step())

    def _check_health(self) -> None:
        if self._health is None:
            actors = {"the rollout controller": self.rollout_controller.handle}
            for index, worker in enumerate(self.agent_loop_manager.agent_loop_workers):
                actors[f"agent loop worker {index}"] = worker
            for replica, server in enumerate(self.llm_server_manager.server_handles):
                actors[f"the server of replica {replica}"] = server
            self._health = HealthCheck(
                actors, controller=self.rollout_controller, stall_timeout_s=self.oppo.inter_step.stall_timeout_s
            )
        self._health.check()
        self.stream.check()

    # ---------------------------------- final calls ----------------------------------

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, **kwargs: Any) -> KVBatchMeta:
        """The first hook that sees the sampled batch: account for the reward's final calls, then verl's balancing."""
        if self.stream.streams_reward:
            call = self.stream.reward_call(batch)
            if self._is_verify_step():
                # A plain score must not find the streamed prefix in the scorer's cache.
                self.stream.forget_rewards()
                self._verify("reward", batch, "rm_scores", super()._compute_reward_colocate)
            self._expose("reward", call)
        return super()._balance_batch(batch, metrics=metrics, **kwargs)

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if not self.stream.streams_critic:
            return super()._compute_values(batch, metrics)
        self._streamed_call("critic", batch, "values", super()._compute_values)
        return batch

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if not self.stream.streams_reference:
            return super()._compute_ref_log_prob(batch, metrics)
        self._streamed_call("reference", batch, "ref_log_prob", super()._compute_ref_log_prob)
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._update_critic(batch, metrics)
        self.stream.critic_has_changed()
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self.algorithm.update_actor(self, batch, metrics, super()._update_actor)

    def _streamed_call(self, name: str, batch: KVBatchMeta, field: str, plain: PlainCall) -> None:
        """The final call of a streamed scorer in place of verl's plain one, and both on a verify step."""
        call = self.stream.final_call(name, batch)
        rows = torch.nested.as_nested_tensor([torch.from_numpy(row) for row in call.outputs], layout=torch.jagged)
        fields = TensorDict({field: rows}, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        if self._is_verify_step():
            self._verify(name, batch, field, plain)
        self._expose(name, call)

    def _is_verify_step(self) -> bool:
        every = self.oppo.intra_step.verify
        return every > 0 and (self.global_steps - 1) % every == 0

    def _verify(self, name: str, batch: KVBatchMeta, field: str, plain: PlainCall) -> None:
        """Compute `field` the plain way too, time it and compare. The plain rows stay: they are the same."""
        streamed = self._read_rows(batch, field)
        started = time.monotonic()
        plain(batch, metrics={})
        self._plain_s[name] = time.monotonic() - started
        rows, noise = self._read_rows(batch, field), None
        if not computes_in_float32(self.config, name):
            other_order = KVBatchMeta(partition_id=batch.partition_id, keys=batch.keys[::-1], tags=batch.tags[::-1])
            plain(other_order, metrics={})
            noise = largest_difference(rows, self._read_rows(batch, field))
        self._verified[name] = check_equal(name, batch.keys, streamed, rows, noise)

    def _read_rows(self, batch: KVBatchMeta, field: str) -> list[np.ndarray]:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[field])
        return [row.float().numpy() for row in data[field].unbind()]

    def _expose(self, name: str, call: FinalCall | ScoreRecord) -> None:
        self._exposed[name] = ExposedCall(
            seconds=call.seconds,
            response_tokens=call.response_tokens,
            cached_response_tokens=call.cached_response_tokens,
            plain_s=self._plain_s.get(name),
        )

    # ---------------------------------- after the update ----------------------------------

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        """verl's step, then the overcommit degree of the next one: before the checkpoint is written."""
        batch = super().step(metrics, timing_raw)
        version = self.global_steps - 1
        keeps_log_probs = self.config.actor_rollout_ref.rollout.calculate_log_probs
        trained = read_trained_rows(batch, keeps_log_probs, version)
        metrics.update(staleness_metrics(trained.rows, current_version=version))
        self._trace.trained(self.global_steps, trained.keys, trained.tags, trained.rows)
        frozen = self.config.trainer.critic_warmup > self.global_steps
        # R_t is the mean over prompts, those of groups that DAPO filtered counted.
        reward = float(np.mean(trained.rewards + self.replay_buffer.filtered_rewards))
        self.overcommit.observe(reward, frozen=frozen)
        stats = self.stream.stats()
        if self.stream.active:
            metrics.update(self._stream_metrics(stats, batch, timing_raw))
        self._trace.step_ends(self.global_steps, stats)
        state: RolloutState = self.rollout_controller.call("state")
        metrics.update(ledger_metrics(state.ledger))
        metrics.update(
            {
                "oppo/deferred/num": state.num_deferred,
                "oppo/deferred/total": state.total_deferred,
                "oppo/deferred/age_mean": state.age_mean,
                "oppo/deferred/age_max": state.age_max,
                "oppo/deferred/carried_tokens": state.carried_tokens,
            }
        )
        return batch

    def _stream_metrics(
        self, stats: dict[str, ConsumerStats], batch: KVBatchMeta, timing_raw: dict
    ) -> dict[str, float]:
        """Metrics of intra-step overlap; the tuner learns what the step's chunk size cost."""
        size = self.config.actor_rollout_ref.rollout.response_length if self._chunk is None else self._chunk
        metrics = chunk_metrics(stats, size) | overlap_metrics(self._exposed)
        metrics |= {f"oppo/verify/{name}_difference": value for name, value in self._verified.items()}
        self._verified = {}
        # The reward's final calls end before the batch is sampled, so generation time holds them already.
        waited = sum(call.seconds for name, call in self._exposed.items() if name != "reward")
        tokens = sum(tag["response_len"] for tag in batch.tags if not tag.get("is_padding", False))
        self.chunk_size.observe(self.global_steps, (timing_raw["gen"] + waited) / tokens)
        return metrics

    # ---------------------------------- checkpoint ----------------------------------

    def _save_checkpoint(self) -> None:
        """Write our state before verl writes its pointer to the latest checkpoint, so that both or none count."""
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        os.makedirs(folder, exist_ok=True)
        state = {
            "admission": self.rollout_controller.call("state_dict"),
            "overcommit": self.overcommit.state_dict(),
            "chunk_size": self.chunk_size.state_dict(),
        }
        path = os.path.join(folder, STATE_FILE)
        with open(f"{path}.tmp", "w") as file:
            json.dump(state, file)
        os.replace(f"{path}.tmp", path)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        path = os.path.join(self._resumed_folder(), STATE_FILE)
        if not os.path.exists(path):
            logger.warning("no %s: the checkpoint is of another trainer mode; delta and ledger start anew", path)
            return
        with open(path) as file:
            state = json.load(file)
        self.rollout_controller.call("load_state_dict", state["admission"])
        self.overcommit.load_state_dict(state["overcommit"])
        self.chunk_size.load_state_dict(state["chunk_size"])

    def _resumed_folder(self) -> str:
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path":
            return os.path.abspath(trainer.resume_from_path)
        return os.path.join(os.path.abspath(trainer.default_local_dir), f"global_step_{self.global_steps}")
