"""Trains the embedded default with OPPO and shows how it goes: the main job behind scripts/demo.sh.

    bash scripts/demo.sh [Hydra overrides]
    bash scripts/demo.sh trainer.total_training_steps=20 trainer.v1.oppo.inter_step.delta_init=2
    bash scripts/demo.sh trainer.v1.trainer_mode=sync trainer.total_training_steps=5

Makes a tiny actor, critic, tokenizer and data set on first use, then trains with verl's own PPO loop on this machine
(python -m verl_oppo.main_ppo --config-name oppo_cpu, every override passed on). Prints a line per step: mean reward,
the overcommit degree delta, the prompts deferred to a later step, the seconds of the step. Ends with a summary in words
and, as its last line, a JSON object with the figures. The run directory holds the log (train.log), verl's metrics
(metrics.jsonl), time spans for the report (spans.jsonl), a plot of reward and step time (plot.png), and checkpoints
where the run saves some.

Environment:
    OPPO_RUN_DIR         run directory, without an earlier run's metrics (default: runs/demo-<time> in the checkout)
    OPPO_DEMO_TIMEOUT_S  ends the run with an error after so many seconds (default: 1800)

Exit status: that of the training run; 124 past the timeout; 130 after Ctrl-C.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from verl_oppo import trace_file
from verl_oppo.demo.child import ChildRun
from verl_oppo.demo.child_log import clean_line, errors, last_words, total_steps
from verl_oppo.demo.summary import (
    StepRecord,
    is_emulated,
    progress_line,
    reward_change,
    split_records,
    step_record,
    summarize,
    summary_words,
)

POLL_S = 0.5
HEARTBEAT_S = 20.0
SHOWN_LOG_LINES = 25


class RunFailed(Exception):
    """The run did not end well; ``status`` is the exit status to end with, the message says why."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def main(argv: Sequence[str]) -> int:
    if any(argument in ("-h", "--help") for argument in argv):
        print(__doc__.strip())
        return 0
    timeout_s = _timeout_s(os.environ)
    run_dir = new_run_dir(os.environ)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _interrupt)
    started = time.monotonic()
    try:
        make_assets(timeout_s)
        metrics_file, log = run_dir / "metrics.jsonl", run_dir / "train.log"
        say(f"run directory {run_dir}; log: {log.name}")
        say("starting verl (Ray, vLLM, actor, critic, reference): start-up takes about two minutes on 2 cores")
        wanted = {"VERL_FILE_LOGGER_PATH": str(metrics_file), trace_file.VARIABLE: str(run_dir)}
        child = ChildRun(train_command(run_dir, argv), log, {**os.environ, **wanted})
        records = watch(child, metrics_file, log, timeout_s)
    except RunFailed as failure:
        say(f"FAILED: {failure}", file=sys.stderr)
        return failure.status
    plot = save_plot(records, run_dir / "plot.png")
    summary = summarize(records, str(metrics_file) if metrics_file.exists() else None, plot and str(plot))
    print()
    for sentence in summary_words(summary, time.monotonic() - started):
        print(sentence)
    print(f"Metrics: {summary['metrics_file']}; plot: {summary['plot']}; log: {log}")
    print(json.dumps(summary, allow_nan=False), flush=True)
    return 0


def say(message: str, file: Any = None) -> None:
    print(f"[demo] {message}", file=file or sys.stdout, flush=True)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise RunFailed(128 + signum, f"stopped by {signal.Signals(signum).name}")


def _timeout_s(env: Mapping[str, str]) -> float:
    value = env.get("OPPO_DEMO_TIMEOUT_S", "1800")
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"OPPO_DEMO_TIMEOUT_S={value!r}: expected a number of seconds above 0")
    return seconds


