"""The summary of runs whose metrics are made by hand, how runs are started and reused, and the equivalence test."""

import json
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from verl_oppo.benchmark import command, convergence
from verl_oppo.benchmark.arms import Preset
from verl_oppo.benchmark.equivalence import equivalence, t_quantile, upper_tail
from verl_oppo.benchmark.runs import RunResult, RunSpec, finished_result, run_all, stolen_share
from verl_oppo.benchmark.summary import summarize, table, write_steps

PRESET = Preset.load("cpu").with_steps(6)
"""Steps 3 to 5 are measured."""


def run(tmp_path, arm, repeat, seconds, tokens=100.0, failure=None, emulated=True, steps=6, extra=None):
    folder = tmp_path / f"{arm}-{repeat}"
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            data = {
                "timing_s/step": seconds if step > 2 else 99.0,
                "timing_s/gen": seconds / 2,
                "timing_s/update_actor": seconds / 4,
                "response_length/mean": tokens / 10,
                "response_length/max": tokens / 5,
                "prompt_length/mean": 10.0,
                "perf/total_num_tokens": tokens + 100.0,
                "critic/score/mean": 0.1 * step,
                **({"oppo/emulated": 1.0} if emulated else {}),
                **(extra or {}),
            }
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    return RunResult(arm, repeat, str(folder), [], failure)


def test_ratios_parts_and_lower_bound(tmp_path):
    results = [run(tmp_path, "sync_fast_poll", r, seconds) for r, seconds in enumerate((8.0, 10.0, 12.0))]
    results += [run(tmp_path, "oppo", r, seconds, tokens=80.0) for r, seconds in enumerate((4.0, 6.0, 4.0))]
    summary = summarize(results, PRESET, "long_tail")
    assert summary["complete"] and summary["emulated"] and "EMULATED" in summary["clock"]
    sync = summary["arms"]["sync_fast_poll"]
    assert sync["step_s"] == {"median": 10.0, "min": 8.0, "max": 12.0, "n": 9}
    # Half of generation is the straggler's: mean length 10 of at most 20.
    assert sync["parts"]["straggler"]["median"] == pytest.approx(2.5)
    assert sync["parts"]["other"]["median"] == pytest.approx(2.5)
    ratio = summary["ratios"]["oppo/sync_fast_poll"]
    assert (ratio["median"], ratio["min"], ratio["max"]) == pytest.approx((0.5, 1 / 3, 0.6))
    assert ratio["per_token"]["median"] == pytest.approx(0.5 * 100 / 80)
    assert ratio["equal_devices"]["median"] == pytest.approx(0.5 * 8 / 7)
    # decode 2.5 + training 2.5 of 10 s
    assert summary["ratios"]["oppo/lower_bound"]["by_repeat"] == pytest.approx({0: 1.0, 1: 1.2, 2: 2 / 3})
    assert set(summary["ratios"]) == {
        "oppo/sync_fast_poll",
        "sync_fast_poll/oppo",
        "oppo/lower_bound",
        "sync_fast_poll/lower_bound",
    }
    met = {goal["name"]: goal["met"] for goal in summary["goals"]}
    assert met == {
        "oppo/lower_bound": True,
        "oppo/sync_fast_poll": True,
        "oppo/colocate_async_fast_poll": None,
        "oppo: hidden share of scoring": None,
    }
    json.dumps(summary, allow_nan=False)


def test_a_run_that_failed_or_lacks_steps_is_named_and_in_no_figure(tmp_path):
    results = [
        run(tmp_path, "sync_fast_poll", 0, 8.0),
        run(tmp_path, "oppo", 0, 4.0),
        run(tmp_path, "oppo", 1, 1.0, failure="exit status 1"),
        run(tmp_path, "oppo", 2, 1.0, steps=4),
    ]
    summary = summarize(results, PRESET, "long_tail")
    assert not summary["complete"]
    assert [(one["repeat"], one["why"].split()[0]) for one in summary["failures"]] == [(1, "exit"), (2, "steps")]
    assert summary["arms"]["oppo"]["step_s"]["n"] == 3 and summary["arms"]["oppo"]["step_s"]["max"] == 4.0
    assert "FAILED, in no figure: oppo, repeat 1: exit status 1" in table(summary)


