"""Online DPO: the best and the worst response of each prompt, by the run's own reward, under the DPO loss.

`trainer.v1.oppo.algorithm=online_dpo` with `rollout.n` of 2 or more. Sampling, deferral, scores and reference log-probs
are those of every run; only the actor's update differs: it trains one pair of rows a prompt (`pairs.py`) with
`dpo_loss.py` in verl's actor worker. Rows of a group that are neither best nor worst are scored and not trained.

A group is trained once all its members are done, so a pair can hold tokens of older weights, as any group. The DPO loss
has no importance weight: log-probs are those of the weights that are trained, and a preference stays one whoever wrote
the two responses. What deferral changes is which weights proposed them, so the margin of stale pairs (any token of
either member from older weights) is reported beside that of fresh ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.distillation import is_distillation_enabled
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_oppo.algorithms.algorithm import Algorithm, PlainUpdate
from verl_oppo.algorithms.dpo_loss import PAIR_SIZE, PAIR_WEIGHT, dpo_loss, sequence_sums
from verl_oppo.algorithms.pairs import Pair, balance_pairs, choose_pairs, pair_weights
from verl_oppo.config.schema import OnlineDPOConfig, OppoConfig
from verl_oppo.metrics import expand_versions
from verl_oppo.rollout.agent_loop import TOKEN_VERSIONS_KEY

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
LOSS_METRICS = ("loss", "rewards/", "logps/")
"""Metrics that keep the field's own names; the others are verl's and get its `actor/`."""

REFUSED = {
    f"{ACTOR}.shuffle": (False, "pairs are adjacent rows"),
    f"{ACTOR}.entropy_coeff": (0, "the DPO loss has no entropy term"),
    f"{ACTOR}.use_prefix_grouper": (False, "it reorders the rows of a micro batch"),
    f"{CORRECTION}.rollout_rs": (None, "rejection sampling takes tokens out of a response's log-prob"),
    f"{CORRECTION}.bypass_mode": (False, "margins are those of the trained weights, not of the rollout's"),
    "trainer.critic_warmup": (0, "there is no critic"),
}
"""Key of verl's: the only value allowed, and why."""


