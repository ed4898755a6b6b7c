"""The chunk-size tuner: exploration, choice by median, busy steps, drift, resume; and its fixed twin."""

import json
import math
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_oppo.control.chunk_size import (
    TRACE_LENGTH,
    ChunkSizeTuner,
    Exploration,
    FixedChunkSize,
    Trial,
    make_chunk_size_policy,
)

CANDIDATES = [128, 256, 512, None]
COST = {128: 4.0, 256: 2.0, 512: 3.0, None: 5.0}


def run(tuner, steps, *, cost=COST.get, busy=()):
    """Runs steps through the tuner; the sizes used."""
    sizes = []
    for step in steps:
        size = tuner.size(step, busy=step in busy)
        sizes.append(size)
        tuner.observe(step, cost(size))
    return sizes


def test_candidates_take_turns_and_the_best_one_runs_until_the_next_exploration():
    tuner = ChunkSizeTuner(CANDIDATES, explore_period=20, explore_steps=3)
    sizes = run(tuner, range(1, 53))
    exploration, exploitation = CANDIDATES * 3, [256] * 8
    assert sizes == (exploration + exploitation) * 2 + exploration
    assert [(e.first_step, e.last_step, e.best) for e in tuner.explorations()] == [
        (1, 12, 256),
        (21, 32, 256),
        (41, 52, 256),
    ]
    assert tuner.explorations()[0].medians == (4.0, 2.0, 3.0, 5.0)


def test_whole_response_wins_where_streaming_costs_more():
    tuner = ChunkSizeTuner(CANDIDATES, explore_period=20, explore_steps=2)
    run(tuner, range(8), cost={**COST, None: 1.0}.get)
    assert tuner.size(8) is None
    assert tuner.explorations()[0].best is None


