"""The plain data of the scorer protocol: settings that refuse bad values, and the response slice of a result."""

import numpy as np
import pytest

from verl_oppo.scoring.scorer import CallReport, Scored, ScorerSettings


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("cache_bytes", 0, "1 or more"),
        ("cache_bytes", 1.5, "an integer"),
        ("longest_trajectory", True, "an integer"),
        ("block_size", -1, "1 or more"),
        ("max_tokens_per_forward", 0, "1 or more"),
        ("max_context_per_forward", None, "an integer"),
        ("temperature", 0.0, "above 0"),
        ("temperature", float("nan"), "above 0"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_is_allowed(name, value, allowed):
    settings = {"cache_bytes": 1 << 20, "longest_trajectory": 64, "key": "some.key", name: value}
    with pytest.raises(ValueError, match=rf"some\.key\.{name} is .*{allowed}"):
        ScorerSettings(**settings)


def test_the_response_is_shifted_by_one_for_values_and_log_probs_alike():
    """Prompt of 3, response of 2: verl takes positions 2 and 3 of 5 (`response_from_nested`)."""
    values = Scored("a", np.arange(5, dtype=np.float32), cached_tokens=4)
    log_probs = Scored("a", np.arange(4, dtype=np.float32), cached_tokens=2)
    assert values.response(3, 2).tolist() == log_probs.response(3, 2).tolist() == [2.0, 3.0]
    assert values.last == 4.0
    assert (values.cached_response_tokens(3), log_probs.cached_response_tokens(3)) == (1, 0)


@pytest.mark.parametrize(("prompt_length", "response_length"), [(0, 2), (3, 3), (3, -1)])
def test_a_response_outside_the_outputs_is_refused_by_name(prompt_length, response_length):
    with pytest.raises(ValueError, match="trajectory a: (prompt|response)_length is"):
        Scored("a", np.zeros(4, dtype=np.float32), 0).response(prompt_length, response_length)


def test_reports_add_up():
    total = CallReport(forwards=1, seconds=0.5)
    total.add(CallReport(forwards=2, tokens_computed=3, seconds=0.25))
    assert total == CallReport(forwards=3, tokens_computed=3, seconds=0.75)
