"""Metrics of a step with known answers: staleness of tokens, the rollout's probability error, the ledger."""

import numpy as np
import pytest

from verl_oppo.metrics import TrainedRow, expand_versions, ledger_metrics, staleness_metrics

PREFIX = "oppo/staleness/"


def row(versions: list[list[int]], mask: list[int], probs_diff: list[float] | None = None) -> TrainedRow:
    return TrainedRow(
        versions=versions,
        mask=np.array(mask, dtype=bool),
        probs_diff=None if probs_diff is None else np.array(probs_diff),
    )


def test_versions_expand_to_one_a_token():
    assert expand_versions([[4, 2], [-1, 1], [5, 3]]).tolist() == [4, 4, -1, 5, 5, 5]
    assert expand_versions([]).shape == (0,)


def test_stale_tokens_are_those_of_older_weights_over_all_rows():
    rows = [row([[7, 3], [8, 1]], [1, 1, 1, 1]), row([[9, 4]], [1, 1, 1, 1])]
    assert staleness_metrics(rows, current_version=9) == {PREFIX + "stale_token_ratio": 0.5}
    assert staleness_metrics(rows, current_version=8) == {PREFIX + "stale_token_ratio": 0.375}
    assert staleness_metrics(rows, current_version=7) == {PREFIX + "stale_token_ratio": 0.0}


def test_tool_tokens_are_neither_fresh_nor_stale():
    rows = [row([[7, 1], [-1, 6], [9, 3]], [1, 0, 0, 0, 0, 0, 0, 1, 1, 1])]
    assert staleness_metrics(rows, current_version=9) == {PREFIX + "stale_token_ratio": 0.25}


def test_the_probability_error_is_split_into_fresh_and_stale_tokens():
    rows = [
        row([[8, 2], [9, 2]], [1, 1, 1, 1], [0.1, 0.3, 0.01, 0.03]),
        row([[9, 1]], [1], [0.05]),
    ]
    assert staleness_metrics(rows, current_version=9) == pytest.approx(
        {
            PREFIX + "stale_token_ratio": 0.4,
            PREFIX + "rollout_probs_diff_fresh_mean": 0.03,
            PREFIX + "rollout_probs_diff_fresh_max": 0.05,
            PREFIX + "rollout_probs_diff_stale_mean": 0.2,
            PREFIX + "rollout_probs_diff_stale_max": 0.3,
        }
    )


def test_masked_tokens_count_as_generated_but_not_in_the_error():
    """verl's rejection sampling takes tokens out of the mask; they were generated all the same."""
    metrics = staleness_metrics([row([[8, 2], [-1, 1], [9, 2]], [1, 0, 0, 0, 1], [0.1, 9.0, 9.0, 9.0, 0.3])], 9)
    assert metrics == pytest.approx(
        {
            PREFIX + "stale_token_ratio": 0.5,
            PREFIX + "rollout_probs_diff_fresh_mean": 0.3,
            PREFIX + "rollout_probs_diff_fresh_max": 0.3,
            PREFIX + "rollout_probs_diff_stale_mean": 0.1,
            PREFIX + "rollout_probs_diff_stale_max": 0.1,
        }
    )


def test_a_kind_without_a_counted_token_has_no_error():
    metrics = staleness_metrics([row([[8, 1], [9, 1]], [0, 1], [9.0, 0.2])], current_version=9)
    assert set(metrics) == {PREFIX + name for name in _FRESH_ONLY}


_FRESH_ONLY = ("stale_token_ratio", "rollout_probs_diff_fresh_mean", "rollout_probs_diff_fresh_max")


@pytest.mark.parametrize("rows", [[], [row([], [])], [row([[-1, 2]], [0, 0])]], ids=["none", "empty", "tools_only"])
def test_nothing_generated_is_not_stale(rows):
    assert staleness_metrics(rows, current_version=9) == {PREFIX + "stale_token_ratio": 0.0}


def test_versions_and_mask_of_different_lengths_are_refused():
    with pytest.raises(AssertionError, match="3 token versions for 2 response tokens"):
        staleness_metrics([row([[8, 3]], [1, 1])], current_version=9)


def test_ledger_metrics_are_the_four_counts():
    assert ledger_metrics({"submitted": 9, "trained": 4, "evicted": 2, "outstanding": 3}) == {
        "oppo/ledger/submitted": 9,
        "oppo/ledger/trained": 4,
        "oppo/ledger/evicted": 2,
        "oppo/ledger/outstanding": 3,
    }
