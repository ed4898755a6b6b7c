"""Does deferral starve long responses? Measures over the journeys of prompts from submission to training.

The benchmark and the tests build one ``Journey`` per prompt and ask for the mean length of trained against submitted
prompts and for the age by length. It knows lengths and steps only.

A finite buffer makes the totals of a whole run agree whatever the order, because what is submitted is trained in the
end. Starvation shows within a run: windows of steps are compared one by one, and the steps at the end, where the
buffer is drained, are left out. Lengths alone are not enough: once a buffer is full of prompts that are never taken,
the lengths agree again, and only the age tells. Look at both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Journey:
    """One prompt: response length in tokens, and the steps of submission, first token and training (None: not yet)."""

    uid: str
    length: int
    submitted_step: int
    first_token_step: int | None = None
    trained_step: int | None = None

    @property
    def age(self) -> int | None:
        """Steps from the first token to training: 0 if trained in the step it started in; None if not trained."""
        if self.trained_step is None or self.first_token_step is None:
            return None
        return self.trained_step - self.first_token_step


@dataclass(frozen=True)
class WindowLengths:
    """Mean lengths in tokens of the prompts submitted and of those trained in steps ``first_step`` to ``last_step``."""

    first_step: int
    last_step: int
    submitted_mean: float
    trained_mean: float

    @property
    def ratio(self) -> float:
        """Trained over submitted: 1 without any bias, below 1 if long responses are left behind."""
        return self.trained_mean / self.submitted_mean


@dataclass(frozen=True)
class DecileAge:
    """Age in steps of the trained prompts whose length is in one decile, shortest first."""

    decile: int
    length_min: int
    length_max: int
    num: int
    age_mean: float
    age_max: int


def lengths_by_window(
    journeys: Sequence[Journey], *, first_step: int, last_step: int, window: int = 20
) -> list[WindowLengths]:
    """Trained against submitted mean length over consecutive full windows in ``[first_step, last_step]``.

    Pass the last step minus ``max_deferrals`` as ``last_step`` to leave out the draining at the end of a run.

    Raises:
        ValueError: if ``window`` is below 1, or no full window fits.
        ValueError: if nothing was submitted or nothing trained within a window.
    """
    if window < 1 or last_step - first_step + 1 < window:
        raise ValueError(f"window is {window}; allowed: 1 to the {last_step - first_step + 1} steps measured")
    windows = []
    for low in range(first_step, last_step - window + 2, window):
        high = low + window - 1
        submitted = [journey.length for journey in journeys if low <= journey.submitted_step <= high]
        trained = [
            journey.length
            for journey in journeys
            if journey.trained_step is not None and low <= journey.trained_step <= high
        ]
        if not submitted or not trained:
            raise ValueError(
                f"steps {low} to {high}: {len(submitted)} prompts submitted and {len(trained)} trained; "
                "each window needs one of either"
            )
        windows.append(WindowLengths(low, high, sum(submitted) / len(submitted), sum(trained) / len(trained)))
    return windows


def age_by_length_decile(journeys: Sequence[Journey]) -> list[DecileAge]:
    """Mean and largest age of the trained prompts by decile of length; fewer rows if fewer than 10 were trained."""
    trained = sorted((j for j in journeys if j.age is not None), key=lambda j: j.length)
    deciles = []
    for decile in range(10):
        part = trained[decile * len(trained) // 10 : (decile + 1) * len(trained) // 10]
        if part:
            ages = [journey.age for journey in part if journey.age is not None]
            deciles.append(
                DecileAge(decile, part[0].length, part[-1].length, len(part), sum(ages) / len(ages), max(ages))
            )
    return deciles


def format_deciles(deciles: Sequence[DecileAge]) -> str:
    """A table in plain text for a report or a failing test."""
    rows = ["decile  length [tokens]  prompts  age mean [steps]  age max"]
    for d in deciles:
        rows.append(
            f"{d.decile + 1:>6}  {d.length_min:>6}-{d.length_max:<8} {d.num:>7}  {d.age_mean:>16.2f}  {d.age_max:>7}"
        )
    return "\n".join(rows)


def max_age(journeys: Sequence[Journey], *, last_step: int) -> int:
    """Largest age in steps, those still untrained at ``last_step`` included with the age they have reached."""
    ages = [0]
    for journey in journeys:
        if journey.first_token_step is not None:
            end = last_step if journey.trained_step is None else journey.trained_step
            ages.append(end - journey.first_token_step)
    return max(ages)
