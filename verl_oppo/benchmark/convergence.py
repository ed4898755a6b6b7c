"""Does it learn the same: `sync_fast_poll` against `oppo` on the demo task, several seeds, and a null arm.

Called by the command with `--convergence`. These runs are not timed, so several may go at a time. The null arm is
OPPO with a learning rate of 0: what its reward does is noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from verl_oppo.benchmark.arms import Preset, arm_names
from verl_oppo.benchmark.equivalence import equivalence
from verl_oppo.benchmark.machine import machine, versions
from verl_oppo.benchmark.runs import RunResult, RunSpec, run_all
from verl_oppo.control.fairness import Journey, age_by_length_decile, lengths_by_window
from verl_oppo.report.metrics_file import RunFiles, read_run

PRESET = "convergence"
BASE, OPPO, NULL = "sync_fast_poll", "oppo", "oppo_lr0"
ARMS = (BASE, OPPO, NULL)
NULL_ARGUMENTS = ("actor_rollout_ref.actor.optim.lr=0", "critic.optim.lr=0")
FINAL_STEPS = 10
MARGIN = 0.05
"""Of the final reward (0 to 1): the equivalence margin, chosen before any run. The reward rises by about 0.5."""
ALPHA = 0.05
WINDOW = 20


def main(options: argparse.Namespace, out: Path, prompts: Callable[[], Path], say: Callable[[str], None]) -> int:
    """Runs arms and seeds and writes `convergence.json`, `convergence.png` and the report.

    Exit status: 0; 1 if a run failed.

    Raises:
        ValueError: there is no such arm.
    """
    preset = Preset.load(PRESET).with_steps(options.steps)
    prompts()  # Made once, before two runs want them at once.
    seeds = [options.seed + index for index in range(options.seeds)]
    specs = plan(preset, out, arm_names(options.arms) or ARMS, seeds, options.overrides)
    say(f"{len(specs)} runs in {out}; equivalence margin {MARGIN}, stated beforehand")
    results = run_all(specs, resume=options.resume, timeout_s=options.timeout, at_once=options.at_once, say=say)
    summary = summarize(results, preset) | {
        "settings": {
            "steps": preset.steps,
            "seeds": seeds,
            "overrides": list(options.overrides),
            "arguments": {spec.arm: list(spec.arguments) for spec in specs[: len(specs) // options.seeds]},
        },
        "machine": machine(),
        "versions": versions(),
    }
    (out / "convergence.json").write_text(json.dumps(summary, indent=1, allow_nan=False))
    draw(summary, out / "convergence.png")
    for sentence in words(summary):
        print(sentence)
    folders = [Path(result.folder) for result in results if result.failure is None]
    if folders:
        from verl_oppo.report.page import write_report

        say(f"report: {write_report(folders, out)}")
    say(f"summary: {out / 'convergence.json'}")
    return 1 if summary["failures"] else 0


def plan(
    preset: Preset, out: Path, arms: Sequence[str], seeds: Sequence[int], overrides: Sequence[str]
) -> list[RunSpec]:
    """One run for each arm and seed, the arms interleaved."""
    for arm in arms:
        if arm not in ARMS:
            raise ValueError(f"arm is {arm!r}; allowed with --convergence: {', '.join(ARMS)}")
    specs = []
    for seed in seeds:
        seeded = [f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"]
        for arm in arms:
            whole = (*preset.arguments(OPPO if arm == NULL else arm), *seeded, *overrides)
            if arm == NULL:
                # Last: a rate among the overrides is not for it.
                whole += NULL_ARGUMENTS
            specs.append(RunSpec(arm, seed, out / f"{arm}-seed{seed}", whole))
    return specs


def summarize(results: Sequence[RunResult], preset: Preset) -> dict[str, Any]:
    """`curves`, `final_reward`, `equivalence`, `fairness` and `failures`; failed runs are in nothing else."""
    failures: list[dict[str, Any]] = []
    runs: dict[str, dict[int, RunFiles]] = {}
    for result in results:
        run = read_run(Path(result.folder))
        why = result.failure
        if why is None and len(run.series("critic/score/mean")[0]) < preset.steps:
            why = f"{len(run.series('critic/score/mean')[0])} of {preset.steps} steps have a reward"
        if why is None:
            runs.setdefault(result.arm, {})[result.repeat] = run
        else:
            failures.append({"arm": result.arm, "seed": result.repeat, "why": why})
    final = {arm: {seed: final_reward(run) for seed, run in seeds.items()} for arm, seeds in runs.items()}
    return {
        "failures": failures,
        "final_steps": FINAL_STEPS,
        "curves": {arm: curves(list(seeds.values())) for arm, seeds in runs.items()},
        "final_reward": final,
        "equivalence": compare(final.get(OPPO, {}), final.get(BASE, {})),
        "null": null_words(runs.get(NULL, {})),
        "fairness": {
            arm: {seed: fairness(run.trajectories, preset) for seed, run in runs.get(arm, {}).items()}
            for arm in (OPPO, NULL)
        },
        "emulated": any(run.is_emulated for seeds in runs.values() for run in seeds.values()),
    }


def final_reward(run: RunFiles) -> float:
    """Mean reward of the last FINAL_STEPS steps."""
    return statistics.fmean(run.series("critic/score/mean")[1][-FINAL_STEPS:])


def curves(runs: Sequence[RunFiles]) -> dict[str, list[float]]:
    """Reward by step over seeds: mean, min, max, and mean seconds since the first step's begin."""
    rewards = [run.series("critic/score/mean") for run in runs]
    seconds = [list(accumulate(run.series("timing_s/step")[1])) for run in runs]
    length = min(len(values) for _, values in rewards)
    by_step = list(zip(*(values[:length] for _, values in rewards), strict=True))
    return {
        "step": rewards[0][0][:length],
        "seconds": [statistics.fmean(at) for at in zip(*(one[:length] for one in seconds), strict=True)],
        "mean": [statistics.fmean(values) for values in by_step],
        "min": [min(values) for values in by_step],
        "max": [max(values) for values in by_step],
    }


