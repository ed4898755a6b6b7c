"""What a report shows of a run: which metrics each picture needs, the step it draws, sentences and table rows.

Called by the page; pure functions on what `metrics_file` read. Knows no pictures and no HTML.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from verl_oppo.benchmark.trace import PARTS, Step, num_responses, number, steps_of
from verl_oppo.report.metrics_file import RunFiles

NEEDS = {
    "timeline": ("timing_s/gen", "timing_s/step"),
    "breakdown": ("timing_s/gen", "timing_s/step", "timing_s/update_actor", "timing_s/update_weights"),
    "reward": ("critic/score/mean",),
    "overcommit": ("oppo/overcommit/delta", "oppo/overcommit/slope"),
    "chunks": ("oppo/chunk/size", "oppo/chunk/num", "oppo/overlap/cached_token_ratio"),
    "ages": ("oppo/deferred/num", "oppo/deferred/age_mean", "oppo/deferred/age_max"),
    "lengths": ("response_length/mean", "response_length/max", "response_length/min"),
    "staleness": ("oppo/staleness/stale_token_ratio",),
}
"""Metrics by picture; a run that has none of a picture's is left out of it."""
PHASES = (
    ("gen", "wait for generation"),
    ("reward", "reward"),
    ("old_log_prob", "log-probs"),
    ("ref", "reference"),
    ("values", "values"),
    ("adv", "advantages"),
    ("update_critic", "train critic"),
    ("update_actor", "train actor"),
    ("save_checkpoint", "checkpoint"),
    ("update_weights", "weight sync"),
)
"""verl's timers of a step in their order (verl/trainer/ppo/v1/trainer_base.py, `_step_once` and `fit`)."""
WARMUP_STEPS = 2


def missing_metrics(run: RunFiles) -> dict[str, list[str]]:
    """By picture, the metrics that no step of the run has."""
    present = {key for _, data in run.steps for key in data}
    return {
        picture: lacking for picture, keys in NEEDS.items() if (lacking := [key for key in keys if key not in present])
    }


def carries_prompts(run: RunFiles) -> bool:
    """Whether some step trained or kept a response that was begun before it."""
    return any(
        number(data, "oppo/overcommit/delta") > 0 or number(data, "training/off_policy/trajectory_spans/max") > 1
        for _, data in run.steps
    )


def trace(run: RunFiles) -> list[Step]:
    return steps_of(run.steps, waits_for_all=not carries_prompts(run))


def settled(steps: Sequence[Step]) -> list[Step]:
    """Without the first steps, which warm up, as long as others are left."""
    return list(steps[WARMUP_STEPS:] or steps)


def typical_step(run: RunFiles) -> int | None:
    """The settled step of median length, one with time spans if any has some; None without steps."""
    steps = settled([step for step in trace(run) if not step.is_verify] or trace(run))
    steps = [step for step in steps if step.step in run.spans] or steps
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2].step if steps else None


def phases(run: RunFiles, step: int) -> list[tuple[str, float, float]]:
    """(name, begin, end) of a step's phases in seconds from the begin of generation, laid end to end."""
    data, at, laid = dict(run.steps)[step], 0.0, []
    for key, name in PHASES:
        seconds = number(data, f"timing_s/{key}")
        if seconds > 0:
            laid.append((name, at, at + seconds))
            at += seconds
    return laid


def seconds_per_token(run: RunFiles) -> tuple[list[int], list[float]]:
    """What the chunk-size tuner minimises: (generation + scoring exposed after it) / response tokens, by step."""
    steps, values = [], []
    for step, data in run.steps:
        tokens = number(data, "response_length/mean") * num_responses(data)
        if tokens and "timing_s/gen" in data:
            later = sum(number(data, f"oppo/overlap/{name}_exposed_s") for name in ("critic", "reference"))
            steps.append(step)
            values.append((number(data, "timing_s/gen") + later) / tokens)
    return steps, values


