"""The overcommit degree delta: how many prompts beyond the batch a step runs, by the slope of the reward.

The trainer calls ``observe`` once a step with the mean unpenalised score per trained prompt and passes the result to
admission as the delta of the next step. The simulator and the benchmark run it as it is. It knows rewards and numbers
of prompts only; what delta means for rollouts is ``control/admission.py``.

Notation (OPPO, arXiv 2509.25762, the inter-step overlap section): R_t is the reward of step t, w the window, delta_inc
and delta_dec the step sizes. While the reward rises, staleness is cheap and delta grows; as training converges it
shrinks. Every rule returns a slope in reward per step and a signed change of delta.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RISE_IN_STANDARD_ERRORS = 1.25
"""How far above 0 a fitted slope must be to count as a rise. The standard error of a fit takes the rewards of
different steps for independent, which carried prompts make untrue: they shift reward from one step to the next, and a
change of delta itself changes which lengths, hence which rewards, are seen. At 1.0 a flat reward that falls with length
(correlation -0.6, batch of 8) leaves delta within 1 of its minimum in 78 % of the steps, at 1.25 in 88 %."""


@dataclass(frozen=True)
class Verdict:
    """What a rule says after one step: slope in reward per step, change in prompts (before the bounds)."""

    slope: float
    change: int


@dataclass(frozen=True)
class Rule:
    """A rule by name. ``decide(rewards, delta, delta_inc, delta_dec)`` gets the last ``rewards_needed(window)``."""

    decide: Callable[[Sequence[float], int, int, int], Verdict]
    min_window: int
    rewards_needed: Callable[[int], int]


def fit_line(rewards: Sequence[float]) -> tuple[float, float]:
    """Ordinary least squares over x = 0, 1, ..., w - 1: the slope and its standard error.

    slope = sum((x - mean x)(R - mean R)) / Sxx with Sxx = w(w^2 - 1)/12; its standard error is
    sqrt(SSE / (w - 2) / Sxx), SSE being the sum of squared residuals. Needs 3 rewards or more. Differences to the
    first reward are fitted, so that equal rewards have the slope 0 exactly.
    """
    w = len(rewards)
    assert w >= 3, w
    x = [i - (w - 1) / 2 for i in range(w)]
    y = [reward - rewards[0] for reward in rewards]
    y_mean = math.fsum(y) / w
    sxx = w * (w * w - 1) / 12
    slope = math.fsum(xi * yi for xi, yi in zip(x, y, strict=True)) / sxx
    sse = math.fsum((yi - y_mean - slope * xi) ** 2 for xi, yi in zip(x, y, strict=True))
    return slope, math.sqrt(sse / (w - 2) / sxx)


def two_point_slope(rewards: Sequence[float]) -> float:
    """The paper's s_t = (1/w) sum_{i=t-w+1..t} (R_i - R_{i-1}) from w + 1 rewards; it telescopes to two points."""
    return (rewards[-1] - rewards[0]) / (len(rewards) - 1)


def least_squares(rewards: Sequence[float], delta: int, delta_inc: int, delta_dec: int) -> Verdict:
    """Grow if the fitted slope is above 0 by ``RISE_IN_STANDARD_ERRORS``; shrink otherwise, the dead band included.

    Ours, not the paper's: on a flat noisy reward the two-point slope has either sign half of the time, so delta
    wanders over its whole range. White noise has a t value above 1.25 in 13 % of the windows (w = 8, 6 degrees of
    freedom); shrinking in the other 87 % holds delta near its minimum.
    """
    slope, standard_error = fit_line(rewards)
    return Verdict(slope, delta_inc if slope > RISE_IN_STANDARD_ERRORS * standard_error else -delta_dec)


def paper(rewards: Sequence[float], delta: int, delta_inc: int, delta_dec: int) -> Verdict:
    """The rule of the paper's text: delta + delta_inc if s_t > 0, else delta - delta_dec."""
    slope = two_point_slope(rewards)
    return Verdict(slope, delta_inc if slope > 0 else -delta_dec)


