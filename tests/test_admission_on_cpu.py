"""Admission: order of choice, deferral bound, late events, ledger, resume."""

import itertools
import json
import random
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_oppo.control.admission import AdmissionController, DeferredStats, Ledger


def controller(uids: str, *, batch_size: int = 2, max_deferrals: int = 2) -> AdmissionController:
    """A controller with one prompt for every letter, admitted at step 1."""
    admission = AdmissionController(batch_size=batch_size, max_deferrals=max_deferrals)
    admission.admit(list(uids), step=1)
    return admission


def through_json(admission: AdmissionController, *, batch_size: int, max_deferrals: int) -> AdmissionController:
    restored = AdmissionController(batch_size=batch_size, max_deferrals=max_deferrals)
    restored.load_state_dict(json.loads(json.dumps(admission.state_dict())))
    return restored


def test_the_first_to_complete_are_chosen_in_that_order():
    admission = controller("abcd")
    for uid in "dbc":
        admission.complete(uid)
    assert admission.select({"b", "c", "d"}, step=1) == ["d", "b"]
    assert admission.outstanding() == ["a", "c"]


def test_sampleable_prompts_never_announced_come_in_order_of_admission():
    admission = controller("abcd")
    assert not admission.ready({"c"})
    assert admission.select({"d", "b", "c"}, step=1) == ["c", "b"]


def test_completion_alone_makes_nothing_ready():
    admission = controller("abc")
    admission.complete("a")
    admission.complete("b")
    assert not admission.ready({"a"})
    with pytest.raises(ValueError, match="1 of 3 outstanding prompts are sampleable.*waiting for 2 prompts, first b"):
        admission.select({"a"}, step=1)
    assert admission.ledger() == Ledger(submitted=3, trained=0, evicted=0, outstanding=3)


def test_the_most_deferred_are_chosen_first_and_then_the_earliest_completed():
    admission = controller("abcdef", max_deferrals=3)
    admission.start("a")
    admission.select("bc", step=1)
    admission.admit(["g"], step=2)
    admission.start("d")
    admission.select("ef", step=2)
    assert [admission.deferrals(uid) for uid in "adg"] == [2, 1, 0]
    assert admission.total_deferred == 2
    for uid in "gda":
        admission.complete(uid)
    assert admission.select("gda", step=3) == ["a", "d"]


def test_a_prompt_at_the_bound_is_waited_for():
    admission = controller("abcd", max_deferrals=1)
    admission.start("a")
    admission.select("bc", step=1)
    admission.admit(["e"], step=2)
    assert not admission.ready("de")
    assert "first a (deferred 1x)" in admission.describe_wait("de")
    assert admission.ready("dea")
    assert admission.select("dea", step=2)[0] == "a"


def test_the_step_waits_before_more_prompts_are_due_at_once_than_a_batch_holds():
    admission = controller("abcdef", max_deferrals=2)
    for uid in "abcd":
        admission.start(uid)
    admission.select("ef", step=1)
    admission.admit(["g", "h"], step=2)
    assert not admission.ready("gh"), "a, b, c and d would all be due in the one next batch of two"
    assert not admission.ready("gha")
    assert admission.ready("ghab")


def test_a_prompt_without_a_token_was_not_deferred_until_its_abort_tells_otherwise():
    admission = controller("abcd")
    admission.start("a")
    admission.select("bc", step=1)
    assert admission.deferred() == DeferredStats(num=1, age_mean=1.0, age_max=1)
    admission.carry("a")
    admission.carry("d")
    admission.carry("d")
    assert (admission.deferrals("a"), admission.deferrals("d")) == (1, 1)
    assert admission.total_deferred == 2


def test_completed_but_unchosen_prompts_are_deferred_too():
    admission = controller("abcd")
    admission.complete("d")
    admission.select("bc", step=1)
    assert admission.deferrals("d") == 1


def test_carry_does_not_defer_a_prompt_admitted_after_the_latest_select():
    admission = controller("abc")
    admission.carry("a")
    assert admission.deferrals("a") == 0
    admission.select("bc", step=1)
    assert admission.deferrals("a") == 1
    admission.admit(["d"], step=2)
    admission.carry("d")
    assert admission.deferrals("d") == 0
    assert admission.total_deferred == 1


def test_late_and_repeated_events_change_nothing():
    admission = controller("abcd")
    admission.complete("b")
    admission.complete("a")
    admission.complete("b")
    admission.select("ab", step=1)
    before = admission.state_dict()
    for event in (admission.start, admission.carry, admission.complete):
        event("a")
        event("never admitted")
    assert admission.state_dict() == before
    assert not admission.ready("abc"), "rows of trained prompts do not count"


