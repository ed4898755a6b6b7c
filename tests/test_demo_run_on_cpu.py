"""The demo's runner against a small child process in place of a training run: following, failing, ending."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from verl_oppo.demo.child import ChildRun
from verl_oppo.demo.run import MetricsFollower, RunFailed, main, new_run_dir, save_plot, train_command, watch
from verl_oppo.demo.summary import StepRecord

ROOT = Path(__file__).resolve().parent.parent

WRITE_STEPS = """
    import json, os, sys, time
    with open(os.environ["VERL_FILE_LOGGER_PATH"], "wb", buffering=0) as out:
        out.write(b'{"step": 0, "data": {"val-core/toy/reward/mean@1": 0.1}}\\n')
        for step in range(1, 5):
            data = {"critic/score/mean": step / 10, "timing_s/step": 1.5, "oppo/deferred/num": 1}
            line = json.dumps({"step": step, "data": data}).encode() + b"\\n"
            out.write(line[:20])
            time.sleep(0.3)
            out.write(line[20:])
            print("Total training steps: 4", flush=True)
"""

# The grandchild leaves the group, as Ray's daemons do; both ignore what asks them to end.
STUBBORN = """
    import signal, subprocess, sys, time
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(600)
"""


def start(folder: Path, code: str) -> tuple[ChildRun, Path, Path]:
    metrics, log = folder / "metrics.jsonl", folder / "train.log"
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return ChildRun(command, log, {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)}), metrics, log


def wait_for(condition, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.05)
    return result


def test_each_step_is_shown_once_while_the_run_goes_on(tmp_path, capsys):
    child, metrics, log = start(tmp_path, WRITE_STEPS)
    records = watch(child, metrics, log, timeout_s=60)
    assert [record.step for record in records] == [1, 2, 3, 4]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1].split("/")[0] for line in shown] == ["1", "2", "3", "4"]
    assert "4/4" in shown[-1] and "0.4000" in shown[-1]


def test_silence_is_bridged_with_what_the_run_is_doing(tmp_path, capsys):
    child, metrics, log = start(tmp_path, "import time; print('loading weights', flush=True); time.sleep(1.5)")
    watch(child, metrics, log, timeout_s=60, heartbeat_s=0.3)
    assert "starting up; log: loading weights" in capsys.readouterr().out


def test_a_failed_run_names_its_error_its_status_and_its_log(tmp_path):
    child, metrics, log = start(tmp_path, "print('before')\nraise ValueError('window=1: expected 2 or more')")
    with pytest.raises(RunFailed) as failure:
        watch(child, metrics, log, timeout_s=60)
    assert failure.value.status == 1
    for part in ("exit status 1", "before", "the error: ValueError: window=1: expected 2 or more", str(log)):
        assert part in str(failure.value)


def test_a_run_that_dies_of_a_signal_says_which(tmp_path):
    child, metrics, log = start(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(RunFailed, match="SIGKILL") as failure:
        watch(child, metrics, log, timeout_s=60)
    assert failure.value.status == 128 + signal.SIGKILL


def test_a_run_past_its_time_is_ended(tmp_path):
    child, metrics, log = start(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(RunFailed, match="OPPO_DEMO_TIMEOUT_S") as failure:
        watch(child, metrics, log, timeout_s=0.5)
    assert failure.value.status == 124
    assert child.poll() is not None


def test_ending_a_run_leaves_nothing_alive_that_it_started(tmp_path):
    child, _, log = start(tmp_path, STUBBORN)
    wait_for(lambda: "ready" in log.read_text())
    # Other tests of this session may have left children of their own, such as a resource tracker.
    [process] = [each for each in psutil.Process().children() if "ready" in " ".join(each.cmdline())]
    family = [process, *process.children()]
    assert len(family) == 2
    assert child.end(grace_s=0.5) == -signal.SIGKILL
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family)


def test_ending_a_run_that_has_ended_changes_nothing(tmp_path):
    child, _, _ = start(tmp_path, "raise SystemExit(3)")
    wait_for(lambda: child.poll() is not None)
    assert child.end() == 3


def demo_with(child_code: str) -> list[str]:
    """The command line of the demo with ``child_code`` in place of the training run and no assets made."""
    driver = f"""
        import sys
        from verl_oppo.demo import run
        run.make_assets = lambda timeout_s: None
        run.train_command = lambda run_dir, overrides: [sys.executable, "-c", {textwrap.dedent(child_code)!r}]
        sys.exit(run.main([]))
    """
    return [sys.executable, "-c", textwrap.dedent(driver)]


def test_the_last_line_is_one_json_object_and_its_files_exist(tmp_path):
    environment = {**os.environ, "OPPO_RUN_DIR": str(tmp_path / "run")}
    done = subprocess.run(demo_with(WRITE_STEPS), env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["deferred"], summary["step_s_median"]) == (4, 4, 1.5)
    assert (summary["first_reward"], summary["last_reward"]) == (0.15, 0.35)
    assert Path(summary["metrics_file"]).is_file()
    assert Path(summary["plot"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_the_demo(tmp_path, signum):
    code = """
        import os, pathlib, time
        pathlib.Path(os.environ["OPPO_RUN_DIR"], "pid").write_text(str(os.getpid()))
        time.sleep(600)
    """
    environment = {**os.environ, "OPPO_RUN_DIR": str(tmp_path / "run")}
    demo = subprocess.Popen(
        demo_with(code),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid_file = tmp_path / "run" / "pid"
    pid = int(wait_for(lambda: pid_file.exists() and pid_file.read_text()))
    demo.send_signal(signum)
    _, stderr = demo.communicate(timeout=90)
    assert demo.returncode == 128 + signum
    assert f"stopped by {signum.name}" in stderr
    assert not psutil.pid_exists(pid)


def test_help_says_how_to_pass_overrides_and_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPPO_RUN_DIR", str(tmp_path / "run"))
    assert main(["trainer.total_training_steps=1", "--help"]) == 0
    assert "bash scripts/demo.sh [Hydra overrides]" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_run_directory_with_the_metrics_of_another_run_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="OPPO_RUN_DIR"):
        new_run_dir({"OPPO_RUN_DIR": str(tmp_path)})


def test_overrides_come_last_and_unchanged(tmp_path):
    overrides = ["trainer.v1.trainer_mode=sync", "+data.note='a b'"]
    command = train_command(tmp_path, overrides)
    assert command[-2:] == overrides
    assert command[command.index("--config-name") + 1] == "oppo_cpu"


def test_hydra_reads_the_runners_own_overrides_back(tmp_path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    odd = tmp_path / "it's a = {dir}, with: signs"
    command = train_command(odd, [])
    own = [argument for argument in command if "=" in argument]
    values = {override.key_or_group: override.value() for override in OverridesParser.create().parse_overrides(own)}
    assert values["trainer.default_local_dir"] == str(odd / "checkpoints")
    assert values["trainer.logger"] == ["console", "file"]


def test_the_follower_is_patient_with_a_file_that_does_not_exist_yet(tmp_path):
    follower = MetricsFollower(tmp_path / "metrics.jsonl")
    assert follower.new_records() == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 1.0}}\n')
    assert [record.step for record in follower.new_records()] == [1]
    assert follower.new_records() == []


def test_a_plot_needs_a_step(tmp_path):
    assert save_plot([], tmp_path / "plot.png") is None
    assert save_plot([StepRecord(1, None, 2.0)], tmp_path / "plot.png").exists()
