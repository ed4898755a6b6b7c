"""How many tokens a prefill call may have: against simulated scorers whose costs are known."""

import pytest

from verl_oppo.stream.prefill_budget import FIXED_COSTS_PER_CALL, MIN_TOKENS, PrefillBudget


def full_calls(budget: PrefillBudget, *, fixed_s: float, token_s: float, num: int = 30) -> float:
    """Seconds of the last of `num` calls that have all the tokens they may."""
    seconds = 0.0
    for _ in range(num):
        seconds = fixed_s + token_s * budget.tokens
        budget.observe(budget.tokens, seconds)
    return seconds


def test_a_fast_scorer_keeps_all_tokens():
    budget = PrefillBudget(2048, target_s=0.2)
    full_calls(budget, fixed_s=0.02, token_s=5e-5)
    assert budget.tokens == 2048


@pytest.mark.parametrize("token_s", [1e-3, 3e-3])
def test_a_slow_scorer_gets_calls_of_about_the_target(token_s):
    budget = PrefillBudget(2048, target_s=0.2)
    budget.observe(1, 0.01)
    full_calls(budget, fixed_s=0.01, token_s=token_s)
    assert 0.4 * 0.19 / token_s <= budget.tokens <= 2 * 0.19 / token_s, "it may double once before it shrinks"


def test_calls_do_not_shrink_to_where_they_are_all_fixed_cost():
    budget = PrefillBudget(2048, target_s=0.2)
    budget.observe(1, 0.3)
    last_s = full_calls(budget, fixed_s=0.3, token_s=1e-3)
    assert last_s >= 0.3 * FIXED_COSTS_PER_CALL / 2


def test_one_slow_call_is_made_up_for():
    budget = PrefillBudget(2048, target_s=0.2)
    budget.observe(1, 0.01)
    budget.observe(2048, 30.0)
    assert budget.tokens == MIN_TOKENS
    full_calls(budget, fixed_s=0.01, token_s=5e-5)
    assert budget.tokens == 2048


def test_a_short_call_with_few_tokens_changes_nothing():
    budget = PrefillBudget(2048, target_s=0.2)
    budget.observe(1, 0.01)
    budget.observe(2048, 1.0)
    tokens = budget.tokens
    budget.observe(tokens - 1, 0.1)
    assert budget.tokens == tokens < 2048


def test_a_bound_below_the_minimum_holds():
    budget = PrefillBudget(10, target_s=0.2)
    budget.observe(10, 5.0)
    budget.observe(1, 0.01)
    budget.observe(10, 5.0)
    assert budget.tokens == 10
