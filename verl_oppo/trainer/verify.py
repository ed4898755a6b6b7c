"""Verify mode: streamed outputs against verl's plain path on the same rows.

Called by the trainer on every `intra_step.verify`-th step. Pure arithmetic on arrays; the trainer brings both sides
and, where the engine computes in less than float32, the plain path's own noise.
"""

from collections.abc import Sequence

import numpy as np

FLOAT32_TOLERANCE = 1e-5
"""Largest difference of cached and uncached float32 forwards, relative to max(1, |x|)."""
NOISE_FACTOR = 4.0
"""In a narrower type: times the plain path's own largest difference between two batch compositions."""


def relative_difference(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """|left - right| / max(1, |right|), element by element."""
    return np.abs(left - right) / np.maximum(1.0, np.abs(right))


def largest_difference(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    """Largest relative difference over all rows; 0 without any element."""
    differences = (relative_difference(a, b) for a, b in zip(left, right, strict=True) if len(a))
    return max((float(difference.max()) for difference in differences), default=0.0)


def check_equal(
    name: str,
    keys: Sequence[str],
    streamed: Sequence[np.ndarray],
    plain: Sequence[np.ndarray],
    noise: float | None,
) -> float:
    """Return the largest relative difference of the two paths.

    Args:
        name: who computed them, for the message.
        keys: trajectory of each row.
        streamed, plain: one array of (response_len,) for each row.
        noise: the plain path's own largest relative difference, or None where it computes in float32.

    Raises:
        RuntimeError: a row differs by more than the tolerance; names the trajectory, its length and both numbers.
    """
    tolerance = FLOAT32_TOLERANCE if noise is None else max(FLOAT32_TOLERANCE, NOISE_FACTOR * noise)
    for key, ours, theirs in zip(keys, streamed, plain, strict=True):
        if not len(ours):
            continue
        difference = relative_difference(ours, theirs)
        worst = int(difference.argmax())
        if not difference[worst] <= tolerance:
            raise RuntimeError(
                f"verify: {name} of trajectory {key} ({len(ours)} response tokens) differs at token {worst}: streamed "
                f"{ours[worst]!r}, plain {theirs[worst]!r}, relative difference {difference[worst]:.3g} above "
                f"{tolerance:.3g}"
            )
    return largest_difference(streamed, plain)
