"""The benchmark's result: statistics over steps and repeats, ratios of arms, goals, and a table.

Called with how the runs ended; reads their metrics. Arithmetic of a single step is in `trace.py`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_oppo.benchmark.arms import LAYOUTS, OWN_POOL, STEP_WAITS_FOR_ALL, Preset
from verl_oppo.benchmark.runs import RunResult
from verl_oppo.benchmark.trace import (
    PARTS,
    Step,
    generation_and_scoring_share,
    hidden_share,
    idle,
    lower_bound_s,
    ratios,
    steps_of,
    utilisation,
)
from verl_oppo.report.metrics_file import read_run

BASE = "sync_fast_poll"
LOWER_BOUND = "lower_bound"
DISTURBED = 0.05
"""Share of a run's measured time by which its emulated model steps may overrun before the run is called disturbed."""
LAYOUT_WORDS = (
    "Where the reward model is: arms {own_pool} have it on devices of its own, as in the paper (of 8 devices 7 "
    "generate and train and 1 scores); arms {colocated} on the devices that generate and train, since stock verl "
    "0.9.1 cannot train otherwise (verl#7368: with a pool of its own every trajectory fails). So the stock arms "
    "score after generation, spread over all their devices, and verl's own overlap of scoring by finished "
    "response, which a pool of its own would bring, is not in them. Emulated, an own reward device pays for "
    "{reward_load:g} times the tokens that the run sends it: those of the actor devices that are not there. An "
    "own pool also means {extra:.3g} times the devices for each actor device: `equal_devices` of a ratio holds "
    "both layouts to the same number of devices as if every second of a step scaled with it, which is the reading "
    "least favourable to an own pool."
)
RATIO_WORDS = (
    "A ratio A/B is the mean step time of A over that of B in the same repeat, measured steps only; `per_token` is the "
    "same of seconds per trained response token, for arms that trained other responses in the measured steps. Median, "
    "min and max are over repeats."
)


@dataclass(frozen=True)
class MeasuredRun:
    """The measured steps of one run that ended well.

    `plain_reward_s_per_token`: plain scoring time of each prompt and response token, None where nothing streams.
    `stolen`: as in `RunResult`, start-up included.
    """

    arm: str
    repeat: int
    steps: list[Step]
    plain_reward_s_per_token: float | None
    is_emulated: bool
    stolen: float | None = None

    @property
    def mean_step_s(self) -> float:
        return statistics.fmean(step.seconds for step in self.steps)

    @property
    def overrun(self) -> float:
        """By how much its emulated model steps took longer for real, as a share of its measured time."""
        return sum(step.overrun_s for step in self.steps) / sum(step.seconds for step in self.steps)

    @property
    def seconds_per_token(self) -> float:
        return sum(step.seconds for step in self.steps) / sum(step.generated for step in self.steps)


def measured_run(result: RunResult, preset: Preset) -> MeasuredRun:
    """Reads a run.

    The plain scoring time is that of the last verify step, which is after warm-up, a token: the verify step may have
    trained more or fewer. Verify steps score twice and are no measured steps.

    Raises:
        ValueError: a measured step is missing.
    """
    files = read_run(Path(result.folder))
    steps = steps_of(files.steps, waits_for_all=result.arm in STEP_WAITS_FOR_ALL)
    found = {step.step for step in steps}
    missing = [step for step in preset.measured_steps if step not in found]
    if missing:
        raise ValueError(f"steps {missing} are not in {result.folder}")
    measured = [step for step in steps if step.step in preset.measured_steps and not step.is_verify]
    plain = [step.plain_reward_s / step.tokens for step in steps if step.is_verify and step.plain_reward_s]
    per_token = plain[-1] if plain else None
    return MeasuredRun(result.arm, result.repeat, measured, per_token, files.is_emulated, result.stolen)


def summarize(results: Sequence[RunResult], preset: Preset, work: str) -> dict[str, Any]:
    """`arms`, `ratios`, `goals`, `failures`, `disturbed` and words about them, ready for JSON.

    A run that failed, or whose steps are not all there, is in `failures` and in nothing else. A disturbed one is in all
    figures: it measured the machine as much as the emulated devices, and is named so.

    Raises:
        ValueError: emulated and measured runs are mixed.
    """
    failures, runs = [], []
    for result in results:
        if result.failure is not None:
            failures.append({"arm": result.arm, "repeat": result.repeat, "why": result.failure})
            continue
        try:
            runs.append(measured_run(result, preset))
        except ValueError as error:
            failures.append({"arm": result.arm, "repeat": result.repeat, "why": str(error)})
    if len({run.is_emulated for run in runs}) > 1:
        raise ValueError("some runs are emulated and some are not; allowed: one kind in a summary")
    is_emulated = any(run.is_emulated for run in runs)
    by_arm: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    arms = {arm: arm_figures(group) for arm, group in by_arm.items()}
    compared = all_ratios(by_arm, preset)
    words = LAYOUT_WORDS.format(
        own_pool=_names(arm for arm in by_arm if LAYOUTS[arm] == OWN_POOL),
        colocated=_names(arm for arm in by_arm if LAYOUTS[arm] != OWN_POOL),
        reward_load=preset.reward_load,
        extra=preset.devices_per_actor_device[OWN_POOL],
    )
    return {
        "emulated": is_emulated,
        "clock": "EMULATED accelerators (emulate=on)" if is_emulated else "this machine's",
        "complete": not failures,
        "failures": failures,
        "disturbed": [
            {"arm": run.arm, "repeat": run.repeat, "overrun": run.overrun, "stolen": run.stolen}
            for run in runs
            if run.overrun > DISTURBED
        ],
        "arms": arms,
        "ratios": compared,
        "goals": goals(arms, compared, work),
        "overhead": overhead(compared),
        "layout": words,
        "what_a_ratio_is": RATIO_WORDS,
    }


