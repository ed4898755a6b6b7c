"""The report's pictures but the timeline, by matplotlib: each function draws what the runs have, or returns None.

Called by the page. Knows no files and no HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from verl_oppo.benchmark.trace import PARTS  # noqa: E402
from verl_oppo.report.content import WARMUP_STEPS, by_arm, median, seconds_per_token, settled, trace  # noqa: E402
from verl_oppo.report.metrics_file import RunFiles  # noqa: E402

PART_COLOURS = dict(
    zip(
        PARTS,
        ("#4c78a8", "#d3d3d3", "#e45756", "#ff9d98", "#b279a2", "#54a24b", "#eeca3b", "#8c8c8c"),
        strict=True,
    )
)


def breakdown(runs: Sequence[RunFiles]) -> Figure | None:
    """Stacked bars: median seconds of each part of a step, a bar a run."""
    shown = [run for run in runs if run.series("timing_s/gen")[0]]
    if not shown:
        return None
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.5 * len(shown)), layout="constrained")
    left = [0.0] * len(shown)
    for name in PARTS:
        widths = [max(0.0, median(step.parts[name] for step in settled(trace(run))) or 0.0) for run in shown]
        axes.barh(
            [run.label for run in shown], widths, left=left, color=PART_COLOURS[name], label=name.replace("_", " ")
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step (median of each part)")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8, frameon=False)
    return figure


def reward(runs: Sequence[RunFiles]) -> Figure | None:
    """Mean reward against step and against the seconds that the steps took."""
    shown = [run for run in runs if run.series("critic/score/mean")[0]]
    if not shown:
        return None
    figure, (by_step, by_clock) = plt.subplots(1, 2, sharey=True, figsize=(11, 4), layout="constrained")
    colours = _colours(runs)
    for run in shown:
        steps, values = run.series("critic/score/mean")
        by_step.plot(steps, values, marker=".", color=colours[run.arm])
        elapsed = dict(zip([step.step for step in trace(run)], _running(run), strict=True))
        by_clock.plot([elapsed[step] for step in steps], values, marker=".", color=colours[run.arm])
    by_step.set(xlabel="step", ylabel="mean reward")
    by_clock.set_xlabel("seconds of training steps since the first")
    _name_arms(figure, shown, colours)
    return figure


def _colours(runs: Sequence[RunFiles]) -> dict[str, str]:
    """A colour an arm, the same in every picture of a page."""
    return {arm: f"C{index % 10}" for index, arm in enumerate(by_arm(runs))}


def _name_arms(figure: Figure, shown: Sequence[RunFiles], colours: Mapping[str, str], *more: Line2D) -> None:
    """A legend beside the axes, where it covers nothing however many there are."""
    handles = [Line2D([], [], color=colours[arm], label=repeats[0].arm_label) for arm, repeats in by_arm(shown).items()]
    handles += more
    figure.legend(handles=handles, fontsize=8, ncols=min(4, len(handles)), loc="outside lower center", frameon=False)


def _running(run: RunFiles) -> list[float]:
    return list(accumulate(step.seconds for step in trace(run)))


def overcommit(runs: Sequence[RunFiles]) -> Figure | None:
    """Δ and the slope of the reward that moves it."""
    return _panels(
        runs,
        [
            ("Δ (prompts)", lambda run: run.series("oppo/overcommit/delta")),
            ("slope of the reward\n(a step)", lambda run: run.series("oppo/overcommit/slope")),
        ],
    )


def chunks(runs: Sequence[RunFiles]) -> Figure | None:
    """Chunk size, what the tuner sees of it (time a token), and how much was cached in time."""
    return _panels(
        runs,
        [
            ("chunk size (tokens)", lambda run: run.series("oppo/chunk/size")),
            ("generation + exposed\nscoring (s a token)", _settled_seconds_per_token),
            ("response tokens found\ncached (share)", lambda run: run.series("oppo/overlap/cached_token_ratio")),
        ],
    )


def _settled_seconds_per_token(run: RunFiles) -> tuple[list[int], list[float]]:
    """Of a run with chunks, without the first steps, beside whose start-up the others could not be told apart."""
    if not run.series("oppo/chunk/size")[0]:
        return [], []
    steps, values = seconds_per_token(run)
    return (steps[WARMUP_STEPS:], values[WARMUP_STEPS:]) if len(steps) > WARMUP_STEPS else (steps, values)


def ages(runs: Sequence[RunFiles]) -> Figure | None:
    """Deferred prompts and how often they have been deferred."""
    return _panels(
        runs,
        [
            ("deferred prompts", lambda run: run.series("oppo/deferred/num")),
            ("mean age (steps)", lambda run: run.series("oppo/deferred/age_mean")),
            ("largest age (steps)", lambda run: run.series("oppo/deferred/age_max")),
        ],
    )


def staleness(runs: Sequence[RunFiles]) -> Figure | None:
    """Share of trained tokens from older weights, and verl's own measure of their age."""
    return _panels(
        runs,
        [
            ("stale tokens (share)", lambda run: run.series("oppo/staleness/stale_token_ratio")),
            (
                "probability error of\nstale tokens (mean)",
                lambda run: run.series("oppo/staleness/rollout_probs_diff_stale_mean"),
            ),
        ],
    )


def lengths(runs: Sequence[RunFiles]) -> Figure | None:
    """Mean and longest response by step; beside it the distribution of single responses where a run noted them."""
    shown = [run for run in runs if run.series("response_length/mean")[0]]
    if not shown:
        return None
    figure, (by_step, single) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    colours = _colours(runs)
    for run in shown:
        by_step.plot(*run.series("response_length/mean"), color=colours[run.arm])
        by_step.plot(*run.series("response_length/max"), ":", color=colours[run.arm])
    for arm, repeats in by_arm(shown).items():
        noted = [record["length"] for run in repeats for record in run.trajectories or run.rollouts]
        if noted:
            single.hist(noted, bins=30, histtype="step", color=colours[arm])
    by_step.set(xlabel="step", ylabel="response length (tokens)")
    single.set(xlabel="response length (tokens)", ylabel="responses")
    if not single.has_data():
        _say(single, "no run noted single responses\n(trajectories.jsonl or rollouts.jsonl)")
    kinds = [
        Line2D([], [], color="gray", linestyle=style, label=kind) for style, kind in (("-", "mean"), (":", "longest"))
    ]
    _name_arms(figure, shown, colours, *kinds)
    return figure


Series = Callable[[RunFiles], tuple[list[int], list[float]]]


def _panels(runs: Sequence[RunFiles], panels: Sequence[tuple[str, Series]]) -> Figure | None:
    """One panel a quantity over the steps; None if no run has any of them."""
    drawn = {label: [(run, *series(run)) for run in runs] for label, series in panels}
    drawn = {label: [entry for entry in found if entry[1]] for label, found in drawn.items()}
    if not any(drawn.values()):
        return None
    figure, grid = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.4), layout="constrained", squeeze=False)
    colours = _colours(runs)
    for axes, (label, found) in zip(grid[0], drawn.items(), strict=True):
        for run, steps, values in found:
            axes.plot(steps, values, marker=".", color=colours[run.arm])
        axes.set(xlabel="step", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if found:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        else:
            _say(axes, "no run has it")
    names = {run.name for found in drawn.values() for run, *_ in found}
    _name_arms(figure, [run for run in runs if run.name in names], colours)
    return figure


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="gray")