def test_one_outlier_does_not_decide():
    tuner = ChunkSizeTuner([64, 128], explore_period=20, explore_steps=3)
    costs = iter([100.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    run(tuner, range(6), cost=lambda size: next(costs))
    assert tuner.size(6) == 64


def test_a_tie_keeps_the_size_in_use_and_else_takes_the_earlier_candidate():
    tuner = ChunkSizeTuner([64, 128, 256], explore_period=4, explore_steps=1)
    run(tuner, range(0, 4), cost={64: 2.0, 128: 1.0, 256: 1.0}.get)
    assert tuner.size(3) == 128
    run(tuner, range(4, 8), cost={64: 1.0, 128: 1.0, 256: 1.0}.get)
    assert tuner.size(7) == 128


def test_it_follows_a_change():
    tuner = ChunkSizeTuner(CANDIDATES, explore_period=20, explore_steps=1)
    run(tuner, range(20))
    assert tuner.size(19) == 256
    run(tuner, range(20, 30), cost={**COST, 512: 1.0}.get)
    assert tuner.size(29) == 512


def test_busy_steps_run_the_size_in_use_and_are_not_counted():
    tuner = ChunkSizeTuner(CANDIDATES, explore_period=30, explore_steps=2)
    busy = {1, 4, 5}
    sizes = run(tuner, range(1, 12), busy=busy, cost=lambda size: COST[size])
    assert sizes == [128, 128, 256, 128, 128, 512, None, 128, 256, 512, None]
    assert [trial.step for trial in tuner.trace() if not trial.exploring] == sorted(busy)
    assert tuner.explorations()[0].medians == (4.0, 2.0, 3.0, 5.0)


def test_a_step_that_was_not_measured_is_tried_again():
    tuner = ChunkSizeTuner([64, 128], explore_period=20, explore_steps=1)
    assert tuner.size(1) == 64
    tuner.observe(1, None)
    assert tuner.size(2) == 64
    tuner.observe(2, 1.0)
    assert tuner.size(3) == 128, "a step that is never observed is tried again too"
    assert tuner.size(4) == 128


def test_asking_again_for_the_same_step_changes_nothing():
    tuner = ChunkSizeTuner(CANDIDATES, explore_period=20, explore_steps=1)
    assert [tuner.size(1), tuner.size(1, busy=True), tuner.size(1)] == [128, 128, 128]
    tuner.observe(1, 1.0)
    assert tuner.size(2) == 256


def test_the_trace_tells_what_was_seen_and_is_bounded():
    tuner = ChunkSizeTuner([64, None], explore_period=5, explore_steps=1)
    run(tuner, range(3), cost={64: 1.0, None: 2.0}.get)
    assert tuner.trace() == [Trial(0, 64, 1.0, True), Trial(1, None, 2.0, True), Trial(2, 64, 1.0, False)]
    assert tuner.explorations() == [Exploration(0, 1, (64, None), (1.0, 2.0), 64)]
    run(tuner, range(3, TRACE_LENGTH + 10), cost={64: 1.0, None: 2.0}.get)
    assert len(tuner.trace()) == TRACE_LENGTH and tuner.trace()[-1].step == TRACE_LENGTH + 9


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    candidates=st.lists(st.one_of(st.none(), st.integers(1, 4096)), min_size=1, max_size=5, unique=True),
    explore_steps=st.integers(1, 3),
    slack=st.integers(1, 5),
    steps=st.lists(st.tuples(st.booleans(), st.one_of(st.none(), st.floats(0, 10))), max_size=80),
    resume_at=st.integers(0, 80),
)
def test_only_candidates_run_all_are_tried_equally_often_and_a_resume_changes_nothing(
    candidates, explore_steps, slack, steps, resume_at
):
    period = len(candidates) * explore_steps + slack
    straight = ChunkSizeTuner(candidates, period, explore_steps)
    resumed = ChunkSizeTuner(candidates, period, explore_steps)
    for step, (busy, cost) in enumerate(steps):
        if step == resume_at:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = ChunkSizeTuner(candidates, period, explore_steps)
            resumed.load_state_dict(state)
        size = straight.size(step, busy=busy)
        assert size in candidates and size == resumed.size(step, busy=busy)
        straight.observe(step, cost)
        resumed.observe(step, cost)
    assert resumed.trace() == straight.trace() and resumed.explorations() == straight.explorations()
    for exploration in straight.explorations():
        within = range(exploration.first_step, exploration.last_step + 1)
        tried = Counter(trial.size for trial in straight.trace() if trial.exploring and trial.step in within)
        assert tried == dict.fromkeys(candidates, explore_steps)
        assert exploration.medians[candidates.index(exploration.best)] == min(exploration.medians)


def test_a_resume_with_other_candidates_keeps_the_best_one_if_it_can_and_explores_at_once():
    saved = ChunkSizeTuner(CANDIDATES, explore_period=20, explore_steps=1)
    run(saved, range(10))
    kept = ChunkSizeTuner([64, 256], explore_period=20, explore_steps=1)
    kept.load_state_dict(saved.state_dict())
    assert kept.size(10, busy=True) == 256 and kept.size(11) == 64
    lost = ChunkSizeTuner([64, 96], explore_period=20, explore_steps=1)
    lost.load_state_dict(saved.state_dict())
    assert lost.size(10, busy=True) == 64
    assert lost.trace() == saved.trace()


def test_the_fixed_twin_never_changes_and_takes_over_the_trace():
    fixed = make_chunk_size_policy(96, CANDIDATES, 50, 3)
    assert isinstance(fixed, FixedChunkSize)
    assert run(fixed, range(4), cost=lambda size: 1.0) == [96] * 4
    fixed.observe(4, None)
    tuner = make_chunk_size_policy("auto", CANDIDATES, 50, 3)
    tuner.load_state_dict(json.loads(json.dumps(fixed.state_dict())))
    assert tuner.trace() == fixed.trace() == [Trial(step, 96, 1.0, False) for step in range(4)]
    assert fixed.explorations() == []
    run(tuner, range(12))
    fixed.load_state_dict(tuner.state_dict())
    assert fixed.trace() == tuner.trace() and fixed.size(12) == 96


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 50, 3), r"candidates are \[\]"),
        (([64, 64], 50, 3), r"candidates are \[64, 64\]"),
        (([64, 0], 50, 3), "chunk size is 0; allowed: 1 or more tokens"),
        (([True], 50, 3), "chunk size is True"),
        (([64], 50, 0), "explore_steps is 0"),
        (([64, 128], 6, 3), "explore_period is 6; allowed: 7 or more steps"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ChunkSizeTuner(*arguments)
    with pytest.raises(ValueError, match="chunk size is 'whole'"):
        make_chunk_size_policy("whole", CANDIDATES, 50, 3)


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("policy", [FixedChunkSize(64), ChunkSizeTuner([64], 5, 1)])
def test_a_cost_that_cannot_be_is_refused(policy, cost):
    policy.size(1)
    with pytest.raises(ValueError, match=f"cost_s_per_token is {cost}"):
        policy.observe(1, cost)


def test_a_step_that_was_not_asked_for_cannot_be_observed():
    tuner = ChunkSizeTuner([64, 128], 5, 1)
    with pytest.raises(ValueError, match="observe.. got step 1; allowed: .*None"):
        tuner.observe(1, 1.0)
    tuner.size(1)
    with pytest.raises(ValueError, match="observe.. got step 2; allowed: .*1"):
        tuner.observe(2, 1.0)
