"""Trainer mode `oppo`: verl's colocated asynchronous trainer with inter-step overlap, as hooks only.

verl's `fit()` and `step()` run unchanged. The hooks decide how many prompts enter a step (`prepare_step`), which replay
buffer waits for them, what happens around abort and resume, and what is saved. The decisions themselves are in
`verl_oppo.control`; the tensors stay with verl.
"""

import json
import logging
import os
import time
from typing import Any

import numpy as np
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync

from verl_oppo.control.overcommit import OvercommitController
from verl_oppo.metrics import TrainedRow, ledger_metrics, staleness_metrics
from verl_oppo.rollout.agent_loop import TOKEN_VERSIONS_KEY
from verl_oppo.rollout.controller import RolloutControllerGroup, RolloutState
from verl_oppo.rollout.partial import LLMServerClientOppo
from verl_oppo.trainer.health import HealthCheck
from verl_oppo.trainer.replay_buffer import OppoReplayBuffer
from verl_oppo.trainer.support import AGENT_LOOP_MANAGER, load_oppo_config

logger = logging.getLogger(__name__)

STATE_FILE = "oppo.json"


@register_trainer("oppo")
class PPOTrainerOppo(PPOTrainerColocateAsync):
    """PPO on the first B of B + delta prompts.

    Invariant: every prompt taken from the data loader is admitted by the rollout controller before it is dispatched,
    so the ledger adds up at every step.
    """

    def __init__(self, config: DictConfig) -> None:
        self.oppo = load_oppo_config(config)
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
        self._health: HealthCheck | None = None
        self._restored_state: dict[str, Any] | None = None
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

    def get_llm_client(self) -> LLMServerClientOppo:
        """The resuming client; each agent loop worker holds its share of a replica's request slots."""
        num_workers = self.config.actor_rollout_ref.rollout.agent.num_workers
        return self.llm_server_manager.get_client(
            client_cls=LLMServerClientOppo,
            controller=self.rollout_controller.handle,
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

    def on_sample_end(self) -> None:
        """Abort what is unfinished (tokens kept by the client) and free the engines for training."""
        waited = time.monotonic() - self.replay_buffer.waiting_since
        self.timing_raw.update(self.rollout_controller.call("mark_abort", waited))
        super().on_sample_end()

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

    # ---------------------------------- after the update ----------------------------------

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        """verl's step, then the overcommit degree of the next one: before the checkpoint is written."""
        batch = super().step(metrics, timing_raw)
        rows, reward = self._read_trained_rows(batch)
        metrics.update(staleness_metrics(rows, current_version=self.global_steps - 1))
        frozen = self.config.trainer.critic_warmup > self.global_steps
        self.overcommit.observe(reward, frozen=frozen)
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

    def _read_trained_rows(self, batch: KVBatchMeta) -> tuple[list[TrainedRow], float]:
        """The step's real rows, and R_t: the mean unpenalised score a prompt, DAPO-filtered groups counted."""
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        fields = ["rm_scores", "response_mask", "extra_fields", "old_log_probs"]
        keeps_log_probs = self.config.actor_rollout_ref.rollout.calculate_log_probs
        if keeps_log_probs:
            fields.append("rollout_log_probs")
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        rows, rewards = [], {}
        for index, (key, extra) in enumerate(zip(keys, data["extra_fields"].tolist(), strict=True)):
            probs_diff = None
            if keeps_log_probs:
                probs_diff = (data["old_log_probs"][index].exp() - data["rollout_log_probs"][index].exp()).abs().numpy()
            mask = data["response_mask"][index].bool().numpy()
            rows.append(TrainedRow(versions=extra[TOKEN_VERSIONS_KEY], mask=mask, probs_diff=probs_diff))
            rewards.setdefault(key.split("_")[0], []).append(float(data["rm_scores"][index].sum()))
        per_prompt = [float(np.mean(scores)) for scores in rewards.values()] + self.replay_buffer.filtered_rewards
        return rows, float(np.mean(per_prompt))

    # ---------------------------------- checkpoint ----------------------------------

    def _save_checkpoint(self) -> None:
        """Write our state before verl writes its pointer to the latest checkpoint, so that both or none count."""
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        os.makedirs(folder, exist_ok=True)
        state = {
            "admission": self.rollout_controller.call("state_dict"),
            "overcommit": self.overcommit.state_dict(),
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

    def _resumed_folder(self) -> str:
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path":
            return os.path.abspath(trainer.resume_from_path)
        return os.path.join(os.path.abspath(trainer.default_local_dir), f"global_step_{self.global_steps}")