def test_num_to_admit_refills_to_batch_and_delta_and_stops_before_the_end():
    admission = controller("abc", batch_size=4)
    assert admission.num_to_admit(delta=2, steps_left=9) == 3
    assert admission.num_to_admit(delta=8, steps_left=2) == 5
    assert admission.num_to_admit(delta=8, steps_left=1) == 1
    assert admission.num_to_admit(delta=8, steps_left=0) == 0
    admission.admit(list("defghijkl"), step=1)
    assert admission.num_to_admit(delta=0, steps_left=9) == 0


def test_evicted_prompts_are_counted_by_reason_and_replaced():
    admission = controller("abcd")
    admission.evict(["a", "a"], reason="failed")
    admission.evict(["b"], reason="filtered")
    admission.evict(["b"], reason="filtered")
    assert admission.evicted_by_reason() == {"failed": 1, "filtered": 1}
    assert admission.ledger() == Ledger(submitted=4, trained=0, evicted=2, outstanding=2)
    assert admission.num_to_admit(delta=2, steps_left=5) == 2


def test_eviction_lifts_the_wait_for_a_prompt_at_the_bound():
    admission = controller("abcd", max_deferrals=1)
    admission.start("a")
    admission.select("bc", step=1)
    admission.admit(["e"], step=2)
    assert not admission.ready("de")
    admission.evict(["a"], reason="failed")
    assert admission.ready("de")


def test_ages_are_steps_since_admission():
    admission = controller("abcd")
    admission.select("ab", step=1)
    admission.admit(["e"], step=3)
    admission.select("ce", step=3)
    assert admission.ages(["a", "c", "e", "d"]) == [0, 2, 0, 2]


def test_bad_input_is_refused_and_changes_nothing():
    with pytest.raises(ValueError, match="batch_size is 0"):
        AdmissionController(batch_size=0, max_deferrals=1)
    with pytest.raises(ValueError, match="max_deferrals is -1"):
        AdmissionController(batch_size=1, max_deferrals=-1)
    admission = controller("abcd", max_deferrals=1)
    before = admission.state_dict()
    for uids, message in ((["a"], r"known or repeated: \['a'\]"), (["e", "e"], r"\['e'\]"), (["e"], "exceed")):
        with pytest.raises(ValueError, match=message):
            admission.admit(uids, step=1)
    for delta in (-1, 3):
        with pytest.raises(ValueError, match=f"delta is {delta}; allowed: 0 to .* = 2 prompts"):
            admission.num_to_admit(delta=delta, steps_left=1)
    with pytest.raises(ValueError, match="steps_left is -1"):
        admission.num_to_admit(delta=0, steps_left=-1)
    with pytest.raises(ValueError, match="'x' was never admitted"):
        admission.ready(["x"])
    with pytest.raises(ValueError, match="cannot evict 'x' .failed.: it is not known"):
        admission.evict(["a", "x"], reason="failed")
    for ask in (admission.deferrals, lambda uid: admission.ages([uid])):
        with pytest.raises(ValueError, match="'x' is neither outstanding"):
            ask("x")
    assert admission.state_dict() == before
    admission.select("ab", step=1)
    with pytest.raises(ValueError, match="cannot evict 'a' .stale.: it is trained already"):
        admission.evict(["a"], reason="stale")


def test_the_memory_of_retired_prompts_is_bounded():
    admission = AdmissionController(batch_size=2, max_deferrals=1)
    for step in range(1, 50):
        uids = [f"{step}-{i}" for i in range(2)]
        admission.admit(uids, step=step)
        admission.select(uids, step=step)
    assert len(admission._retired) == 2 * (1 + 1 + 2)
    assert admission.ledger().trained == 98


def test_a_resume_keeps_ages_order_and_what_was_counted_already():
    admission = controller("abcdef", max_deferrals=2)
    admission.start("f")
    admission.complete("e")
    admission.select("ab", step=1)
    restored = through_json(admission, batch_size=2, max_deferrals=2)
    assert restored.ledger() == admission.ledger() == Ledger(submitted=6, trained=2, evicted=0, outstanding=4)
    for uid in "fcf":
        restored.carry(uid)
    assert [restored.deferrals(uid) for uid in "cdef"] == [1, 0, 1, 1]
    assert restored.outstanding() == list("cdef")
    assert restored.select("def", step=2) == ["e", "f"]
    assert restored.ages("ed") == [1, 1]


def test_a_resume_with_a_smaller_bound_trains_what_is_over_it_first():
    admission = controller("abcdefgh", max_deferrals=3)
    admission.start("a")
    for step, batch in ((1, "bc"), (2, "de")):
        admission.select(batch, step=step)
    restored = through_json(admission, batch_size=2, max_deferrals=1)
    assert restored.deferrals("a") == 2
    assert not restored.ready("fg")
    assert restored.select("fga", step=3)[0] == "a"