def median(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def words(runs: Sequence[RunFiles]) -> list[str]:
    """The report in sentences, a paragraph a run and one for the comparison."""
    paragraphs = [_run_words(run) for run in runs]
    if len(comparable := [run for run in runs if run.steps]) > 1:
        paragraphs.append(_comparison_words(comparable))
    return paragraphs


def _run_words(run: RunFiles) -> str:
    if not run.steps:
        return f"{run.name}: no training step was recorded yet."
    steps = settled(trace(run))
    step_s = median(step.seconds for step in steps)
    clock = " of EMULATED accelerators" if run.is_emulated else ""
    text = [f"{run.name}: {len(run.steps)} steps; a step takes {step_s:.2f} s{clock} (median without warm-up)."]
    shares = {name: median(step.parts[name] / step.seconds for step in steps if step.seconds > 0) for name in PARTS}
    known = {name: share for name, share in shares.items() if share is not None and name != "other"}
    largest = sorted(known, key=lambda name: known[name], reverse=True)[:3]
    listed = ", ".join(f"{name.replace('_', ' ')} {100 * known[name]:.0f} %" for name in largest)
    text.append(f"Most of it is {listed}.")
    rewards = run.series("critic/score/mean")[1]
    if len(rewards) > 1:
        k = min(5, len(rewards) // 2)
        first, last = statistics.fmean(rewards[:k]), statistics.fmean(rewards[-k:])
        text.append(f"The mean reward went from {first:.3f} (first {k}) to {last:.3f} (last {k}).")
    deltas = run.series("oppo/overcommit/delta")[1]
    if deltas:
        stale = median(run.series("oppo/staleness/stale_token_ratio")[1])
        share = "" if stale is None else f"; {100 * stale:.0f} % of the trained tokens were from older weights"
        text.append(f"Δ was {min(deltas):.0f} to {max(deltas):.0f} prompts{share}.")
    cached = median(run.series("oppo/overlap/cached_token_ratio")[1])
    if cached is not None:
        hidden = median(run.series("oppo/overlap/hidden_ratio")[1])
        hid = "" if hidden is None else f" and {100 * hidden:.0f} % of the scoring time was hidden"
        text.append(f"When a response ended its scorers had {100 * cached:.0f} % of it prefilled{hid}.")
    return " ".join(text)


def _comparison_words(runs: Sequence[RunFiles]) -> str:
    arms = by_arm(runs)
    seconds = {
        arm: median(step.seconds for run in repeats for step in settled(trace(run))) or 0.0
        for arm, repeats in arms.items()
    }
    text = []
    if len(arms) > 1:
        fastest = min(seconds, key=lambda arm: seconds[arm])
        others = [f"{seconds[fastest] / s:.2f} of {arm}'s" for arm, s in seconds.items() if arm != fastest and s > 0]
        text.append(f"{fastest} has the shortest step (median without warm-up): {', '.join(others)}.")
    if len(arms) < len(runs):
        repeats = ", ".join(f"{len(repeats)} of {arm}" for arm, repeats in arms.items())
        text.append(f"Repeats ({repeats}) are taken together here and share a colour below.")
    if len({run.is_emulated for run in runs}) > 1:
        text.append("Some of these runs are EMULATED and some are not: do not compare their times.")
    return " ".join(text)


def by_arm(runs: Sequence[RunFiles]) -> dict[str, list[RunFiles]]:
    """The runs of each arm, in order of appearance."""
    arms: dict[str, list[RunFiles]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def table_rows(runs: Sequence[RunFiles]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: medians over the settled steps, seconds where no unit is said."""
    header = ["run", "steps", "step", *(name.replace("_", " ") for name in PARTS), "tokens/s", "reward", "Δ", "clock"]
    rows = []
    for run in runs:
        steps = settled(trace(run))
        cells = [run.name, str(len(run.steps)), _shown(median(step.seconds for step in steps))]
        cells += [_shown(median(step.parts[name] for step in steps)) for name in PARTS]
        cells.append(_shown(median(step.tokens / step.seconds for step in steps if step.seconds > 0), ".0f"))
        cells.append(_shown(median(step.reward for step in steps), ".3f"))
        cells.append(_shown(median(run.series("oppo/overcommit/delta")[1]), ".0f"))
        rows.append([*cells, ("EMULATED" if run.is_emulated else "real") if run.steps else "-"])
    return header, rows


def _shown(value: float | None, spec: str = ".2f") -> str:
    return "-" if value is None else format(value, spec)
