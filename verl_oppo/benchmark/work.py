"""The work of a benchmark: prompts that each carry the length of their response, the same list for every arm.

Called by the runs; knows the demo's data format and no arm. The agent loop (`agent_loop.py`) replays the lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

LENGTH_KEY = "response_length"
"""In a row's `extra_info`: tokens that its response has."""
KINDS = ("long_tail", "uniform", "constant")


@dataclass(frozen=True)
class LengthList:
    """A stated distribution of response lengths.

    Invariant: 1 <= minimum <= median <= maximum tokens, so every list drawn from it lies in [minimum, maximum].
    """

    kind: str
    minimum: int
    median: int
    maximum: int
    sigma: float = 0.0
    """Of the logarithm; for `long_tail` only."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"work is {self.kind!r}; allowed: {', '.join(KINDS)}")
        if not 1 <= self.minimum <= self.median <= self.maximum:
            raise ValueError(
                f"lengths are minimum {self.minimum}, median {self.median}, maximum {self.maximum}; allowed: 1 or "
                "more, in that order"
            )
        if not math.isfinite(self.sigma) or self.sigma < 0:
            raise ValueError(f"sigma is {self.sigma!r}; allowed: a finite number of 0 or more")

    def draw(self, num: int, seed: int) -> list[int]:
        """`num` lengths in tokens; equal arguments give equal lists.

        long_tail: median * exp(sigma * standard normal), rounded, clipped to [minimum, maximum]. uniform: whole numbers
        of [minimum, maximum]. constant: the median.
        """
        rng = random.Random(f"{self.kind}-{seed}")
        if self.kind == "constant":
            return [self.median] * num
        if self.kind == "uniform":
            return [rng.randint(self.minimum, self.maximum) for _ in range(num)]
        drawn = (round(self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))) for _ in range(num))
        return [min(self.maximum, max(self.minimum, length)) for length in drawn]

    def words(self) -> str:
        if self.kind == "constant":
            return f"every response has {self.median} tokens"
        if self.kind == "uniform":
            return f"whole numbers of {self.minimum} to {self.maximum} tokens, all equally likely"
        return (
            f"log-normal with median {self.median} tokens and sigma {self.sigma}, clipped to {self.minimum} to "
            f"{self.maximum} tokens"
        )

    def stated(self, seeds: Sequence[int]) -> dict[str, Any]:
        """What a summary says of it."""
        return {**asdict(self), "seeds": list(seeds), "words": self.words()}


def write_work(prompts: Path, lengths: Sequence[int], target: Path) -> None:
    """Writes `target`: row i is a prompt of the data set `prompts` with length i; prompts repeat if they are too few.

    Raises:
        ValueError: the data set has no prompt.
    """
    rows = pyarrow.parquet.read_table(prompts).to_pylist()
    if not rows:
        raise ValueError(f"{prompts} has no row; allowed: a data set with one prompt or more")
    work = []
    for index, length in enumerate(lengths):
        row = dict(rows[index % len(rows)])
        row["extra_info"] = {**(row.get("extra_info") or {}), "index": index, LENGTH_KEY: length}
        work.append(row)
    target.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(work), target)
