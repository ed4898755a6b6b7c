"""The rows that a step trains, read from TransferQueue while the models are updated on them.

`PPOTrainerOppo` owns one `TrainedRowsReader`. It does not know which metrics are made of the rows.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
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


class TrainedRowsReader:
    """Reads in a thread of its own, since neither the rows nor the trainer's thread is needed while workers update.

    Invariant: every `start` is answered by one `result`.
    """

    def __init__(self, keeps_log_probs: bool) -> None:
        """`keeps_log_probs`: verl's `rollout.calculate_log_probs`."""
        self._keeps_log_probs = keeps_log_probs
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="oppo-trained-rows")
        self._reading: Future[TrainedRows] | None = None

    def start(self, batch: KVBatchMeta, version: int) -> None:
        """To be called when advantages are written: nothing that is read changes after that.

        Args:
            version: weight version of tokens that came without a record, as verl replays them (`skip.rollout_tq`).
        """
        assert self._reading is None, "the rows of the step before were never asked for"
        self._reading = self._thread.submit(read_trained_rows, batch, self._keeps_log_probs, version)

    def result(self) -> TrainedRows:
        """Raises what went wrong with the reading."""
        assert self._reading is not None, "no reading has been started in this step"
        reading, self._reading = self._reading, None
        return reading.result()


def read_trained_rows(batch: KVBatchMeta, keeps_log_probs: bool, version: int) -> TrainedRows:
    """See `TrainedRowsReader`."""
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
