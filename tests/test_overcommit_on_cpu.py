"""The rules that move delta: on flat and rising rewards, from 0, with bad input, across a resume."""

import json
import math
import random
from statistics import mean

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_oppo.control.overcommit import RULES, OvercommitController, fit_line, two_point_slope

DELTA_MAX = 16


def make(rule: str = "least_squares", *, delta_init: int = 4, window: int = 8, **bounds: int) -> OvercommitController:
    values = {"delta_min": 0, "delta_max": DELTA_MAX, "delta_inc": 1, "delta_dec": 1, **bounds}
    return OvercommitController(rule=rule, delta_init=delta_init, window=window, **values)


def run_on_synthetic_rewards(
    controller: OvercommitController,
    *,
    correlation: float,
    rise_per_step: float = 0.0,
    num_steps: int,
    seed: int,
    batch_size: int = 32,
) -> list[int]:
    """Delta after each step of a run in which selection by length biases the reward that is observed.

    Every prompt has a log-normal length and a reward: a trend, plus unit noise of which ``correlation`` is shared with
    the logarithm of the length. A step runs B + delta prompts, the B shortest remainders are trained and their mean
    reward is observed; the others keep what they have decoded.
    """
    rng = random.Random(seed)
    pool: list[list[float]] = []
    deltas = []
    for step in range(num_steps):
        while len(pool) < batch_size + controller.delta:
            z, noise = rng.gauss(0, 1), rng.gauss(0, 1)
            reward = rise_per_step * step + correlation * z + math.sqrt(1 - correlation**2) * noise
            pool.append([math.exp(z), reward])
        pool.sort()
        trained, pool = pool[:batch_size], pool[batch_size:]
        elapsed = trained[-1][0]
        pool = [[remaining - elapsed, reward] for remaining, reward in pool]
        deltas.append(controller.observe(mean(reward for _, reward in trained)))
    return deltas


def share_near_minimum(rule: str, *, correlation: float, batch_size: int) -> float:
    """Share of the second half of 8 runs of 400 steps in which delta is within 1 of its minimum."""
    near = []
    for seed in range(8):
        deltas = run_on_synthetic_rewards(
            make(rule), correlation=correlation, num_steps=400, seed=seed, batch_size=batch_size
        )
        near += [delta <= 1 for delta in deltas[200:]]
    return mean(near)


@pytest.mark.parametrize("batch_size", [8, 32])
@pytest.mark.parametrize("correlation", [-0.6, 0.0, 0.6])
def test_the_default_stays_near_the_minimum_on_a_flat_noisy_reward(correlation, batch_size):
    assert share_near_minimum("least_squares", correlation=correlation, batch_size=batch_size) >= 0.8


@pytest.mark.parametrize("rule", ["paper", "proportional"])
def test_the_rules_of_the_paper_wander_on_a_flat_noisy_reward(rule):
    """Why they are not the default; and that the test above can fail."""
    assert share_near_minimum(rule, correlation=0.0, batch_size=32) < 0.4


@pytest.mark.parametrize("rule", ["least_squares", "paper", "proportional"])
@pytest.mark.parametrize("correlation", [-0.6, 0.0, 0.6])
@pytest.mark.parametrize("seed", range(5))
def test_a_rising_reward_takes_delta_from_0_to_its_maximum(rule, correlation, seed):
    controller = make(rule, delta_init=0)
    deltas = run_on_synthetic_rewards(controller, correlation=correlation, rise_per_step=0.1, num_steps=100, seed=seed)
    assert max(deltas) == DELTA_MAX


@pytest.mark.parametrize("rule", ["least_squares", "paper", "proportional"])
def test_delta_leaves_0_when_a_rise_starts_after_a_plateau(rule):
    controller = make(rule)
    for _ in range(40):
        controller.observe(1.0)
    assert controller.delta == 0
    deltas = [controller.observe(1.0 + 0.05 * i) for i in range(1, 41)]
    assert deltas[7] > 0 and deltas[-1] == DELTA_MAX


@pytest.mark.parametrize("rule", ["least_squares", "paper", "proportional"])
def test_a_falling_reward_takes_delta_to_its_minimum(rule):
    controller = make(rule, delta_init=10, delta_min=3)
    for i in range(40):
        controller.observe(-0.05 * i)
    assert controller.delta == 3


def test_constant_never_moves_but_reports_the_slope():
    controller = make("constant", delta_init=5)
    assert [controller.observe(0.5 * i) for i in range(20)] == [5] * 20
    assert controller.slope == pytest.approx(0.5)


@pytest.mark.parametrize(("rule", "needed"), [("least_squares", 4), ("paper", 5), ("proportional", 5)])
def test_delta_holds_until_the_window_is_full(rule, needed):
    controller = make(rule, window=4)
    for i in range(needed - 1):
        assert controller.observe(float(i)) == 4 and controller.slope is None
    assert controller.observe(float(needed)) == 5


