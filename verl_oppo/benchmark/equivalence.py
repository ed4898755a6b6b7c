"""Two one-sided tests (TOST) for equal means: with few runs "no significant difference" proves nothing.

Called by `convergence`. Welch's form: unequal variances (Welch 1947), TOST (Schuirmann 1987). The t distribution is
from mpmath's regularised incomplete beta function.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import mpmath


@dataclass(frozen=True)
class Equivalence:
    """Means of two samples are equivalent at `alpha` if `p` is below it, i.e. if the interval lies within +-margin.

    Attributes:
        difference: mean of a - mean of b.
        p: the larger of the two one-sided p-values.
        low, high: the 1 - 2 * alpha confidence interval of the difference.
    """

    difference: float
    margin: float
    alpha: float
    p: float
    low: float
    high: float
    degrees_of_freedom: float

    @property
    def is_equivalent(self) -> bool:
        return self.p < self.alpha


def equivalence(a: Sequence[float], b: Sequence[float], margin: float, alpha: float = 0.05) -> Equivalence:
    """Tests whether the means of a and b differ by less than `margin`, which must be chosen before looking.

    Raises:
        ValueError: fewer than two values on a side, or a margin that is not above 0.
    """
    if len(a) < 2 or len(b) < 2:
        raise ValueError(f"{len(a)} and {len(b)} values; allowed: two or more on each side")
    if not margin > 0:
        raise ValueError(f"margin is {margin!r}; allowed: above 0")
    difference = statistics.fmean(a) - statistics.fmean(b)
    parts = [statistics.variance(sample) / len(sample) for sample in (a, b)]
    error = math.sqrt(sum(parts))
    if error == 0:
        p = 0.0 if abs(difference) < margin else 1.0
        return Equivalence(difference, margin, alpha, p, difference, difference, math.inf)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(sample) - 1) for part, sample in zip(parts, (a, b), strict=True))
    p = max(upper_tail((difference + margin) / error, freedom), upper_tail((margin - difference) / error, freedom))
    reach = t_quantile(1 - alpha, freedom) * error
    return Equivalence(difference, margin, alpha, p, difference - reach, difference + reach, freedom)


def upper_tail(t: float, freedom: float) -> float:
    """P(T > t) of Student's t distribution."""
    half = float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True)) / 2
    return half if t >= 0 else 1.0 - half


def t_quantile(probability: float, freedom: float) -> float:
    """The t above 0 with P(T <= t) = probability, for a probability in (0.5, 1)."""
    low, high = 0.0, 1.0
    while upper_tail(high, freedom) > 1 - probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, freedom) > 1 - probability else (low, middle)
    return (low + high) / 2
