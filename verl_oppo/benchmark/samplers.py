"""verl's replay buffers with a poll interval of one's choice, so that a poll of 2 s is not counted as a merit of OPPO.

verl builds them by `trainer.v1.sampler.custom_sampler` in stock modes and hands them `sampler_kwargs.poll_interval`
(seconds), since its own constructor argument of that name has no config key. They sample as verl's do, and note when.
"""

import time
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_oppo.trace_file import SPANS, trace_file

KEY = "trainer.v1.sampler.sampler_kwargs.poll_interval"


def poll_interval_of(sampler_kwargs: Any) -> float:
    """Raises ValueError if it is missing or not above 0."""
    value = (sampler_kwargs or {}).get("poll_interval")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{KEY} is {value!r}; allowed: seconds above 0")
    return float(value)


class _Timed:
    """Takes the poll interval from `sampler_kwargs` and notes when each step's sampling began and ended."""

    def __init__(self, *, sampler_kwargs: Any, **kwargs: Any) -> None:
        interval = poll_interval_of(sampler_kwargs)
        super().__init__(poll_interval=interval, sampler_kwargs=sampler_kwargs, **kwargs)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        started = time.time()
        sampled = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        trace = trace_file(SPANS)
        if trace is not None and partition_id != "val":
            trace.write({"step": global_steps, "sample": [started, time.time()], "scorers": {}})
        return sampled


class FastPollReplayBuffer(_Timed, ReplayBuffer):
    """For trainer mode `sync`."""


class FastPollReplayBufferAsync(_Timed, ReplayBufferAsync):
    """For trainer mode `colocate_async`."""
