"""The picture of one step: what decoded, what the scorers did meanwhile, what the trainer waited for and did.

Called by the page, a picture a run. Draws responses one by one where the benchmark's agent loop noted them, scorer
calls where the trainer noted them, and the trainer's phases from verl's timers, laid end to end.
"""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from verl_oppo.report.content import phases, typical_step  # noqa: E402
from verl_oppo.report.metrics_file import RunFiles, is_number  # noqa: E402

PHASE_COLOURS = {
    "wait for generation": "#4c78a8",
    "reward": "#e45756",
    "log-probs": "#9ecae9",
    "reference": "#b279a2",
    "values": "#ff9d98",
    "advantages": "#bab0ac",
    "train critic": "#88d27a",
    "train actor": "#54a24b",
    "checkpoint": "#9d755d",
    "weight sync": "#eeca3b",
}
SCORER_COLOURS = {"prefill": "#f2a900", "score": "#c02020"}
FINISHED, CARRIED = "#4c78a8", "#9ecae9"


def timeline(run: RunFiles) -> Figure | None:
    """The typical step of a run; None without a step that says how long its generation took."""
    step = typical_step(run)
    laid = phases(run, step) if step is not None else []
    if not laid:
        return None
    end = laid[-1][2]
    spans = run.spans.get(step)
    responses = _responses(run, spans, end)
    scorers = sorted(spans["scorers"]) if spans else []
    heights = [max(1.0, min(6.0, 0.13 * len(responses)))] * bool(responses) + [0.6] * len(scorers) + [0.9]
    figure, grid = plt.subplots(
        len(heights),
        1,
        sharex=True,
        squeeze=False,
        figsize=(11, 2.0 + sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )
    rows = list(grid[:, 0])
    if responses:
        _draw_responses(rows.pop(0), responses)
    for name in scorers:
        _draw_scorer(rows.pop(0), name, spans["scorers"][name], spans["sample"][0], end)
    _draw_phases(rows.pop(0), laid)
    handles = [Patch(color=PHASE_COLOURS[name], label=name) for name, *_ in laid]
    figure.legend(handles=handles, fontsize=8, ncols=min(5, len(handles)), loc="outside lower center", frameon=False)
    clock = " (EMULATED accelerators)" if run.is_emulated else ""
    figure.suptitle(f"{run.name}: step {step}, {end:.1f} s{clock}", fontsize=11)
    return figure


def _responses(run: RunFiles, spans: dict | None, end: float) -> list[tuple[float, float, bool]]:
    """(begin, end, whether it ended in this step's generation), seconds from the begin of generation, by begin."""
    if not spans:
        return []
    begin, sampled = spans["sample"]
    inside = [r for r in run.rollouts if r["ended"] > begin and r["started"] < sampled and is_number(r["started"])]
    drawn = []
    for response in inside:
        finished = response["ended"] <= sampled
        drawn.append((max(0.0, response["started"] - begin), min(response["ended"], sampled) - begin, finished))
    return sorted(drawn, key=lambda one: (one[0], one[1]))


def _draw_responses(axes: Axes, responses: list[tuple[float, float, bool]]) -> None:
    for row, (begin, end, finished) in enumerate(responses):
        axes.barh(row, end - begin, left=begin, height=0.8, color=FINISHED if finished else CARRIED)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_ylabel("decode")
    handles = [Patch(color=FINISHED, label="response that ends")]
    if not all(finished for *_, finished in responses):
        handles.append(Patch(color=CARRIED, label="carried into the next step"))
    axes.legend(handles=handles, fontsize=8, loc="upper right")


def _draw_scorer(axes: Axes, name: str, spans: list, origin: float, end: float) -> None:
    """Calls to a scorer as its pump saw them: prefill of chunks, final scores."""
    for kind, begin, until in spans:
        width = until - begin
        axes.barh(0, width, left=begin - origin, height=0.8, color=SCORER_COLOURS.get(kind, "gray"))
    axes.set_yticks([0], [name])
    axes.set_ylim(-0.6, 0.6)
    handles = [
        Patch(color=SCORER_COLOURS["prefill"], label="prefill of chunks"),
        Patch(color=SCORER_COLOURS["score"], label="final score"),
    ]
    axes.legend(handles=handles, fontsize=8, loc="upper right", ncols=2)
    axes.set_xlim(left=min(0.0, *(begin - origin for _, begin, _ in spans)) if spans else 0.0, right=end)


def _draw_phases(axes: Axes, laid: list[tuple[str, float, float]]) -> None:
    for name, begin, end in laid:
        axes.barh(0, end - begin, left=begin, height=0.8, color=PHASE_COLOURS[name], edgecolor="white")
    axes.set_yticks([0], ["trainer"])
    axes.set_ylim(-0.6, 0.6)
    axes.set_xlabel("seconds from the begin of generation")
