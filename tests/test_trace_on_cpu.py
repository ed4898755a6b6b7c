"""What trainer and samplers note beside the metrics: only where asked, one line a fact."""

import json

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl_oppo.benchmark.samplers import FastPollReplayBuffer, FastPollReplayBufferAsync
from verl_oppo.metrics import TrainedRow
from verl_oppo.stream.consumer import ConsumerStats
from verl_oppo.trace_file import VARIABLE, trace_file
from verl_oppo.trainer.trace import TrainerTrace, trajectory_record

ROW = TrainedRow(
    versions=[[3, 2], [-1, 1], [5, 2]],
    mask=np.array([True, True, False, True, True]),
    is_ratio=np.array([1.0, 2.5, 9.0, 1.0, 3.0]),
)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_trajectory_that_began_two_steps_before():
    record = trajectory_record(step=6, key="u_0_0", submitted_step=4, row=ROW, is_threshold=2.0)
    # Step 6 samples with version 5; the tool's token belongs to no version, and the mask takes it out of the loss.
    assert record == {
        "step": 6,
        "key": "u_0_0",
        "submitted_step": 4,
        "first_token_step": 4,
        "length": 5,
        "stale": 2,
        "clipped": 2,
    }
    assert trajectory_record(6, "u_0_0", 4, ROW, None)["clipped"] is None


def test_nothing_is_written_where_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    trace = TrainerTrace(is_threshold=2.0)
    trace.sample_begins()
    trace.sample_ends()
    trace.step_ends(1, {"reward": ConsumerStats()})
    trace.trained(1, ["u_0_0"], [{"global_steps": 1}], [ROW])
    assert list(tmp_path.iterdir()) == [] and trace_file("spans.jsonl") is None


def test_a_step_and_its_trajectories_are_noted(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))
    trace = TrainerTrace(is_threshold=2.0)
    for step in (6, 7):
        trace.sample_begins()
        trace.sample_ends()
        trace.trained(step, ["u_0_0"], [{"global_steps": 4}], [ROW])
        trace.step_ends(step, {"reward": ConsumerStats(spans=[("prefill", 1.0, 2.0)])})
    spans = lines(tmp_path / "run" / "spans.jsonl")
    assert [line["step"] for line in spans] == [6, 7]
    assert all(len(line["sample"]) == 2 and line["sample"][0] <= line["sample"][1] for line in spans)
    assert spans[0]["scorers"] == {"reward": [["prefill", 1.0, 2.0]]}
    assert [line["step"] for line in lines(tmp_path / "run" / "trajectories.jsonl")] == [6, 7]


@pytest.mark.parametrize(
    ("sampler", "mode"), [(FastPollReplayBuffer, "sync"), (FastPollReplayBufferAsync, "colocate_async")]
)
def test_verls_replay_buffer_takes_the_poll_interval_from_the_config(sampler, mode):
    # The arguments that verl hands a custom sampler (trainer_base.py, _build_replay_buffer).
    buffer = sampler(
        trainer_mode=mode,
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({"poll_interval": 0.05}),
        refill_fn=lambda num: num,
    )
    assert buffer.poll_interval == 0.05
    with pytest.raises(ValueError, match="poll_interval"):
        sampler(
            trainer_mode=mode,
            trainer_config=OmegaConf.create({}),
            max_off_policy_threshold=8,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.create({}),
            refill_fn=lambda num: num,
        )
