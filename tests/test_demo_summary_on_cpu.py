"""The figures and the words that the demo ends with."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_oppo.demo.summary import (
    StepRecord,
    progress_line,
    reward_change,
    split_records,
    step_record,
    summarize,
    summary_words,
)


def steps(rewards: list[float | None], **figures: float) -> list[StepRecord]:
    return [StepRecord(step=i, reward=reward, seconds=2.0, **figures) for i, reward in enumerate(rewards, 1)]


@given(
    records=st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3), max_size=6),
    cuts=st.lists(st.integers(0, 300), max_size=6),
)
def test_lines_are_parsed_once_wherever_the_writer_was_interrupted(records, cuts):
    written = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    edges = [0, *sorted(min(cut, len(written)) for cut in cuts), len(written)]
    pending, parsed = b"", []
    for start, end in zip(edges, edges[1:], strict=False):
        new, pending = split_records(pending + written[start:end])
        parsed += new
    assert parsed == records
    assert pending == b""


def test_a_half_written_line_waits_for_its_end():
    records, rest = split_records(b'{"step": 1, "data": {}}\n{"step": 2, "da')
    assert records == [{"step": 1, "data": {}}]
    assert rest == b'{"step": 2, "da'


@pytest.mark.parametrize("line", [b"{broken}\n", b"[1]\n"])
def test_a_complete_line_that_is_no_object_is_an_error_that_shows_it(line):
    with pytest.raises(ValueError, match="no JSON"):
        split_records(line)


def test_a_step_is_read_under_the_names_of_verl_and_the_plugin():
    data = {
        "critic/score/mean": 0.5,
        "timing_s/step": 3.25,
        "oppo/overcommit/delta": 4,
        "oppo/deferred/num": 2,
        "timing_s/first_b_latency": 0.01,
    }
    assert step_record({"step": 7, "data": data}) == StepRecord(7, 0.5, 3.25, 4.0, 2.0, 0.01)


def test_a_step_of_a_stock_mode_has_no_overlap_figures():
    record = step_record({"step": 1, "data": {"critic/score/mean": 0.5, "perf/time_per_step": 3.0}})
    assert record == StepRecord(1, 0.5, 3.0, None, None, None)


def test_validation_before_training_is_no_step():
    assert step_record({"step": 0, "data": {"val-core/toy/reward/mean@1": 0.1}}) is None


def test_a_figure_that_is_not_finite_is_left_out():
    assert step_record({"step": 1, "data": {"critic/score/mean": math.nan, "timing_s/step": 1.0}}).reward is None


def test_reward_change_compares_five_steps_at_each_end():
    first, last, error = reward_change([1, 2, 3, 4, 5, 100, 100, 7, 8, 9, 10, 11])
    assert (first, last) == (3, 9)
    assert error == pytest.approx(math.sqrt(2.5 / 5 + 2.5 / 5))


def test_no_step_counts_at_both_ends_of_a_short_run():
    assert reward_change([0.0, 2.0, 50.0, 4.0, 6.0]) == (1.0, 5.0, pytest.approx(math.sqrt(2.0 / 2 + 2.0 / 2)))


@pytest.mark.parametrize(
    ("rewards", "expected"), [([], (None, None, None)), ([0.5], (0.5, 0.5, None)), ([0.5, 0.75], (0.5, 0.75, None))]
)
def test_the_error_is_unknown_below_two_steps_a_side(rewards, expected):
    assert reward_change(rewards) == expected


def test_summary_of_an_overlapped_run():
    records = [
        StepRecord(
            i,
            reward=i / 10,
            seconds=seconds,
            delta=4,
            deferred=i % 3,
            first_b_latency_s=0.002 * i,
            hidden_ratio=None if i == 1 else 0.2 * i,
            cached_token_ratio=0.9,
            emulated=True,
        )
        for i, seconds in enumerate([30.0, 3.0, 2.0, 3.0], 1)
    ]
    assert summarize(records, "m.jsonl", "p.png") == {
        "first_reward": 0.15,
        "last_reward": 0.35,
        "reward_se": pytest.approx(math.sqrt(0.005 / 2 + 0.005 / 2), rel=1e-5),
        "steps": 4,
        "deferred": 1 + 2 + 0 + 1,
        "step_s_median": 3.0,
        "first_b_latency_s_median": 0.005,
        "hidden_ratio_median": 0.6,
        "cached_token_ratio_median": 0.9,
        "emulated": True,
        "metrics_file": "m.jsonl",
        "plot": "p.png",
    }


def test_keys_that_do_not_apply_are_null_but_there():
    stock, empty = summarize(steps([0.1, 0.2]), "m.jsonl", None), summarize([], None, None)
    assert stock.keys() == empty.keys()
    assert (stock["deferred"], stock["first_b_latency_s_median"], stock["plot"]) == (None, None, None)
    assert {key for key, value in empty.items() if value is not None} == {"steps", "emulated"}
    assert not empty["emulated"]


def test_words_say_that_the_step_times_are_emulated():
    emulated = [StepRecord(i, reward=0.1, seconds=1.0, emulated=True, cached_token_ratio=0.9) for i in range(4)]
    assert "EMULATED" in " ".join(summary_words(summarize(emulated, None, None), 1.0))
    assert "EMULATED" not in " ".join(summary_words(summarize(steps([0.1, 0.2]), None, None), 1.0))


def test_a_run_without_any_deferral_reports_zero_not_null():
    assert summarize(steps([0.1, 0.2], deferred=0), None, None)["deferred"] == 0


@pytest.mark.parametrize(
    ("rewards", "word"),
    [
        ([0.1, 0.11, 0.1, 0.11, 0.9, 0.91, 0.9, 0.91], "rose"),
        ([0.9, 0.91, 0.9, 0.91, 0.1, 0.11, 0.1, 0.11], "fell"),
        ([0.1, 0.9, 0.1, 0.9, 0.2, 0.9, 0.1, 0.9], "no change beyond noise"),
        ([0.1, 0.9], "too few steps"),
        ([0.1], "no trend"),
    ],
)
def test_the_words_call_a_rise_a_rise_only_beyond_its_error(rewards, word):
    words = " ".join(summary_words(summarize(steps(rewards), None, None), elapsed_s=125))
    assert word in words
    assert "2 min 05 s" in words


def test_the_words_on_overlap_follow_the_mode():
    overlapped = " ".join(summary_words(summarize(steps([0.1], deferred=3, first_b_latency_s=0.004), None, None), 60))
    stock = " ".join(summary_words(summarize(steps([0.1]), None, None), 60))
    assert "deferred 3 unfinished prompts" in overlapped
    assert "4 ms" in overlapped
    assert "no OPPO figures" in stock
    assert "No training step" in summary_words(summarize([], None, None), 60)[0]


def test_progress_line_shows_the_figures_and_dashes_for_absent_ones():
    assert progress_line(StepRecord(3, 0.25, 2.5, 4, 2), 60).split() == (
        "step 3/60 reward 0.2500 delta 4 deferred 2 2.50 s".split()
    )
    assert (
        progress_line(StepRecord(3, 0.25, 2.5), None).split()
        == "step 3 reward 0.2500 delta - deferred - 2.50 s".split()
    )