def test_a_saved_ledger_that_does_not_add_up_is_refused():
    state = controller("abcd").state_dict()
    state["submitted"] = 5
    with pytest.raises(ValueError, match="the saved ledger is .*submitted=5"):
        AdmissionController(batch_size=2, max_deferrals=2).load_state_dict(state)


def can_be_scheduled(slacks: list[int], batch_size: int) -> bool:
    """True if jobs with these slacks (0: the next batch) fit, trained earliest deadline first."""
    return all(slack >= position // batch_size for position, slack in enumerate(sorted(slacks)))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=200)
@given(
    batch_size=st.integers(1, 3),
    max_deferrals=st.integers(1, 3),
    deferrals=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    data=st.data(),
)
def test_ready_exactly_when_some_choice_leaves_a_feasible_rest(batch_size, max_deferrals, deferrals, data):
    """Against brute force over all choices of B, for states that a run can reach (feasible before the choice)."""
    deferrals = [min(count, max_deferrals) for count in deferrals][: batch_size * (1 + max_deferrals)]
    slacks = {f"p{i}": max_deferrals - count for i, count in enumerate(deferrals)}
    if not can_be_scheduled(list(slacks.values()), batch_size):
        return
    admission = AdmissionController(batch_size=batch_size, max_deferrals=max_deferrals)
    admission.admit(list(slacks), step=1)
    state = admission.state_dict()
    for prompt, count in zip(state["outstanding"], deferrals, strict=True):
        prompt["deferrals"] = count
    admission.load_state_dict(state)

    sampleable = data.draw(st.lists(st.sampled_from(sorted(slacks)), unique=True))
    expected = any(
        can_be_scheduled([slack - 1 for uid, slack in slacks.items() if uid not in chosen], batch_size)
        for chosen in itertools.combinations(sampleable, batch_size)
    )
    assert admission.ready(sampleable) == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=150)
@given(
    batch_size=st.integers(1, 4),
    max_deferrals=st.integers(0, 3),
    slots=st.integers(1, 20),
    eviction_rate=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_order_of_completion_keeps_bound_ledger_and_liveness(batch_size, max_deferrals, slots, eviction_rate, seed):
    """A run with arbitrary orders, few slots, tokens learned only at abort, evictions with refill, and resumes.

    ``first_token`` is the truth; the controller is told of it early, at the abort, or by completion alone.
    """
    rng = random.Random(seed)
    admission = AdmissionController(batch_size=batch_size, max_deferrals=max_deferrals)
    first_token: dict[str, int] = {}
    trained: list[str] = []
    num_steps = 12
    names = itertools.count()

    def refill(step: int, delta: int) -> None:
        num = admission.num_to_admit(delta=delta, steps_left=num_steps - step + 1)
        admission.admit([f"p{next(names)}" for _ in range(num)], step=step)

    for step in range(1, num_steps + 1):
        delta = rng.randint(0, batch_size * max_deferrals)
        refill(step, delta)
        done: set[str] = set()
        while not admission.ready(done):
            running = [uid for uid in admission.outstanding() if uid not in done][:slots]
            assert running, f"nothing is left to wait for: {admission.describe_wait(done)}"
            for uid in running:
                if rng.random() < 0.7 and uid not in first_token:
                    first_token[uid] = step
                    if rng.random() < 0.5:
                        admission.start(uid)
            uid = rng.choice(running)
            first_token.setdefault(uid, step)
            if rng.random() < eviction_rate:
                admission.evict([uid], reason="failed")
                refill(step, delta)
                continue
            done.add(uid)
            if rng.random() < 0.5:
                admission.complete(uid)
        batch = admission.select(done, step=step)
        assert len(batch) == len(set(batch)) == batch_size
        assert set(batch) <= done and not set(batch) & set(trained)
        assert all(step - first_token[uid] <= max_deferrals for uid in batch)
        trained += batch
        for uid in admission.outstanding():
            if uid in first_token:
                admission.carry(uid)
                assert admission.deferrals(uid) == step - first_token[uid] + 1 <= max_deferrals
        assert admission.ledger().balanced
        assert admission.ledger().trained == len(trained)
        if rng.random() < 0.3:
            admission = through_json(admission, batch_size=batch_size, max_deferrals=max_deferrals)
    assert admission.ledger().outstanding == 0, "nothing may be left that can no longer be trained"


def test_the_controllers_and_the_schema_import_no_framework():
    code = (
        "import sys; import verl_oppo.config.schema; from verl_oppo.control import "
        "admission, chunk_size, fairness, overcommit; "
        "print(sorted({'ray', 'torch', 'verl', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
