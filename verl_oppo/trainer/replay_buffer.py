"""First-B sampling: verl's async replay buffer, woken by completions instead of a two-second poll.

Called by `PPOTrainerOppo`. verl's own predicate (failed, filtered, stale) decides what is sampleable; the rollout
controller decides whether the first B may be taken and which ones. It does not know how a prompt is generated.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from verl_oppo.rollout.controller import RPC_TIMEOUT_S, RolloutControllerGroup

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
"""Safety net under the completion signal; verl polls every 2 s."""

LISTING_SHARE = 0.05
"""Listing TransferQueue's keys may take this share of the waiting time; a slower listing widens the poll interval."""

MAX_FAILED_IN_A_ROW = 64
"""Groups that may fail without one success in between before the run ends with the last error."""

EvictionReasons = tuple[set[str], set[str], set[str], Counter]


class OppoReplayBuffer(ReplayBufferAsync):
    """Samples the first B groups that complete, carried ones first.

    Invariant: every group that leaves the training partition is told to the controller, as selected or as evicted with
    a reason, before a replacement is asked for.

    Args:
        controller: the rollout controller's worker group.
        check_health: called about every `POLL_INTERVAL_S` while waiting; raises when a wait can no longer end.
        on_evicted: told the uids of evicted groups, whose cached prefixes are of no use any more.
        **kwargs: as `verl.trainer.ppo.v1.replay_buffer.ReplayBuffer`.
    """

    def __init__(
        self,
        *,
        controller: RolloutControllerGroup,
        check_health: Callable[[], None],
        on_evicted: Callable[[list[str]], None] = lambda uids: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(poll_interval=POLL_INTERVAL_S, **kwargs)
        self._controller = controller
        self._check_health = check_health
        self._on_evicted = on_evicted
        self._num_completions_seen = -1
        self._num_failed_in_a_row = 0
        self._finished_before: set[str] = set()
        self._global_steps = 0
        self._listing_s = 0.0
        self.waiting_since = time.monotonic()
        self.filtered_rewards: list[float] = []

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """As verl's; afterwards `filtered_rewards` holds the mean rewards of the groups that DAPO filtered."""
        self._global_steps = global_steps
        if partition_id != "val":
            self.waiting_since = time.monotonic()
            self.filtered_rewards = []
            self._num_failed_in_a_row = 0
        return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)

    def _sync_metadata_from_transfer_queue(self) -> None:
        started = time.monotonic()
        super()._sync_metadata_from_transfer_queue()
        self._listing_s = time.monotonic() - started

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        enough = super()._has_enough_samples(global_steps, partition_id, batch_size, sampleable_keys)
        if partition_id == "val" or not enough:
            return enough
        return self._controller.call("ready", sorted(sampleable_keys))

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict], dict[str, int]]:
        selection = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        if partition_id == "val":
            return selection
        uids = self._controller.call("select", sorted(sampleable_keys), step=self._global_steps)
        assert len(uids) == batch_size, f"controller selected {len(uids)} groups for a batch of {batch_size}"
        return uids, *selection[1:]

    def _evict_terminal_groups(
        self, global_steps: int, partition_id: str, eviction_reasons: EvictionReasons
    ) -> tuple[set[str], int, int, dict]:
        stale, filtered, failed, _ = eviction_reasons
        finished = set(self.finished_keys[partition_id])
        self.filtered_rewards.extend(self._mean_rewards(partition_id, filtered))
        evicted = super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)
        remaining = set(evicted[0])
        for reason, uids in (("failed", failed), ("stale", stale), ("filtered", filtered)):
            if uids & remaining:
                self._controller.call("evict", sorted(uids & remaining), reason=reason)
                remaining -= uids
        self._on_evicted(sorted(evicted[0]))
        if partition_id != "val":
            self._stop_on_endless_failure(finished, num_failed=len(failed))
        return evicted

    def _mean_rewards(self, partition_id: str, uids: set[str]) -> list[float]:
        """Mean unpenalised score of each group, read before its rows are cleared."""
        keys = [key for key in self.partitions[partition_id] if key.split("_")[0] in uids]
        if not keys:
            return []
        rewards: dict[str, list[float]] = {}
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["rm_scores"])
        for key, scores in zip(keys, data["rm_scores"], strict=True):
            rewards.setdefault(key.split("_")[0], []).append(float(scores.sum()))
        return [float(np.mean(values)) for values in rewards.values()]

    def _stop_on_endless_failure(self, finished: set[str], num_failed: int) -> None:
        """A group that finished breaks the row, filtered and stale ones included."""
        if not finished <= self._finished_before:
            self._num_failed_in_a_row = 0
        self._finished_before = finished
        self._num_failed_in_a_row += num_failed
        if self._num_failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            last_error = self._controller.call("state").last_error
            raise RuntimeError(
                f"{self._num_failed_in_a_row} prompt groups failed in a row while sampling step {self._global_steps}; "
                f"last error: {last_error}"
            )

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        interval = max(POLL_INTERVAL_S, self._listing_s / LISTING_SHARE)
        if partition_id == "val":
            self.poll_interval = interval
        else:
            self._num_completions_seen = self._controller.call(
                "wait_for_batch", self._num_completions_seen, interval, timeout_s=interval + RPC_TIMEOUT_S
            )
            self.poll_interval = 0.0  # The wait is over; verl's method only keeps its log line.
        self._check_health()
        return super()._wait_for_next_poll(partition_id, last_debug_time)