def _names(arms: Iterable[str]) -> str:
    return ", ".join(arms) or "(none)"


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, min and max of the values that are there; None without any."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    return {"median": statistics.median(present), "min": min(present), "max": max(present), "n": len(present)}


def arm_figures(runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    """Figures of an arm: of step seconds, parts, shares and reward over all measured steps; of the rest over runs."""
    steps = [step for run in runs for step in run.steps]
    own_pool = LAYOUTS[runs[0].arm] == OWN_POOL
    shares = [utilisation(step, own_pool=own_pool) for step in steps]
    model_steps = sum(step.model_steps for step in steps)
    return {
        "runs": len(runs),
        "emulated": runs[0].is_emulated,
        "reward_model": LAYOUTS[runs[0].arm],
        "step_s": spread(step.seconds for step in steps),
        "mean_step_s": spread(run.mean_step_s for run in runs),
        "parts": {name: spread(step.parts[name] for step in steps) for name in PARTS},
        "tokens_per_s": spread(
            sum(step.tokens for step in run.steps) / sum(step.seconds for step in run.steps) for run in runs
        ),
        "response_tokens_per_step": spread(step.generated for step in steps),
        "generation_and_scoring_share": spread(map(generation_and_scoring_share, steps)),
        "utilisation": {side: spread(share[side] for share in shares) for side in ("actor", "scorer")},
        "idle": {side: spread(idle(share[side]) for share in shares) for side in ("actor", "scorer")},
        "hidden_share": spread(hidden_share(run.steps, run.plain_reward_s_per_token) for run in runs),
        "reward": spread(step.reward for step in steps),
        "overrun_s": spread(step.overrun_s for step in steps),
        "stolen": spread(run.stolen for run in runs),
        "overrun_share": sum(step.overruns for step in steps) / model_steps if model_steps else None,
    }


def all_ratios(by_arm: Mapping[str, Sequence[MeasuredRun]], preset: Preset) -> dict[str, Any]:
    """`A/B` for every pair of arms, and each arm over the lower bound of its repeat."""
    seconds = {arm: {run.repeat: run.mean_step_s for run in runs} for arm, runs in by_arm.items()}
    per_token = {arm: {run.repeat: run.seconds_per_token for run in runs} for arm, runs in by_arm.items()}
    devices = {arm: preset.devices_per_actor_device[LAYOUTS[arm]] for arm in by_arm}
    compared = {}
    for a in by_arm:
        for b in by_arm:
            if a != b:
                entry = _ratio(seconds[a], seconds[b], per_token[a], per_token[b])
                entry["equal_devices"] = spread(
                    value * devices[a] / devices[b] for value in entry["by_repeat"].values()
                )
                compared[f"{a}/{b}"] = entry
    bound_s, bound_per_token = {}, {}
    for run in by_arm.get(BASE, ()):
        bounds = [lower_bound_s(step, reward_load=preset.reward_load) for step in run.steps]
        bound_s[run.repeat] = statistics.fmean(bounds)
        bound_per_token[run.repeat] = sum(bounds) / sum(step.generated for step in run.steps)
    for a in by_arm:
        if bound_s:
            compared[f"{a}/{LOWER_BOUND}"] = _ratio(seconds[a], bound_s, per_token[a], bound_per_token)
    return compared


def _ratio(
    a: Mapping[int, float], b: Mapping[int, float], a_per_token: Mapping[int, float], b_per_token: Mapping[int, float]
) -> dict[str, Any]:
    by_repeat = ratios(a, b)
    figures = spread(by_repeat.values()) or {"median": None, "min": None, "max": None, "n": 0}
    return {
        **figures,
        "by_repeat": by_repeat,
        "per_token": spread(ratios(a_per_token, b_per_token).values()),
    }


def goals(arms: Mapping[str, Any], compared: Mapping[str, Any], work: str) -> list[dict[str, Any]]:
    """What was aimed at, what came out and whether it is met; None where an arm did not run."""
    if work == "constant":
        return [_goal(f"oppo/{BASE}, largest of the repeats", compared.get(f"oppo/{BASE}"), "max", 1.05)]
    if work != "long_tail":
        return []
    listed = [
        _goal(name, compared.get(name), "median", limit)
        for name, limit in (
            (f"oppo/{LOWER_BOUND}", 1.25),
            (f"oppo/{BASE}", 0.6),
            ("oppo/colocate_async_fast_poll", 0.9),
        )
    ]
    hidden = (arms.get("oppo") or {}).get("hidden_share")
    value = None if hidden is None else hidden["median"]
    listed.append(
        {
            "name": "oppo: hidden share of scoring",
            "goal": ">= 0.8",
            "value": value,
            "met": None if value is None else value >= 0.8,
        }
    )
    return listed


def _goal(name: str, entry: Mapping[str, Any] | None, which: str, limit: float) -> dict[str, Any]:
    value = None if entry is None else entry[which]
    return {"name": name, "goal": f"<= {limit}", "value": value, "met": None if value is None else value <= limit}


def overhead(compared: Mapping[str, Any]) -> dict[str, Any] | None:
    """What controller, first-B signal and events cost when they bring nothing, as a share of the step of sync."""
    entry = compared.get(f"oppo_off/{BASE}")
    if entry is None or entry["median"] is None:
        return None
    return {"share_of_step": {key: entry[key] - 1.0 for key in ("median", "min", "max")}, "from": f"oppo_off/{BASE}"}


def write_steps(results: Sequence[RunResult], path: Path) -> None:
    """Every step of every run that ended well, warm-up included, one JSON object a line."""
    with path.open("w") as file:
        for result in results:
            if result.failure is not None:
                continue
            files = read_run(Path(result.folder))
            for step in steps_of(files.steps, waits_for_all=result.arm in STEP_WAITS_FOR_ALL):
                line = {"arm": result.arm, "repeat": result.repeat, "emulated": files.is_emulated, **asdict(step)}
                file.write(json.dumps(line) + "\n")


def table(summary: Mapping[str, Any]) -> str:
    """The summary as Markdown, for a person."""
    emulated = ", EMULATED accelerators" if summary["emulated"] else ""
    lines = [
        f"Step times in seconds{emulated}: median (min to max) over measured steps and repeats.",
        "",
        "| arm | step | " + " | ".join(PARTS) + " | tokens/s | actor busy | scorer busy | reward | overruns |",
        "|---|" + "---|" * (len(PARTS) + 6),
    ]
    for arm, figures in summary["arms"].items():
        cells = [arm, _span(figures["step_s"]), *(_median(figures["parts"][name]) for name in PARTS)]
        cells += [_median(figures["tokens_per_s"], ".0f"), _median(figures["utilisation"]["actor"])]
        cells += [_median(figures["utilisation"]["scorer"]), _median(figures["reward"], ".3f")]
        share = figures["overrun_share"]
        cells.append("-" if share is None else f"{100 * share:.1f} %, {_median(figures['overrun_s'])} s a step")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"Ratios{emulated}: median (min to max) over repeats.", ""]
    lines += ["| ratio | step time | per trained token | equal devices |", "|---|---|---|---|"]
    for name, entry in summary["ratios"].items():
        cells = [name, _span(entry), _span(entry["per_token"]), _span(entry.get("equal_devices"))]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| goal | wanted | measured | met |", "|---|---|---|---|"]
    for goal in summary["goals"]:
        value = "-" if goal["value"] is None else f"{goal['value']:.3f}"
        met = {True: "yes", False: "NO", None: "not measured"}[goal["met"]]
        lines.append(f"| {goal['name']} | {goal['goal']} | {value} | {met} |")
    lines += ["", summary["layout"], "", summary["what_a_ratio_is"], ""]
    for run in summary["disturbed"]:
        stolen = "" if run["stolen"] is None else f" (others took {100 * run['stolen']:.0f} % of its CPU time)"
        lines.append(
            f"DISTURBED, but in all figures: {run['arm']}, repeat {run['repeat']}: its emulated model steps took "
            f"longer for real by {100 * run['overrun']:.0f} % of its time: the machine was too slow or busy{stolen}"
        )
    for failure in summary["failures"]:
        lines.append(f"FAILED, in no figure: {failure['arm']}, repeat {failure['repeat']}: {failure['why']}")
    return "\n".join(lines)


def _median(figures: Mapping[str, float] | None, spec: str = ".2f") -> str:
    return "-" if figures is None else format(figures["median"], spec)


def _span(figures: Mapping[str, Any] | None) -> str:
    if figures is None or figures["median"] is None:
        return "-"
    return f"{figures['median']:.2f} ({figures['min']:.2f} to {figures['max']:.2f})"
