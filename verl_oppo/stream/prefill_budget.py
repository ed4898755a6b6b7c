"""How many tokens the next prefill call may have, so that a final call behind it does not wait long.

The pump owns one and tells it how long its calls took. It does not know chunks, ranks or scorers.
"""

from __future__ import annotations

MIN_TOKENS = 32
"""Fewer are not worth a call on any device."""
FIXED_COSTS_PER_CALL = 3.0
"""A call may last this many times the shortest one seen, which is about what any call costs: else short calls would
spend most of the scorer's time on that."""


class PrefillBudget:
    """Tokens of a prefill call on one rank.

    Invariant: `MIN_TOKENS` <= `tokens` <= `max_tokens`, or `max_tokens` where that is less. It shrinks after a call
    that took too long and doubles after one that had all it might and did not.
    """

    def __init__(self, max_tokens: int, target_s: float) -> None:
        self.tokens = max_tokens
        self._max_tokens = max_tokens
        self._target_s = target_s
        self._shortest_s = float("inf")

    def observe(self, tokens: int, seconds: float) -> None:
        """A call with `tokens` on its fullest rank took `seconds`."""
        self._shortest_s = min(self._shortest_s, seconds)
        allowed_s = max(self._target_s, FIXED_COSTS_PER_CALL * self._shortest_s)
        if seconds > allowed_s:
            shrunk = int(tokens * allowed_s / seconds)
            self.tokens = min(self._max_tokens, max(MIN_TOKENS, shrunk))
        elif tokens >= self.tokens:
            self.tokens = min(self._max_tokens, 2 * self.tokens)
