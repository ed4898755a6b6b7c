"""What the trainer notes beside the metrics where the environment asks for it: time spans and trained trajectories.

`PPOTrainerOppo` owns one `TrainerTrace`. Where nobody asks (`trace_file.VARIABLE` is not set) it keeps and writes
nothing. It does not know who reads the files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_oppo.metrics import TrainedRow, expand_versions
from verl_oppo.rollout.partial import TOOL_TOKEN_VERSION
from verl_oppo.stream.consumer import ConsumerStats
from verl_oppo.trace_file import SPANS, TRAJECTORIES, trace_file


def trajectory_record(
    step: int, key: str, submitted_step: int, row: TrainedRow, is_threshold: float | None
) -> dict[str, Any]:
    """One trained trajectory.

    `length` counts response tokens, `stale` the generated ones from older weights than the step's newest, `clipped`
    those whose importance ratio exceeds `is_threshold` (None where the run does not correct). Steps count from 1; a
    token of weight version v was made in step v + 1.
    """
    versions = expand_versions(row.versions)
    generated = versions[versions != TOOL_TOKEN_VERSION]
    clipped = None
    if is_threshold is not None and row.is_ratio is not None:
        clipped = int(np.count_nonzero(row.is_ratio[row.mask] > is_threshold))
    return {
        "step": step,
        "key": key,
        "submitted_step": submitted_step,
        "first_token_step": int(generated.min()) + 1 if generated.size else None,
        "length": len(versions),
        "stale": int(np.count_nonzero(generated < step - 1)),
        "clipped": clipped,
    }


class TrainerTrace:
    """Invariant: a step's line of spans is written once, after its last span."""

    def __init__(self, is_threshold: float | None) -> None:
        self._spans = trace_file(SPANS)
        self._trajectories = trace_file(TRAJECTORIES)
        self._is_threshold = is_threshold
        self._sample: list[float] = []

    def sample_begins(self) -> None:
        self._sample = [time.time()]

    def sample_ends(self) -> None:
        """To be called when the batch is there, before anything is aborted."""
        self._sample.append(time.time())

    def step_ends(self, step: int, stats: Mapping[str, ConsumerStats]) -> None:
        """`stats`: what each scorer that takes chunks did in the step."""
        if self._spans is not None:
            scorers = {name: one.spans for name, one in stats.items()}
            self._spans.write({"step": step, "sample": self._sample, "scorers": scorers})

    def trained(self, step: int, keys: Sequence[str], tags: Sequence[Mapping], rows: Sequence[TrainedRow]) -> None:
        """The rows of a step, padding left out; keys and tags in the same order."""
        if self._trajectories is None:
            return
        self._trajectories.write(
            *(
                trajectory_record(step, key, tag["global_steps"], row, self._is_threshold)
                for key, tag, row in zip(keys, tags, rows, strict=True)
            )
        )
