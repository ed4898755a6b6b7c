"""Deferral does not starve long responses: simulated runs with a long tail, and the same checks on bad samplers."""

import itertools
import random
from dataclasses import replace
from statistics import median

import pytest

from verl_oppo.control.admission import AdmissionController
from verl_oppo.control.fairness import (
    DecileAge,
    Journey,
    age_by_length_decile,
    format_deciles,
    lengths_by_window,
    max_age,
)

BATCH_SIZE = 32
MAX_DEFERRALS = 4
NUM_STEPS = 204
WINDOW = 20
RATIO_BOUNDS = (0.88, 1.12)


class IgnoresTheBound(AdmissionController):
    """Trains whatever finishes first, what was never deferred before the rest, and never waits for a straggler."""

    def _preference(self, prompt):
        return (prompt.deferrals, prompt.completed, prompt.index)

    def _keeps_bound(self, chosen):
        return True


class LeavesTheDeferred(IgnoresTheBound):
    """Does not take a deferred prompt while a batch can be had without it."""

    def _choose(self, sampleable):
        fresh = [uid for uid in self.outstanding() if not self.deferrals(uid)]
        if len(fresh) >= BATCH_SIZE:
            sampleable = [uid for uid in sampleable if uid in fresh]
        return super()._choose(sampleable)


def simulate(
    admission: AdmissionController, *, delta: int, slots: int, seed: int, group_size: int = 1
) -> list[Journey]:
    """The journeys of a run in which every running prompt decodes one token per unit of time and keeps its tokens.

    Lengths are log-normal: one in a hundred is 10 times the median. A group is as long as its longest response. At most
    ``slots`` prompts run at once, in order of admission; the rest have no token yet. A step trains as soon as the
    controller says that it is ready.
    """
    rng = random.Random(seed)
    names = itertools.count()
    journeys: dict[str, Journey] = {}
    remaining: dict[str, int] = {}
    done: set[str] = set()
    for step in range(1, NUM_STEPS + 1):
        new = [str(next(names)) for _ in range(admission.num_to_admit(delta=delta, steps_left=NUM_STEPS - step + 1))]
        admission.admit(new, step=step)
        for uid in new:
            responses = [max(1, min(8000, round(rng.lognormvariate(5, 1.0)))) for _ in range(group_size)]
            remaining[uid] = length = max(responses)
            journeys[uid] = Journey(uid, length, submitted_step=step)
        while not admission.ready(done):
            running = list(remaining)[:slots]
            for uid in running:
                if journeys[uid].first_token_step is None:
                    journeys[uid] = replace(journeys[uid], first_token_step=step)
                    admission.start(uid)
            elapsed = min(remaining[uid] for uid in running)
            for uid in running:
                remaining[uid] -= elapsed
                if not remaining[uid]:
                    del remaining[uid]
                    done.add(uid)
                    admission.complete(uid)
        for uid in admission.select(done, step=step):
            done.remove(uid)
            journeys[uid] = replace(journeys[uid], trained_step=step)
    return list(journeys.values())


def unfairness(journeys: list[Journey]) -> list[str]:
    """What speaks for starvation, in words; empty if nothing does. The draining at the end is left out."""
    last_step = NUM_STEPS - MAX_DEFERRALS
    findings = [
        f"steps {w.first_step}-{w.last_step}: trained length is {w.ratio:.2f} of the submitted"
        for w in lengths_by_window(journeys, first_step=1, last_step=last_step, window=WINDOW)
        if not RATIO_BOUNDS[0] <= w.ratio <= RATIO_BOUNDS[1]
    ]
    if (oldest := max_age(journeys, last_step=NUM_STEPS)) > MAX_DEFERRALS:
        findings.append(f"age {oldest}: a prompt needs more than {MAX_DEFERRALS + 1} steps from its first token")
    return findings


def run(
    sampler: type[AdmissionController], *, delta: int, slots: int = 1000, seed: int = 0, group_size: int = 1
) -> list[Journey]:
    admission = sampler(batch_size=BATCH_SIZE, max_deferrals=MAX_DEFERRALS)
    return simulate(admission, delta=delta, slots=slots, seed=seed, group_size=group_size)


