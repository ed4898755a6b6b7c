"""A step's parts, utilisation, lower bound and ratios on a hand-made trace whose answers are known."""

import pytest

from verl_oppo.benchmark.trace import (
    PARTS,
    generation_and_scoring_share,
    hidden_share,
    idle,
    lower_bound_s,
    parts_of,
    ratios,
    steps_of,
    utilisation,
)

SYNC = {
    "timing_s/step": 20.0,
    "timing_s/gen": 10.0,
    "timing_s/reward": 1.0,
    "timing_s/old_log_prob": 0.5,
    "timing_s/ref": 0.6,
    "timing_s/values": 0.4,
    "timing_s/adv": 0.1,
    "timing_s/update_critic": 2.0,
    "timing_s/update_actor": 2.4,
    "timing_s/update_weights": 1.5,
    "response_length/mean": 25.0,
    "response_length/max": 100.0,
    "prompt_length/mean": 15.0,
    "perf/total_num_tokens": 160.0,
    "critic/score/mean": 0.5,
}
OPPO = {
    "timing_s/step": 8.0,
    "timing_s/gen": 3.0,
    "timing_s/straggler_wait": 0.5,
    "timing_s/old_log_prob": 0.5,
    "timing_s/ref": 0.6,
    "timing_s/values": 0.4,
    "timing_s/adv": 0.1,
    "timing_s/update_critic": 1.0,
    "timing_s/update_actor": 0.9,
    "timing_s/update_weights": 1.0,
    "oppo/overlap/reward_exposed_s": 0.2,
    "oppo/overlap/reward_plain_s": 2.0,
    "oppo/scorer/reward_prefill_s": 1.0,
    "oppo/scorer/reward_score_s": 0.6,
    "response_length/mean": 30.0,
    "response_length/max": 100.0,
    "prompt_length/mean": 10.0,
    "perf/total_num_tokens": 160.0,
}


def busy(device_0: float, device_1: float, overruns: float, steps: float) -> dict[str, float]:
    emulated = "oppo/emulated"
    return {
        f"{emulated}/busy_s/GPU0": device_0,
        f"{emulated}/busy_s/GPU1": device_1,
        f"{emulated}/overruns": overruns,
        f"{emulated}/steps": steps,
    }


def test_parts_of_a_step_that_waits_for_its_longest_response():
    parts = parts_of(SYNC, waits_for_all=True)
    assert parts == pytest.approx(
        {
            "decode": 2.5,
            "straggler": 7.5,
            "reward": 1.0,
            "values": 0.4,
            "reference": 0.6,
            "training": 5.0,
            "weight_sync": 1.5,
            "other": 1.5,
        }
    )


def test_parts_of_a_step_that_carries_prompts_take_the_exposed_reward_out_of_generation():
    parts = parts_of(OPPO, waits_for_all=False)
    assert parts["reward"] == pytest.approx(0.2)
    assert parts["straggler"] == pytest.approx(0.5)
    assert parts["decode"] == pytest.approx(2.3)
    assert parts["other"] == pytest.approx(0.5)


@pytest.mark.parametrize("data", [SYNC, OPPO])
@pytest.mark.parametrize("waits_for_all", [True, False])
def test_parts_add_up_to_the_step(data, waits_for_all):
    parts = parts_of(data, waits_for_all=waits_for_all)
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(data["timing_s/step"])


def test_the_lower_bound_is_the_actors_own_work_or_the_reward_devices():
    (step,) = steps_of([(1, SYNC)], waits_for_all=True)
    # decode 2.5 + values 0.4 + reference 0.6 + training 5.0 + sync 1.5
    assert lower_bound_s(step, reward_load=1.0) == pytest.approx(10.0)
    assert lower_bound_s(step, reward_load=12.0) == pytest.approx(12.0)


def test_share_of_generation_and_scoring():
    (step,) = steps_of([(1, SYNC)], waits_for_all=True)
    assert generation_and_scoring_share(step) == pytest.approx(12.0 / 20.0)


def test_counters_that_run_on_are_taken_as_differences():
    records = [(1, OPPO | busy(30.0, 9.0, 5, 100)), (2, OPPO | busy(36.0, 11.0, 7, 140))]
    first, second = steps_of(records, waits_for_all=False)
    assert second.busy == pytest.approx({"GPU0": 6.0, "GPU1": 2.0})
    assert (second.overruns, second.model_steps) == (2, 40)
    assert first.model_steps == 100


def test_utilisation_and_idle_of_emulated_devices():
    records = [(1, OPPO | busy(0.0, 0.0, 0, 0)), (2, OPPO | busy(6.0, 2.0, 0, 1))]
    step = steps_of(records, waits_for_all=False)[1]
    assert utilisation(step, own_pool=True) == pytest.approx({"actor": 0.75, "scorer": 0.25})
    assert utilisation(step, own_pool=False)["scorer"] is None
    assert idle(0.75) == pytest.approx(0.25)
    assert idle(1.3) == 0.0
    assert idle(None) is None


def test_utilisation_without_emulation_comes_from_the_timers():
    (step,) = steps_of([(1, OPPO)], waits_for_all=False)
    shares = utilisation(step, own_pool=True)
    assert shares["actor"] == pytest.approx(1 - (0.5 + 0.2) / 8)
    assert shares["scorer"] == pytest.approx(1.6 / 8)
    (step,) = steps_of([(1, SYNC)], waits_for_all=True)
    assert utilisation(step, own_pool=False) == {"actor": pytest.approx(1 - 1.5 / 20), "scorer": None}


def test_hidden_share_is_over_the_plain_time_of_the_same_tokens():
    more = {"oppo/overlap/reward_exposed_s": 0.6, "perf/total_num_tokens": 240.0}
    steps = steps_of([(1, OPPO), (2, OPPO | more)], waits_for_all=False)
    assert hidden_share(steps, plain_s_per_token=0.01) == pytest.approx(1 - 0.8 / 4.0)
    assert hidden_share(steps, plain_s_per_token=None) is None
    assert hidden_share(steps_of([(1, SYNC)], waits_for_all=True), plain_s_per_token=0.01) is None


def test_ratios_are_paired_by_repeat_and_a_lacking_one_is_left_out():
    assert ratios({0: 2.0, 1: 3.0, 2: 4.0}, {0: 4.0, 2: 5.0}) == pytest.approx({0: 0.5, 2: 0.8})


def test_trained_response_tokens():
    (step,) = steps_of([(1, SYNC)], waits_for_all=True)
    assert step.generated == pytest.approx(100.0)