def test_frozen_and_missing_rewards_are_not_recorded():
    controller = make(window=3)
    for i in range(20):
        assert controller.observe(float(i), frozen=True) == 4
        assert controller.observe(None) == 4
    assert controller.slope is None
    for reward in (5.0, 6.0, 7.0):
        controller.observe(reward)
    assert controller.slope == pytest.approx(1.0) and controller.delta == 5


def test_step_sizes():
    controller = make(delta_inc=3, delta_dec=2, window=3)
    for reward in (0.0, 1.0, 2.0):
        controller.observe(reward)
    assert controller.delta == 7
    for reward in (1.0, 0.0):
        controller.observe(reward)
    assert controller.delta == 3


def test_proportional_steps_by_a_quarter_and_at_least_by_1():
    controller = make("proportional", delta_init=0, delta_max=40, window=2)
    deltas = [controller.observe(float(i)) for i in range(18)]
    assert deltas == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 33, 40]
    assert controller.observe(0.0) == 30


def test_the_dead_band_shrinks():
    """A slope above 0 but within its standard error is no rise for the default; the paper's rule grows on it."""
    rewards = [0.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 0.01]
    slope, standard_error = fit_line(rewards[1:])
    assert two_point_slope(rewards) > 0
    assert -standard_error < slope < standard_error
    default, paper = make(), make("paper")
    for reward in rewards:
        default.observe(reward)
        paper.observe(reward)
    assert (default.delta, paper.delta) == (2, 5)


def test_fit_line_against_the_normal_equations():
    rewards = [0.3, -0.1, 0.7, 0.2, 1.1]
    slope, standard_error = fit_line(rewards)
    assert slope == pytest.approx(0.19)
    intercept = mean(rewards) - slope * 2
    sse = sum((reward - intercept - slope * i) ** 2 for i, reward in enumerate(rewards))
    assert standard_error == pytest.approx(math.sqrt(sse / 3 / 10))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reward=st.floats(-1e6, 1e6), window=st.integers(3, 40))
def test_equal_rewards_have_no_slope(reward, window):
    assert fit_line([reward] * window) == (0.0, 0.0)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rule=st.sampled_from(sorted(RULES)),
    bounds=st.lists(st.integers(0, 30), min_size=3, max_size=3).map(sorted),
    steps=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    window=st.integers(3, 10),
    rewards=st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=60),
)
def test_delta_is_always_within_its_bounds(rule, bounds, steps, window, rewards):
    low, init, high = bounds
    controller = OvercommitController(rule, init, low, high, *steps, window)
    for reward in rewards:
        assert low <= controller.observe(reward) <= high


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rule=st.sampled_from(["least_squares", "paper", "proportional"]),
    plateau=st.lists(st.floats(-1, 1), min_size=0, max_size=40),
    window=st.integers(3, 10),
)
def test_delta_leaves_0_within_a_window_of_a_steady_rise(rule, plateau, window):
    controller = make(rule, delta_init=0, window=window)
    for reward in plateau:
        controller.observe(reward)
    assert max(controller.observe(2.0 + i) for i in range(window + 1)) > 0


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_reward_that_is_not_finite_is_refused(reward, frozen):
    with pytest.raises(ValueError, match=f"reward is {reward}"):
        make().observe(reward, frozen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "greedy"}, "rule is 'greedy'; allowed: least_squares, paper, proportional, constant"),
        ({"delta_min": -1}, "delta_min=-1"),
        ({"delta_min": 9, "delta_max": 8}, "delta_min=9.*delta_max=8"),
        ({"delta_init": 17}, "delta_init=17"),
        ({"delta_inc": 0}, "delta_inc=0"),
        ({"delta_dec": 0}, "delta_dec=0"),
        ({"window": 2}, "window is 2; rule least_squares needs 3"),
        ({"rule": "paper", "window": 1}, "window is 1; rule paper needs 2"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make(**{"rule": "least_squares", **change})


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_resume_continues_as_if_nothing_had_happened(rule):
    rng = random.Random(0)
    rewards = [0.02 * i + rng.gauss(0, 0.1) for i in range(60)]
    straight, first = make(rule), make(rule)
    deltas = [straight.observe(reward) for reward in rewards]
    resumed_deltas = [first.observe(reward) for reward in rewards[:20]]
    second = make(rule, delta_init=0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (second.delta, second.slope) == (first.delta, first.slope)
    assert resumed_deltas + [second.observe(reward) for reward in rewards[20:]] == deltas


def test_a_resume_under_other_settings_clamps_delta_and_drops_the_slope_of_another_rule():
    saved = make("paper", delta_init=16, window=3)
    for i in range(6):
        saved.observe(float(i))
    restored = make("least_squares", delta_init=0, delta_max=5)
    restored.load_state_dict(saved.state_dict())
    assert restored.delta == 5 and restored.slope is None