@pytest.mark.parametrize("delta", [8, 32, BATCH_SIZE * MAX_DEFERRALS])
@pytest.mark.parametrize("slots", [40, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_long_responses_are_trained_as_often_as_they_are_submitted_and_in_time(delta, slots, seed):
    journeys = run(AdmissionController, delta=delta, slots=slots, seed=seed)
    assert max(j.length for j in journeys[:BATCH_SIZE]) > 3 * median(j.length for j in journeys[:BATCH_SIZE])
    assert not unfairness(journeys), format_deciles(age_by_length_decile(journeys))
    assert len(journeys) == NUM_STEPS * BATCH_SIZE and all(j.trained_step for j in journeys)


@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("delta", [8, 32])
def test_groups_with_a_long_member_are_trained_as_often_as_they_are_submitted_and_in_time(delta, group_size):
    journeys = run(AdmissionController, delta=delta, group_size=group_size)
    assert not unfairness(journeys), format_deciles(age_by_length_decile(journeys))
    assert len(journeys) == NUM_STEPS * BATCH_SIZE and all(j.trained_step for j in journeys)
    assert median(j.length for j in journeys) > 1.5 * median(j.length for j in run(AdmissionController, delta=delta))
    first = [j.length for j in journeys if j.trained_step == 1]
    assert sum(first) / len(first) < 0.95 * sum(j.length for j in journeys) / len(journeys), "the bias of a first step"


def test_the_checks_fail_on_a_sampler_that_ignores_the_bound():
    journeys = run(IgnoresTheBound, delta=BATCH_SIZE * MAX_DEFERRALS)
    findings = unfairness(journeys)
    assert any("trained length" in finding for finding in findings) and "age" in findings[-1]


def test_the_checks_fail_on_a_sampler_that_leaves_the_deferred():
    """Once its buffer is full of prompts that are never taken, lengths agree again; the age still tells."""
    findings = unfairness(run(LeavesTheDeferred, delta=32))
    assert findings == [f"age {NUM_STEPS - 1}: a prompt needs more than {MAX_DEFERRALS + 1} steps from its first token"]


def test_age_by_length_decile_is_reported():
    journeys = run(AdmissionController, delta=32)
    deciles = age_by_length_decile(journeys)
    assert sum(d.num for d in deciles) == len(journeys)
    assert all(d.age_max <= MAX_DEFERRALS for d in deciles)
    assert deciles[0].age_mean < deciles[-1].age_mean, "long responses are older, and that is bounded"
    assert len(format_deciles(deciles).splitlines()) == 11


def test_measures_on_a_run_small_enough_to_check_by_hand():
    journeys = [
        Journey("a", length=10, submitted_step=1, first_token_step=1, trained_step=1),
        Journey("b", length=30, submitted_step=1, first_token_step=1, trained_step=3),
        Journey("c", length=20, submitted_step=2, first_token_step=2, trained_step=2),
        Journey("d", length=40, submitted_step=3, first_token_step=4, trained_step=4),
        Journey("e", length=60, submitted_step=4, first_token_step=4),
    ]
    windows = lengths_by_window(journeys, first_step=1, last_step=5, window=2)
    assert [(w.first_step, w.last_step, w.submitted_mean, w.trained_mean) for w in windows] == [
        (1, 2, 20.0, 15.0),
        (3, 4, 50.0, 35.0),
    ]
    assert windows[0].ratio == 0.75
    assert age_by_length_decile(journeys)[-1] == DecileAge(9, 40, 40, 1, 0.0, 0)
    assert [d.age_max for d in age_by_length_decile(journeys)] == [0, 0, 2, 0]
    assert (max_age(journeys, last_step=5), max_age(journeys, last_step=9)) == (2, 5)
    for arguments in ({"last_step": 1, "window": 2}, {"last_step": 5, "window": 0}):
        with pytest.raises(ValueError, match="window is .; allowed: 1 to"):
            lengths_by_window(journeys, first_step=1, **arguments)
    with pytest.raises(ValueError, match="steps 5 to 5: 0 prompts submitted and 0 trained"):
        lengths_by_window(journeys, first_step=5, last_step=5, window=1)
