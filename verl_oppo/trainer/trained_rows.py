"""The rows that a step trained, read from TransferQueue.

Called by `PPOTrainerOppo` once a step. It does not know which metrics are made of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_oppo.metrics import TrainedRow
from verl_oppo.rollout.agent_loop import TOKEN_VERSIONS_KEY


@dataclass(frozen=True)
class TrainedRows:
    """A batch without its padding rows; keys, tags and rows in the same order.

    Attributes:
        rewards: mean unpenalised score of each prompt.
    """

    keys: list[str]
    tags: list[dict[str, Any]]
    rows: list[TrainedRow]
    rewards: list[float]


def read_trained_rows(batch: KVBatchMeta, keeps_log_probs: bool, version: int) -> TrainedRows:
    """The rows of a batch whose advantages are written.

    Args:
        keeps_log_probs: verl's `rollout.calculate_log_probs`.
        version: weight version of tokens that came without a record, as verl replays them (`skip.rollout_tq`).
    """
    real = [pair for pair in zip(batch.keys, batch.tags, strict=True) if not pair[1].get("is_padding", False)]
    keys = [key for key, _ in real]
    fields = ["rm_scores", "response_mask", "extra_fields", "old_log_probs"]
    if keeps_log_probs:
        fields.append("rollout_log_probs")
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
    rows: list[TrainedRow] = []
    rewards: dict[str, list[float]] = {}
    for index, (key, extra) in enumerate(zip(keys, list(data["extra_fields"]), strict=True)):
        extra = getattr(extra, "data", extra)  # Plain or wrapped, depending on the backend of TransferQueue.
        probs_diff = is_ratio = None
        if keeps_log_probs:
            old, sampled = data["old_log_probs"][index], data["rollout_log_probs"][index]
            is_ratio = (old - sampled).exp().numpy()
            probs_diff = (old.exp() - sampled.exp()).abs().numpy()
        mask = data["response_mask"][index].bool().numpy()
        versions = extra.get(TOKEN_VERSIONS_KEY) or [[version, len(mask)]]
        rows.append(TrainedRow(versions=versions, mask=mask, probs_diff=probs_diff, is_ratio=is_ratio))
        rewards.setdefault(key.split("_")[0], []).append(float(data["rm_scores"][index].sum()))
    means = [float(np.mean(scores)) for scores in rewards.values()]
    return TrainedRows(keys=keys, tags=[tag for _, tag in real], rows=rows, rewards=means)
