"""Reads the metrics of a demo run and says in figures and words what it did: pure functions.

Called by demo/run.py with the lines that verl's file logger writes (verl/utils/tracking.py, FileLogger: one JSON object
``{"step": int, "data": {metric: value}}`` a line). Knows nothing of processes, folders or terminals.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REWARD_WINDOW = 5


@dataclass(frozen=True)
class StepRecord:
    """What the demo shows of one training step; None where the run does not report it (stock modes have no oppo/*)."""

    step: int
    reward: float | None
    seconds: float | None
    delta: float | None = None
    deferred: float | None = None
    first_b_latency_s: float | None = None
    hidden_ratio: float | None = None
    cached_token_ratio: float | None = None
    emulated: bool = False


def split_records(pending: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Parses the complete lines of ``pending`` and returns them with the rest, a line that is still being written.

    Raises:
        ValueError: a complete line is no JSON object.
    """
    *lines, rest = pending.split(b"\n")
    records = []
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"a line of the metrics file is no JSON: {line[:200]!r}") from error
        if not isinstance(record, dict):
            raise ValueError(f"a line of the metrics file is no JSON object: {line[:200]!r}")
        records.append(record)
    return records, rest


def step_record(record: Mapping[str, Any]) -> StepRecord | None:
    """The training step in one line of the metrics file; None for a line without one (validation before training)."""
    data = record["data"]
    reward = _number(data, "critic/score/mean")
    seconds = _number(data, "timing_s/step", "perf/time_per_step")
    if reward is None and seconds is None:
        return None
    return StepRecord(
        step=int(record["step"]),
        reward=reward,
        seconds=seconds,
        delta=_number(data, "oppo/overcommit/delta"),
        deferred=_number(data, "oppo/deferred/num"),
        first_b_latency_s=_number(data, "timing_s/first_b_latency"),
        hidden_ratio=_number(data, "oppo/overlap/hidden_ratio"),
        cached_token_ratio=_number(data, "oppo/overlap/cached_token_ratio"),
        emulated=bool(_number(data, "oppo/emulated")),
    )


def _number(data: Mapping[str, Any], *keys: str) -> float | None:
    for key in keys:
        value = data.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def progress_line(record: StepRecord, total_steps: int | None) -> str:
    """One line for a finished step; a dash stands for a figure that the run does not report."""

    def shown(value: float | None, spec: str) -> str:
        return "-" if value is None else format(value, spec)

    width = len(str(total_steps)) if total_steps else 3
    step = f"{record.step:>{width}}/{total_steps}" if total_steps else f"{record.step:>{width}}"
    return (
        f"step {step}  reward {shown(record.reward, '7.4f'):>7}  delta {shown(record.delta, '.0f'):>2}  "
        f"deferred {shown(record.deferred, '.0f'):>2}  {shown(record.seconds, '.2f'):>6} s"
    )


def reward_change(rewards: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Mean reward of the first and of the last steps, and the standard error of their difference.

    Takes REWARD_WINDOW steps at each end, or half of the steps where there are fewer than two windows, so that no step
    counts on both sides. The error is that of two independent means of k steps, sqrt((var_first + var_last) / k) with
    sample variances. A rise inside a window widens it, so it errs on the careful side. None where it cannot be told: no
    steps, or for the error fewer than two steps a side.
    """
    if not rewards:
        return None, None, None
    k = max(1, min(REWARD_WINDOW, len(rewards) // 2))
    first, last = rewards[:k], rewards[-k:]
    error = None if k < 2 else math.sqrt((statistics.variance(first) + statistics.variance(last)) / k)
    return statistics.fmean(first), statistics.fmean(last), error


def summarize(records: Sequence[StepRecord], metrics_file: str | None, plot: str | None) -> dict[str, Any]:
    """The figures of the demo's last line; a key that does not apply to the run is None.

    ``deferred`` counts deferrals over the run: a prompt that was carried twice counts twice. Medians are in seconds.
    """
    first, last, error = reward_change(_present(record.reward for record in records))
    deferred = _present(record.deferred for record in records)
    return {
        "first_reward": _rounded(first),
        "last_reward": _rounded(last),
        "reward_se": _rounded(error),
        "steps": len(records),
        "deferred": int(sum(deferred)) if deferred else None,
        "step_s_median": _rounded(_median(record.seconds for record in records)),
        "first_b_latency_s_median": _rounded(_median(record.first_b_latency_s for record in records)),
        "hidden_ratio_median": _rounded(_median(record.hidden_ratio for record in records)),
        "cached_token_ratio_median": _rounded(_median(record.cached_token_ratio for record in records)),
        "emulated": is_emulated(records),
        "metrics_file": metrics_file,
        "plot": plot,
    }


def is_emulated(records: Sequence[StepRecord]) -> bool:
    """Whether the step times are those of emulated accelerators."""
    return any(record.emulated for record in records)


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    present = _present(values)
    return statistics.median(present) if present else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def summary_words(summary: Mapping[str, Any], elapsed_s: float) -> list[str]:
    """The summary in sentences, one a line."""
    steps = summary["steps"]
    if not steps:
        return ["No training step was recorded (validation only, or trainer.logger without 'file')."]
    minutes, seconds = divmod(round(elapsed_s), 60)
    lines = [f"Trained {steps} step{'s' if steps > 1 else ''} in {minutes} min {seconds:02d} s, start-up included."]
    if summary["first_reward"] is not None:
        lines.append(_reward_words(summary))
    if summary["deferred"] is not None:
        lines.append(f"OPPO deferred {summary['deferred']} unfinished prompts to a later step, their tokens kept.")
    else:
        lines.append("This trainer mode does not defer prompts, so it reports no OPPO figures.")
    if summary["step_s_median"] is not None:
        clock = ", on EMULATED accelerators (emulate=on)" if summary["emulated"] else ""
        lines.append(f"A step took {summary['step_s_median']:.2f} s (median){clock}.")
    if summary["cached_token_ratio_median"] is not None:
        cached, hidden = summary["cached_token_ratio_median"], summary["hidden_ratio_median"]
        hid = f", which hid {100 * hidden:.0f} % of the scoring time" if hidden is not None else ""
        lines.append(f"The scorers had {100 * cached:.0f} % of a response prefilled when it ended{hid} (median).")
    if summary["first_b_latency_s_median"] is not None:
        lines.append(
            f"The trainer went on {1000 * summary['first_b_latency_s_median']:.0f} ms after the last prompt of a batch "
            "was ready (median); stock verl looks every 2 s."
        )
    return lines


def _reward_words(summary: Mapping[str, Any]) -> str:
    first, last, error = summary["first_reward"], summary["last_reward"], summary["reward_se"]
    window = min(REWARD_WINDOW, summary["steps"] // 2)
    if window < 1:
        return f"The mean reward was {first:.4f}; one step shows no trend."
    change = f"from {first:.4f} (mean of the first {window}) to {last:.4f} (last {window})"
    if error is None:
        return f"The mean reward went {change}: too few steps to tell a trend from noise."
    if abs(last - first) <= 2 * error:
        return f"The mean reward went {change}: no change beyond noise (standard error {error:.4f})."
    verb = "rose" if last > first else "fell"
    return f"The mean reward {verb} {change}, by {last - first:+.4f} with a standard error of {error:.4f}."