def new_run_dir(env: Mapping[str, str]) -> Path:
    """Makes the run directory.

    Raises:
        ValueError: OPPO_RUN_DIR names a directory that holds the metrics of an earlier run.
    """
    if named := env.get("OPPO_RUN_DIR"):
        run_dir = Path(named).expanduser().absolute()
        if (run_dir / "metrics.jsonl").exists():
            raise ValueError(
                f"OPPO_RUN_DIR={named!r} holds the metrics of an earlier run: name a new or empty directory"
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        return run_dir
    checkout = Path(__file__).resolve().parents[2]
    base = checkout if (checkout / "pyproject.toml").exists() else Path.cwd()
    stem = base / "runs" / time.strftime("demo-%Y%m%d-%H%M%S")
    for attempt in range(100):
        run_dir = stem if attempt == 0 else stem.with_name(f"{stem.name}-{attempt}")
        try:
            run_dir.mkdir(parents=True)
            return run_dir
        except FileExistsError:
            continue
    raise ValueError(f"{stem} and 99 names after it exist: set OPPO_RUN_DIR")


def make_assets(timeout_s: float) -> None:
    """Makes the toy assets in a process of its own, since it needs torch and this one then waits for minutes.

    Raises:
        RunFailed: it failed, or took longer than ``timeout_s``.
    """
    started = time.monotonic()
    say("toy actor, critic, tokenizer and data set: made on first use, which takes about a minute")
    command = [sys.executable, "-m", "verl_oppo.demo.assets"]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(124, f"the toy assets took longer than {timeout_s:.0f} s (OPPO_DEMO_TIMEOUT_S)") from error
    if made.returncode != 0:
        raise RunFailed(1, f"the toy assets could not be made ({' '.join(command)}):\n{made.stderr[-2000:]}")
    say(f"assets in {json.loads(made.stdout)['root']} ({time.monotonic() - started:.0f} s)")


def train_command(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """The training command. The user's overrides come last, so they win over the run directory's.

    A Ray cluster of its own, whatever RAY_ADDRESS says: the demo's logical GPUs (oppo_cpu.yaml) exist in no other. And
    a fresh folder for checkpoints, or a second demo would resume the first (trainer.resume_mode is auto).
    """
    own = [
        'trainer.logger=["console","file"]',
        f"trainer.default_local_dir={_hydra_string(run_dir / 'checkpoints')}",
        f"hydra.run.dir={_hydra_string(run_dir / 'hydra')}",
        "++ray_kwargs.ray_init.address=local",
    ]
    return [sys.executable, "-u", "-m", "verl_oppo.main_ppo", "--config-name", "oppo_cpu", *own, *overrides]


def _hydra_string(path: Path) -> str:
    """The path as a quoted string of Hydra's override grammar."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def watch(
    child: ChildRun, metrics_file: Path, log: Path, timeout_s: float, heartbeat_s: float = HEARTBEAT_S
) -> list[StepRecord]:
    """Prints a line per step until the child ends, and ends it with all it started, whatever happens.

    Raises:
        RunFailed: the child failed, ran past ``timeout_s``, or a signal stopped this process.
    """
    started = time.monotonic()
    follower = MetricsFollower(metrics_file)
    heartbeat = started + heartbeat_s
    try:
        while True:
            status = child.poll()
            now = time.monotonic()
            for record in follower.new_records():
                print(progress_line(record, announced_steps(log)), flush=True)
                heartbeat = now + heartbeat_s
            if status is not None:
                break
            if now - started > timeout_s:
                raise RunFailed(124, f"not done after {timeout_s:.0f} s (OPPO_DEMO_TIMEOUT_S)\n{log_report(log)}")
            if now > heartbeat:
                heartbeat = now + heartbeat_s
                doing = "in a step" if follower.records else "starting up"
                say(f"{now - started:4.0f} s, {doing}; log: {last_words(tail(log))}")
            time.sleep(POLL_S)
    except RunFailed as failure:
        say(f"{str(failure).splitlines()[0]}: ending the run and what it started, up to a minute")
        raise
    finally:
        _without_interrupts(child.end)
    if status != 0:
        how = f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
        raise RunFailed(status if status > 0 else 128 - status, f"training ended with {how}\n{log_report(log)}")
    return follower.records


def _without_interrupts(call: Callable[[], Any]) -> None:
    """A second Ctrl-C must not leave half of the processes alive; the call is bounded."""
    handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        call()
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


class MetricsFollower:
    """Reads a metrics file that grows. Invariant: each complete line is parsed once, in order."""

    def __init__(self, path: Path):
        self.records: list[StepRecord] = []
        self._path = path
        self._offset = 0
        self._pending = b""

    def new_records(self) -> list[StepRecord]:
        """The steps finished since the last call; empty while the file does not exist."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        parsed, self._pending = split_records(self._pending + new)
        records = [record for record in map(step_record, parsed) if record is not None]
        self.records += records
        return records


def tail(log: Path, size: int = 64 * 1024) -> list[str]:
    """The lines in the last ``size`` bytes of the log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        return file.read().decode(errors="replace").splitlines()


def announced_steps(log: Path) -> int | None:
    return total_steps("\n".join(tail(log)))


def log_report(log: Path) -> str:
    """The end of the log and the errors in it, for a person."""
    lines = log.read_text(errors="replace").splitlines()
    shown = [f"    {clean_line(line)[:300]}" for line in lines[-SHOWN_LOG_LINES:]]
    report = [f"the last lines of {log}:", *shown]
    match errors(lines):
        case [only]:
            report.append(f"the error: {only}")
        case [first, last]:
            report += [f"the first error: {first}", f"the last error:  {last}"]
    return "\n".join([*report, f"the whole log: {log}"])


def save_plot(records: Sequence[StepRecord], path: Path) -> Path | None:
    """Reward and step time by step as a PNG; None without steps or without matplotlib (extra ``plot``)."""
    if not records:
        return None
    try:
        import matplotlib
    except ImportError:
        say("no plot: matplotlib is not installed (pip install 'verl-oppo[plot]')")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [record.step for record in records]
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    top.plot(steps, [_or_gap(record.reward) for record in records], marker=".", label="mean reward")
    first, last, _ = reward_change([record.reward for record in records if record.reward is not None])
    if first is not None:
        top.axhline(first, linestyle=":", color="gray", label="first steps")
        top.axhline(last, linestyle="--", color="gray", label="last steps")
    top.set_ylabel("mean reward")
    if is_emulated(records):
        top.set_title("step times of EMULATED accelerators (emulate=on)")
    top.legend()
    bottom.plot(steps, [_or_gap(record.seconds) for record in records], marker=".", color="tab:orange")
    if any(record.deferred is not None for record in records):
        counts = bottom.twinx()
        counts.bar(steps, [_or_gap(record.deferred) for record in records], alpha=0.3)
        counts.set_ylabel("deferred prompts")
    bottom.set_ylabel("step time (s)")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _or_gap(value: float | None) -> float:
    return float("nan") if value is None else value


if __name__ == "__main__":
    try:
        exit_status = main(sys.argv[1:])
    except ValueError as error:
        say(f"FAILED: {error}", file=sys.stderr)
        exit_status = 2
    sys.exit(exit_status)