class OnlineDPO(Algorithm):
    """Invariant: the actor is trained on whole pairs only, each in one micro batch, and on each pair once an epoch."""

    preset = {
        # Any estimator without a critic. Advantages are not trained on; verl's metrics want some.
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "critic.enable": False,
        # verl's switch for the reference; its own KL term belongs to a loss that is not used.
        f"{ACTOR}.use_kl_loss": True,
    }

    def __init__(self, oppo: OppoConfig) -> None:
        self.config: OnlineDPOConfig = oppo.online_dpo

    def check(self, config: DictConfig) -> None:
        for key, value in self.preset.items():
            if OmegaConf.select(config, key) != value:
                raise ValueError(f"{key} is {OmegaConf.select(config, key)!r}; allowed with online_dpo: {value!r}")
        for key, (allowed, why) in REFUSED.items():
            if (value := OmegaConf.select(config, key)) and value != allowed:
                raise ValueError(f"{key} is {value!r}; allowed with online_dpo: {allowed!r}, since {why}")
        n = config.actor_rollout_ref.rollout.n
        if n < PAIR_SIZE:
            raise ValueError(
                f"actor_rollout_ref.rollout.n is {n}; allowed with online_dpo: 2 or more responses a prompt"
            )
        if is_distillation_enabled(config.get("distillation")):
            raise ValueError("distillation.enabled is True; allowed with online_dpo: False, it has a loss of its own")

    def connect(self, trainer: PPOTrainer) -> None:
        check_mini_batch(trainer.config, num_actor_ranks(trainer))
        trainer.actor_rollout_wg.set_loss_fn(partial(dpo_loss, self.config))

    def update_actor(self, trainer: PPOTrainer, batch: KVBatchMeta, metrics: dict, plain: PlainUpdate) -> KVBatchMeta:
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        rows = self._read_rows(batch, keys)
        pairs = choose_pairs({key: float(row["rm_scores"].sum()) for key, row in rows.items()})
        if not pairs:
            raise RuntimeError(f"step {trainer.global_steps}: no prompt of the batch has two responses to compare")
        metrics.update(pair_metrics(self.config, pairs, rows, current_version=trainer.global_steps - 1))
        mini_batch_pairs = trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size
        pair_batch, padding = pad_with_pairs(
            batch.select_keys([key for pair in pairs for key in pair.keys]),
            mini_batch_pairs,
            trainer.tokenizer.eos_token_id,
        )
        is_trained = [not pair.tie for pair in pairs] + [False] * (len(padding) // PAIR_SIZE)
        counts = lay_out(pair_batch, is_trained, num_actor_ranks(trainer), mini_batch_pairs)
        pair_batch.extra_info.update(update_settings(trainer.config))
        output = trainer.actor_rollout_wg.update_actor(pair_batch)
        if padding:
            tq.kv_clear(keys=padding, partition_id=batch.partition_id)
        metrics.update(update_metrics(output["metrics"], counts))
        return batch

    def _read_rows(self, batch: KVBatchMeta, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        fields = ["rm_scores", "response_mask", "old_log_probs", "ref_log_prob", "extra_fields"]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        columns = {name: list(data[name]) for name in fields}
        return {key: {name: columns[name][index] for name in fields} for index, key in enumerate(keys)}


def num_actor_ranks(trainer: PPOTrainer) -> int:
    """Data-parallel ranks of the actor, as verl's `_balance_batch` counts them."""
    group = trainer.actor_rollout_wg
    if "actor" not in group._dispatch_info:
        group._dispatch_info["actor"] = group._query_dispatch_info("actor")
    return max(group._dispatch_info["actor"]) + 1


def micro_batch_pairs(config: DictConfig) -> int:
    """Pairs a micro batch of fixed size: the user counts rows, verl's `force_group_size` groups."""
    return max(1, config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu // PAIR_SIZE)


def check_mini_batch(config: DictConfig, num_ranks: int) -> None:
    """Raises ValueError unless whole pairs fill every rank's minibatch, and its micro batches where they are fixed."""
    actor = config.actor_rollout_ref.actor
    unit = num_ranks if actor.use_dynamic_bsz else num_ranks * micro_batch_pairs(config)
    if actor.ppo_mini_batch_size % unit:
        raise ValueError(
            f"{ACTOR}.ppo_mini_batch_size is {actor.ppo_mini_batch_size}; allowed with online_dpo on {num_ranks} "
            f"data-parallel ranks: multiples of {unit} prompts, one pair each (a micro batch of "
            f"{ACTOR}.ppo_micro_batch_size_per_gpu rows holds half as many pairs)"
        )


def pad_with_pairs(batch: KVBatchMeta, multiple: int, eos_token_id: int) -> tuple[KVBatchMeta, list[str]]:
    """The batch with verl's padding rows up to a multiple of `multiple` pairs, and the keys of those rows."""
    padded = upsample_batch_to_divisible_size(batch, PAIR_SIZE * multiple, eos_token_id)
    padding = padded.keys[len(batch) :]
    if padding:
        # verl copies the fields that it does not know from a real row.
        zero = torch.nested.as_nested_tensor([torch.zeros(1) for _ in padding], layout=torch.jagged)
        fields = TensorDict({"ref_log_prob": zero}, batch_size=len(padding))
        tq.kv_batch_put(keys=padding, partition_id=batch.partition_id, fields=fields)
    return padded, padding


def lay_out(batch: KVBatchMeta, is_trained: Sequence[bool], num_ranks: int, mini_batch_pairs: int) -> list[int]:
    """Reorder the pairs of adjacent rows, balanced over the ranks, and write the weight of each in the loss.

    Args:
        is_trained: for each pair of the batch, whether it has a preference.

    Returns:
        Trained pairs of each minibatch.
    """
    lengths = [tag["seq_len"] for tag in batch.tags]
    order = balance_pairs(list(zip(lengths[::PAIR_SIZE], lengths[1::PAIR_SIZE], strict=True)), num_ranks)
    batch.reorder([PAIR_SIZE * index + member for index in order for member in range(PAIR_SIZE)])
    weights, counts = pair_weights([is_trained[index] for index in order], num_ranks, mini_batch_pairs)
    column = torch.tensor(weights, dtype=torch.float32).repeat_interleave(PAIR_SIZE)
    fields = TensorDict({PAIR_WEIGHT: column}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
    if batch.fields is not None:
        batch.fields = [*batch.fields, PAIR_WEIGHT]
    return counts


def update_settings(config: DictConfig) -> dict[str, Any]:
    """What verl's `TrainingWorker.train_mini_batch` and its engine read."""
    actor = config.actor_rollout_ref.actor
    settings = {
        "calculate_entropy": False,
        "force_group_size": PAIR_SIZE,
        "global_batch_size": PAIR_SIZE * actor.ppo_mini_batch_size,
        "mini_batch_size": PAIR_SIZE * actor.ppo_mini_batch_size,
        "epochs": actor.ppo_epochs,
        "seed": actor.data_loader_seed,
        "dataloader_kwargs": {"shuffle": False},
        "temperature": config.actor_rollout_ref.rollout.temperature,
    }
    if not actor.use_dynamic_bsz:
        settings["micro_batch_size_per_gpu"] = micro_batch_pairs(config)
    return settings


def update_metrics(output: Mapping[str, Any], counts: Sequence[int]) -> dict[str, float]:
    """Metrics of the update from what the workers gave, one value a minibatch and epoch; means are over pairs.

    Args:
        counts: trained pairs of each minibatch.
    """
    metrics = {}
    for name, values in output.items():
        if not name.startswith(LOSS_METRICS):
            metrics["perf/mfu/actor" if name == "mfu" else f"actor/{name}"] = float(np.mean(values))
        elif sum(counts):
            metrics[name] = float(np.average(values, weights=np.resize(counts, len(values))))
    return metrics


def pair_metrics(
    config: OnlineDPOConfig, pairs: Sequence[Pair], rows: Mapping[str, Mapping[str, Any]], current_version: int
) -> dict[str, float]:
    """`oppo/dpo/*`: pairs and ties of the step, and margin and accuracy before the update, stale and fresh pairs apart.

    Args:
        rows: by key, `old_log_probs`, `ref_log_prob` and `response_mask` of (response_len,), and `extra_fields`.
        current_version: weight version that sampled this step's newest tokens.
    """

    def reward(key: str) -> float:
        row = rows[key]
        fields = (row[name].float() for name in ("old_log_probs", "ref_log_prob", "response_mask"))
        return config.beta * float(sequence_sums(*fields, config)[1])

    def is_stale(key: str) -> bool:
        extra = rows[key]["extra_fields"]
        versions = expand_versions(getattr(extra, "data", extra).get(TOKEN_VERSIONS_KEY) or [])
        generated = versions[versions >= 0]
        return bool((generated < current_version).any())

    trained = [pair for pair in pairs if not pair.tie]
    metrics = {"oppo/dpo/pairs": len(trained), "oppo/dpo/ties": len(pairs) - len(trained)}
    stale = np.array([any(map(is_stale, pair.keys)) for pair in trained], dtype=bool)
    margins = np.array([reward(pair.chosen) - reward(pair.rejected) for pair in trained])
    for name, chosen in (("fresh", ~stale), ("stale", stale)):
        metrics[f"oppo/dpo/pairs_{name}"] = int(chosen.sum())
        if chosen.any():
            metrics[f"oppo/dpo/margin_{name}_mean"] = float(margins[chosen].mean())
            metrics[f"oppo/dpo/accuracy_{name}_mean"] = float((margins[chosen] > 0).mean())
    return metrics
