"""Pure functions from what a step saw to `oppo/*` metrics.

Called by the trainer once a step; the dict goes into verl's own step dict, so every tracker of verl shows it. They know
arrays and counts, not TransferQueue or Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_oppo.rollout.partial import TOOL_TOKEN_VERSION, Runs
from verl_oppo.stream.consumer import ConsumerStats


@dataclass(frozen=True)
class TrainedRow:
    """One trained trajectory, padding rows left out.

    Attributes:
        versions: run-length coded weight version of each response token.
        mask: (response_len,) bool, True where the token counts in the loss.
        probs_diff: (response_len,) absolute difference of the rollout's and the actor's token probability, or None
            where the run does not keep the rollout's log-probs.
        is_ratio: (response_len,) the actor's probability of each token over the rollout's; None as above.
    """

    versions: Runs
    mask: np.ndarray
    probs_diff: np.ndarray | None = None
    is_ratio: np.ndarray | None = None


def expand_versions(runs: Runs) -> np.ndarray:
    """(response_len,) int weight version of each response token."""
    if not runs:
        return np.zeros(0, dtype=np.int64)
    versions, counts = zip(*runs, strict=True)
    return np.repeat(np.asarray(versions, dtype=np.int64), np.asarray(counts, dtype=np.int64))


def staleness_metrics(rows: Sequence[TrainedRow], current_version: int) -> dict[str, float]:
    """Share of stale tokens among the generated ones, and the rollout's probability error for both kinds apart.

    Args:
        current_version: weight version that sampled this step's newest tokens (verl: `global_steps - 1`).
    """
    stale, diffs = [], []
    for row in rows:
        versions = expand_versions(row.versions)
        assert len(versions) == len(row.mask), f"{len(versions)} token versions for {len(row.mask)} response tokens"
        generated = versions != TOOL_TOKEN_VERSION
        stale.append(versions[generated] < current_version)
        if row.probs_diff is not None:
            diffs.append(np.where(row.mask, row.probs_diff, np.nan)[generated])
    stale_tokens = np.concatenate(stale) if stale else np.zeros(0, dtype=bool)
    metrics = {"oppo/staleness/stale_token_ratio": float(stale_tokens.mean()) if stale_tokens.size else 0.0}
    if diffs:
        probs_diff = np.concatenate(diffs)
        for name, chosen in (("fresh", ~stale_tokens), ("stale", stale_tokens)):
            values = probs_diff[chosen]
            values = values[~np.isnan(values)]
            if values.size:
                metrics[f"oppo/staleness/rollout_probs_diff_{name}_mean"] = float(values.mean())
                metrics[f"oppo/staleness/rollout_probs_diff_{name}_max"] = float(values.max())
    return metrics


def ledger_metrics(ledger: dict[str, int]) -> dict[str, int]:
    """`oppo/ledger/*`: prompts since the start of training."""
    return {f"oppo/ledger/{name}": ledger[name] for name in ("submitted", "trained", "evicted", "outstanding")}


@dataclass(frozen=True)
class ExposedCall:
    """One scorer's final call on a step's batch: what the step waited for, and what was cached.

    Attributes:
        seconds: waited for by the step.
        plain_s: the plain path's time for a whole batch as last measured in this run, or None.
    """

    seconds: float
    response_tokens: int
    cached_response_tokens: int
    plain_s: float | None


def overlap_metrics(calls: dict[str, ExposedCall]) -> dict[str, float]:
    """`timing_s/score_tail` and `oppo/overlap/*` over the scorers that take chunks, keyed by scorer.

    `hidden_ratio` = 1 - exposed / plain time, over the scorers whose plain time was measured (design: "What two of our
    figures mean"); it is left out as long as none was.
    """
    metrics = {"timing_s/score_tail": sum(call.seconds for call in calls.values())}
    tokens = sum(call.response_tokens for call in calls.values())
    if tokens:
        metrics["oppo/overlap/cached_token_ratio"] = sum(c.cached_response_tokens for c in calls.values()) / tokens
    measured = {name: call for name, call in calls.items() if call.plain_s}
    if measured:
        exposed, plain = sum(c.seconds for c in measured.values()), sum(c.plain_s for c in measured.values())
        metrics["oppo/overlap/hidden_ratio"] = 1.0 - exposed / plain
    for name, call in calls.items():
        metrics[f"oppo/overlap/{name}_exposed_s"] = call.seconds
        if call.plain_s:
            metrics[f"oppo/overlap/{name}_plain_s"] = call.plain_s
        if call.response_tokens:
            metrics[f"oppo/overlap/{name}_cached_token_ratio"] = call.cached_response_tokens / call.response_tokens
    return metrics


def chunk_metrics(stats: dict[str, ConsumerStats], chunk_size: int) -> dict[str, float]:
    """`oppo/chunk/*` of a step, and how long each scorer worked."""
    metrics = {
        "oppo/chunk/size": chunk_size,
        "oppo/chunk/num": sum(one.hub.chunks_received for one in stats.values()),
        "oppo/chunk/dropped": sum(one.hub.chunks_dropped for one in stats.values()),
    }
    for name, one in stats.items():
        metrics[f"oppo/scorer/{name}_prefill_s"] = one.prefill.busy_s
        metrics[f"oppo/scorer/{name}_score_s"] = one.score.busy_s
    return metrics