def compare(a: Mapping[int, float], b: Mapping[int, float]) -> dict[str, Any] | None:
    """The equivalence test of final rewards over seeds; None with fewer than two seeds on a side."""
    if len(a) < 2 or len(b) < 2:
        return None
    tested = equivalence(list(a.values()), list(b.values()), MARGIN, ALPHA)
    return {**asdict(tested), "is_equivalent": tested.is_equivalent, "what": f"final reward, {OPPO} - {BASE}"}


def null_words(runs: Mapping[int, RunFiles]) -> dict[str, float] | None:
    """How far the reward moves when nothing is learned: last less first FINAL_STEPS steps, over seeds."""
    changes = []
    for run in runs.values():
        rewards = run.series("critic/score/mean")[1]
        changes.append(statistics.fmean(rewards[-FINAL_STEPS:]) - statistics.fmean(rewards[:FINAL_STEPS]))
    return {"mean": statistics.fmean(changes), "min": min(changes), "max": max(changes)} if changes else None


def fairness(trajectories: Sequence[Mapping[str, Any]], preset: Preset) -> dict[str, Any] | None:
    """Does deferral starve long responses: trained against submitted length by window, ages and staleness by decile.

    The last `cooldown_steps` (max_deferrals) steps are left out of the windows. None where no trajectory was noted or
    no window fits.
    """
    last = preset.steps - preset.cooldown_steps
    if not trajectories or last < WINDOW:
        return None
    journeys = [
        Journey(t["key"], t["length"], t["submitted_step"], t["first_token_step"], t["step"]) for t in trajectories
    ]
    windows = lengths_by_window(journeys, first_step=1, last_step=last, window=WINDOW)
    deciles = [asdict(decile) for decile in age_by_length_decile(journeys)]
    for decile, shares in zip(deciles, token_shares_by_decile(trajectories), strict=True):
        decile.update(shares)
    return {"windows": [{**asdict(one), "ratio": one.ratio} for one in windows], "deciles": deciles}


def token_shares_by_decile(trajectories: Sequence[Mapping[str, Any]]) -> list[dict[str, float | None]]:
    """Share of stale tokens and of tokens whose importance weight is clipped, by decile of length, shortest first."""
    ordered = sorted(trajectories, key=lambda t: t["length"])
    deciles = []
    for decile in range(10):
        part = ordered[decile * len(ordered) // 10 : (decile + 1) * len(ordered) // 10]
        tokens = sum(t["length"] for t in part)
        if not part:
            continue
        clipped = [t["clipped"] for t in part if t.get("clipped") is not None]
        deciles.append(
            {
                "stale_share": sum(t["stale"] for t in part) / tokens if tokens else 0.0,
                "clipped_share": sum(clipped) / tokens if tokens and len(clipped) == len(part) else None,
            }
        )
    return deciles


def words(summary: Mapping[str, Any]) -> list[str]:
    """The result in sentences."""
    sentences = []
    for arm, by_seed in summary["final_reward"].items():
        values = list(by_seed.values())
        spread = f", standard deviation {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        sentences.append(f"{arm}: final reward {statistics.fmean(values):.4f} over {len(values)} seeds{spread}.")
    tested = summary["equivalence"]
    if tested is None:
        sentences.append("No equivalence test: it takes two seeds or more of both arms.")
    else:
        verdict = "equivalent" if tested["is_equivalent"] else "NOT shown to be equivalent"
        interval = f"{100 * (1 - 2 * ALPHA):.0f} % interval {tested['low']:+.4f} to {tested['high']:+.4f}"
        sentences.append(
            f"{tested['what']}: {tested['difference']:+.4f}, {interval}, margin +-{MARGIN}: {verdict} "
            f"(two one-sided tests, p = {tested['p']:.4f})."
        )
    if summary["null"] is not None:
        null = summary["null"]
        sentences.append(
            f"With learning rate 0 the reward moved by {null['mean']:+.4f} ({null['min']:+.4f} to {null['max']:+.4f})."
        )
    sentences += [
        f"FAILED, in no figure: {one['arm']}, seed {one['seed']}: {one['why']}" for one in summary["failures"]
    ]
    return sentences


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """Reward against step and wall clock: mean over seeds, with the range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(1, 2, sharey=True, figsize=(11, 4), layout="constrained")
    for axes, key in zip(grid, ("step", "seconds"), strict=True):
        for arm, curve in summary["curves"].items():
            (line,) = axes.plot(curve[key], curve["mean"], label=f"{arm} ({len(summary['final_reward'][arm])} seeds)")
            axes.fill_between(curve[key], curve["min"], curve["max"], color=line.get_color(), alpha=0.2)
    clock = "EMULATED" if summary["emulated"] else "runs may share the machine"
    grid[0].set(xlabel="step", ylabel="mean reward")
    grid[1].set_xlabel(f"seconds of training ({clock})")
    grid[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