def test_a_run_on_a_busy_machine_is_named_and_counts_all_the_same(tmp_path):
    results = [run(tmp_path, "sync_fast_poll", 0, 8.0), run(tmp_path, "oppo", 0, 4.0), run(tmp_path, "oppo", 1, 6.0)]
    for repeat, overrun_s in ((0, 0.1), (1, 0.4)):
        path = tmp_path / f"oppo-{repeat}" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["data"]["oppo/emulated/overrun_s"] = overrun_s * line["step"]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results[2].stolen = 0.09
    summary = summarize(results, PRESET, "long_tail")
    assert summary["disturbed"] == [{"arm": "oppo", "repeat": 1, "overrun": pytest.approx(0.4 / 6), "stolen": 0.09}]
    assert summary["arms"]["oppo"]["runs"] == 2
    assert "DISTURBED, but in all figures: oppo, repeat 1" in table(summary) and "7 % of its time" in table(summary)
    assert "others took 9 % of its CPU time" in table(summary)
    assert summary["arms"]["oppo"]["stolen"]["n"] == 1, "of one run it is not known"


def test_stolen_time_is_a_share_of_all_time_with_a_guests_counted_once():
    times = namedtuple("times", "user idle steal guest")
    assert stolen_share(times(10, 10, 1, 5), times(50, 60, 11, 45)) == pytest.approx(0.1)
    assert stolen_share(times(1, 1, 1, 1), times(1, 1, 1, 1)) is None
    silent = namedtuple("silent", "user idle")
    assert stolen_share(silent(1, 1), silent(2, 2)) is None


def test_emulated_and_real_runs_are_not_mixed(tmp_path):
    results = [run(tmp_path, "oppo", 0, 4.0), run(tmp_path, "oppo", 1, 4.0, emulated=False)]
    with pytest.raises(ValueError, match="one kind"):
        summarize(results, PRESET, "long_tail")


def test_verify_steps_are_left_out_and_give_the_plain_time(tmp_path):
    result = run(tmp_path, "oppo", 0, 4.0, extra={"oppo/overlap/reward_exposed_s": 0.25})
    path = tmp_path / "oppo-0" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for index, plain in ((3, 9.0), (5, 1.0)):
        lines[index]["data"] |= {"oppo/verify/reward_difference": 0.0, "oppo/overlap/reward_plain_s": plain}
    lines[3]["data"]["timing_s/step"] = 50.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = summarize([result], PRESET, "long_tail")["arms"]["oppo"]
    assert figures["step_s"] == {"median": 4.0, "min": 4.0, "max": 4.0, "n": 2}
    # Plain 1 s for 200 tokens at the last verify step, and 200 tokens in each measured one.
    assert figures["hidden_share"]["median"] == pytest.approx(0.75)


def test_on_constant_lengths_the_worst_repeat_is_judged(tmp_path):
    results = [run(tmp_path, "sync_fast_poll", r, 10.0) for r in (0, 1)]
    results += [run(tmp_path, "oppo", 0, 9.0), run(tmp_path, "oppo", 1, 10.6)]
    (goal,) = summarize(results, PRESET, "constant")["goals"]
    assert goal["value"] == pytest.approx(1.06) and goal["met"] is False


def test_overhead_is_that_of_the_arm_with_both_overlaps_off(tmp_path):
    results = [run(tmp_path, "sync_fast_poll", 0, 10.0), run(tmp_path, "oppo_off", 0, 10.2)]
    assert summarize(results, PRESET, "constant")["overhead"]["share_of_step"]["median"] == pytest.approx(0.02)


def test_bad_arguments_are_named(tmp_path):
    def planned(*arguments):
        options = command.parse([*arguments, "--out", str(tmp_path)])
        return command.plan(options, Preset.load(options.preset), tmp_path)

    with pytest.raises(ValueError, match="arm is 'fastest'"):
        planned("--arms", "sync,fastest")
    with pytest.raises(ValueError, match="--prompts is not given"):
        planned("--preset", "gpu")


def test_arms_are_interleaved_over_repeats_on_the_same_work(tmp_path):
    prompts = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "hello"}]), prompts)
    arguments = ["--arms", "sync,oppo", "--repeats", "2", "--prompts", str(prompts), "--out", str(tmp_path), "a.b=1"]
    specs = command.plan(command.parse(arguments), PRESET, tmp_path)
    assert [(spec.arm, spec.repeat) for spec in specs] == [("sync", 0), ("oppo", 0), ("sync", 1), ("oppo", 1)]
    files = [next(one for one in spec.arguments if one.startswith("data.train_files=")) for spec in specs]
    assert files[0] == files[1] != files[2] == files[3]
    assert all(spec.arguments[-1] == "a.b=1" for spec in specs)