def proportional(rewards: Sequence[float], delta: int, delta_inc: int, delta_dec: int) -> Verdict:
    """The step size of the paper's Algorithm 1, max(1, floor(delta / 4)), with the sign of the paper's text.

    ``delta_inc`` and ``delta_dec`` are not used. At delta = 0 the step is 1, so a rise is not missed.
    """
    slope = two_point_slope(rewards)
    step = max(1, delta // 4)
    return Verdict(slope, step if slope > 0 else -step)


def constant(rewards: Sequence[float], delta: int, delta_inc: int, delta_dec: int) -> Verdict:
    """Delta stays (the paper's ablation; verl's ``colocate_async`` with a fixed surplus). The slope is reported."""
    return Verdict(two_point_slope(rewards), 0)


RULES: dict[str, Rule] = {
    "least_squares": Rule(least_squares, min_window=3, rewards_needed=lambda window: window),
    "paper": Rule(paper, min_window=2, rewards_needed=lambda window: window + 1),
    "proportional": Rule(proportional, min_window=2, rewards_needed=lambda window: window + 1),
    "constant": Rule(constant, min_window=2, rewards_needed=lambda window: window),
}


class OvercommitController:
    """Moves delta by a rule. Invariant: ``delta_min <= delta <= delta_max`` after every call."""

    def __init__(
        self,
        rule: str,
        delta_init: int,
        delta_min: int,
        delta_max: int,
        delta_inc: int,
        delta_dec: int,
        window: int,
    ) -> None:
        """All deltas in prompts, ``window`` in steps.

        Raises:
            ValueError: if the rule is unknown, not ``0 <= delta_min <= delta_init <= delta_max``, a step size is
                below 1 or the window too short for the rule.
        """
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}; allowed: {', '.join(RULES)}")
        if not 0 <= delta_min <= delta_init <= delta_max:
            raise ValueError(
                f"delta_min={delta_min}, delta_init={delta_init}, delta_max={delta_max}; "
                "allowed: 0 <= delta_min <= delta_init <= delta_max"
            )
        if delta_inc < 1 or delta_dec < 1:
            raise ValueError(f"delta_inc={delta_inc}, delta_dec={delta_dec}; both must be 1 or more")
        if window < RULES[rule].min_window:
            raise ValueError(f"window is {window}; rule {rule} needs {RULES[rule].min_window} or more steps")
        self._name = rule
        self._rule = RULES[rule]
        self._delta = delta_init
        self._bounds = (delta_min, delta_max)
        self._steps = (delta_inc, delta_dec)
        self._slope: float | None = None
        self._rewards: deque[float] = deque(maxlen=self._rule.rewards_needed(window))

    @property
    def delta(self) -> int:
        """Overcommit degree of the next step, in prompts."""
        return self._delta

    @property
    def slope(self) -> float | None:
        """Slope of the reward per step as the rule saw it last; None until there are enough rewards."""
        return self._slope

    def observe(self, reward: float | None, frozen: bool = False) -> int:
        """Takes the mean reward of a finished step and returns delta for the next one.

        Delta holds until the rule has its rewards: ``window`` of them for ``least_squares`` and ``constant``, and
        ``window + 1`` (so ``window`` differences) for ``paper`` and ``proportional``. A step without a reward
        (None) and a frozen one (the actor does not learn, e.g. verl's ``critic_warmup``) are not recorded.

        Raises:
            ValueError: if the reward is NaN or infinite.
        """
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"reward is {reward}; the mean reward of a step must be finite, look at the reward model")
        if reward is None or frozen:
            return self._delta
        self._rewards.append(float(reward))
        if len(self._rewards) == self._rewards.maxlen:
            verdict = self._rule.decide(list(self._rewards), self._delta, *self._steps)
            self._slope = verdict.slope
            self._delta = self._clamp(self._delta + verdict.change)
        return self._delta

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state: delta, slope and the rewards in the window."""
        return {"rule": self._name, "delta": self._delta, "slope": self._slope, "rewards": list(self._rewards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict()``. The rule, bounds and window are this controller's: delta is clamped to them.

        Under another rule than the saved one delta and the rewards are kept and the slope is not.
        """
        self._delta = self._clamp(int(state["delta"]))
        self._slope = state["slope"] if state["rule"] == self._name else None
        self._rewards.clear()
        self._rewards.extend(float(reward) for reward in state["rewards"])

    def _clamp(self, delta: int) -> int:
        low, high = self._bounds
        return min(high, max(low, delta))