def test_every_step_is_written_raw(tmp_path):
    results = [run(tmp_path, "oppo", 0, 4.0), run(tmp_path, "oppo", 1, 4.0, failure="why not")]
    write_steps(results, tmp_path / "steps.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {line["arm"] for line in lines} == {"oppo"} and all(line["emulated"] for line in lines)


# Runs as child processes ----------------------------------------------------------------------------------------------

CHILD = """
import sys, time
def note(what):
    with open(sys.argv[1], "a") as file:
        file.write(f"{what} {sys.argv[2]}\\n")
note("begin")
time.sleep(1.0)
note("end")
sys.exit(3 if sys.argv[2] == "bad" else 0)
"""


class ScriptSpec(RunSpec):
    """A run of a script in place of verl."""

    def command(self):
        return [sys.executable, "-c", CHILD, *self.arguments]


def scripts(tmp_path, *names):
    log = str(tmp_path / "log")
    return [ScriptSpec(name, 0, tmp_path / name, (log, name)) for name in names]


def test_a_run_that_is_timed_has_the_machine_to_itself(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(command, "run_all", lambda specs, **options: asked.update(options) or [])
    monkeypatch.setattr(command, "plan", lambda *arguments: [])
    monkeypatch.setattr(command, "conclude", lambda *arguments: 0)
    command.main(["--out", str(tmp_path), "--at-once", "2"])
    assert asked["at_once"] == 1


def test_runs_go_one_after_the_other_in_their_order_and_a_failed_one_stops_none(tmp_path):
    specs = scripts(tmp_path, "first", "bad", "third")
    results = run_all(specs, resume=False, timeout_s=60, at_once=1, say=lambda message: None)
    order = (tmp_path / "log").read_text().splitlines()
    assert order == [f"{what} {name}" for name in ("first", "bad", "third") for what in ("begin", "end")]
    assert [result.failure for result in results] == [None, "exit status 3", None]
    assert all(result.seconds > 0.5 and 0.0 <= result.stolen < 1.0 for result in results)


def test_several_go_at_once_where_nothing_is_timed(tmp_path):
    specs = scripts(tmp_path, "first", "second", "third")
    run_all(specs, resume=False, timeout_s=60, at_once=2, say=lambda message: None)
    order = (tmp_path / "log").read_text().splitlines()
    assert {line.split()[0] for line in order[:2]} == {"begin"}, "two began before one had ended"
    assert order.index("begin third") > min(order.index("end first"), order.index("end second"))


def test_a_run_that_ended_well_is_reused_and_a_failed_or_changed_one_is_not(tmp_path):
    specs = scripts(tmp_path, "first", "bad")
    run_all(specs, resume=False, timeout_s=60, at_once=1, say=lambda message: None)
    said = []
    run_all(specs, resume=True, timeout_s=60, at_once=1, say=said.append)
    assert said[0] == "first, repeat 0: reused" and said[1] == "bad, repeat 0: starting"
    changed = ScriptSpec("first", 0, tmp_path / "first", ("other", "first"))
    assert finished_result(specs[0]) is not None and finished_result(changed) is None


def test_a_run_past_its_time_is_ended_and_the_other_one_goes_on(tmp_path):
    specs = scripts(tmp_path, "first", "second")
    stuck = ScriptSpec("stuck", 0, tmp_path / "stuck", ())
    object.__setattr__(stuck, "command", lambda: [sys.executable, "-c", "import time; time.sleep(600)"])
    results = run_all([stuck, specs[0]], resume=False, timeout_s=8, at_once=2, say=lambda message: None)
    assert [result.failure for result in results] == ["not done after 8 s", None]


def test_a_terminated_benchmark_ends_as_any_other():
    """Its `finally` ends the runs."""
    script = Path(__file__).parent.parent / "scripts" / "benchmark.py"
    program = f"""
import runpy, time
from verl_oppo.benchmark import command
def main(argv):
    try:
        print("going", flush=True)
        time.sleep(60)
    finally:
        print("ended", flush=True)
command.main = main
runpy.run_path({str(script)!r}, run_name="__main__")
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "going\n"
        process.terminate()
        assert process.communicate(timeout=30)[0] == "ended\n"
    assert process.returncode == 128 + signal.SIGTERM


# Convergence ----------------------------------------------------------------------------------------------------------


def test_students_t_has_its_tabulated_quantiles():
    assert t_quantile(0.95, 4) == pytest.approx(2.1318, abs=1e-4)
    assert t_quantile(0.975, 10) == pytest.approx(2.2281, abs=1e-4)
    assert upper_tail(-2.1318, 4) == pytest.approx(0.95, abs=1e-4)


def test_equivalence_needs_small_difference_and_small_spread():
    close = equivalence([0.70, 0.71, 0.72], [0.70, 0.705, 0.71], margin=0.05)
    # Welch: difference 0.005, standard error sqrt(1e-4 / 3 + 0.25e-4 / 3) = 0.006455, 2.94 degrees of freedom.
    assert close.difference == pytest.approx(0.005)
    assert close.degrees_of_freedom == pytest.approx(2.941, abs=1e-3)
    assert close.is_equivalent and -0.05 < close.low < close.high < 0.05
    assert not equivalence([0.6, 0.7, 0.8], [0.6, 0.7, 0.8], margin=0.05).is_equivalent
    assert not equivalence([0.80, 0.81], [0.70, 0.71], margin=0.05).is_equivalent
    with pytest.raises(ValueError, match="two or more"):
        equivalence([0.5], [0.5, 0.6], margin=0.05)


def converging_run(tmp_path, arm, seed, final, steps=30):
    folder = tmp_path / f"{arm}-seed{seed}"
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            data = {"timing_s/step": 2.0, "critic/score/mean": 0.5 if step <= 20 else final}
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    return RunResult(arm, seed, str(folder), [], None)


def test_convergence_over_seeds(tmp_path):
    results = [converging_run(tmp_path, "sync_fast_poll", seed, 0.70 + 0.01 * seed) for seed in (1, 2, 3)]
    results += [converging_run(tmp_path, "oppo", seed, 0.71 + 0.01 * seed) for seed in (1, 2, 3)]
    results += [converging_run(tmp_path, "oppo_lr0", 1, 0.5), converging_run(tmp_path, "oppo_lr0", 2, 0.5, steps=29)]
    summary = convergence.summarize(results, Preset.load(convergence.PRESET).with_steps(30))
    assert summary["final_reward"]["oppo"] == pytest.approx({1: 0.72, 2: 0.73, 3: 0.74})
    assert summary["equivalence"]["difference"] == pytest.approx(0.01)
    assert summary["equivalence"]["is_equivalent"]
    assert summary["null"] == pytest.approx({"mean": 0.0, "min": 0.0, "max": 0.0})
    assert summary["failures"] == [{"arm": "oppo_lr0", "seed": 2, "why": "29 of 30 steps have a reward"}]
    assert summary["curves"]["oppo"]["seconds"][-1] == pytest.approx(60.0)
    assert summary["curves"]["oppo"]["max"][-1] == pytest.approx(0.74)
    convergence.draw(summary, tmp_path / "convergence.png")
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")
    said = " ".join(convergence.words(summary))
    assert "equivalent (two one-sided tests" in said and "FAILED, in no figure: oppo_lr0, seed 2" in said
    json.dumps(summary, allow_nan=False)


def trajectory(step, length, age=0, stale=0):
    first = step - age
    return {
        "step": step,
        "key": f"{step}-{length}_0_0",
        "submitted_step": first,
        "first_token_step": first,
        "length": length,
        "stale": stale,
        "clipped": 0,
    }


def test_fairness_windows_leave_out_the_end_and_deciles_see_stale_tokens():
    preset = Preset.load(convergence.PRESET).with_steps(30)
    trajectories = [trajectory(step, length=10) for step in range(1, 31)]
    trajectories += [trajectory(step, length=100, age=2, stale=50) for step in range(3, 31)]
    fair = convergence.fairness(trajectories, preset)
    (window,) = fair["windows"]
    assert (window["first_step"], window["last_step"]) == (1, 20)
    # 20 short and 20 long ones submitted, 20 short and 18 long ones trained.
    assert window["submitted_mean"] == pytest.approx(55.0)
    assert window["trained_mean"] == pytest.approx((200 + 1800) / 38)
    assert fair["deciles"][0]["stale_share"] == 0.0 and fair["deciles"][0]["age_max"] == 0
    assert fair["deciles"][9]["stale_share"] == 0.5 and fair["deciles"][9]["age_mean"] == 2.0
    assert convergence.fairness([], preset) is None
