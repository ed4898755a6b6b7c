"""The scorer protocol and the plain data that goes in and out of it.

Called by the hub and the pump (chunks in), the trainer (final calls) and the worker classes that implement it. It knows
neither torch nor verl, so that the streaming side imports it at no cost, and nothing about tokenizers: every position
is a token of the scoring model's own input.

Streaming is only ever a cache warm-up: `prefill` may ignore any chunk, `score` computes on the final token ids and
keeps of the cache only what those ids confirm (paper, section 3.1, intra-step overlap).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

TokenIds = Sequence[int] | np.ndarray
"""Token ids of one sequence, shape [tokens]."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one unfinished trajectory, as the scoring model reads them.

    `offset` is the absolute position of `token_ids[0]`; the prompt starts at 0, so a trajectory's first chunk brings
    its prompt along.
    """

    trajectory_id: str
    offset: int
    token_ids: TokenIds


@dataclass(frozen=True)
class Trajectory:
    """Final token ids, prompt and response, of one finished trajectory."""

    trajectory_id: str
    token_ids: TokenIds


@dataclass(frozen=True)
class ScorerSettings:
    """Sizes of one scorer, per data-parallel rank. `key` is the config group that error messages name."""

    cache_bytes: int
    """Upper bound of the KV cache, bytes. Raise it when `evicted` or `tokens_without_room` of the stats grow."""
    longest_trajectory: int
    """Tokens of the longest possible input: prompt + response + what a reward model's template adds."""
    block_size: int = 64
    """Tokens a block of the cache holds: cached lengths round up to it."""
    max_tokens_per_forward: int = 8192
    """New tokens of one forward, padding included. Lower it when a forward runs out of memory."""
    max_context_per_forward: int = 65536
    """Cached plus new tokens of one forward, padding included; a single longer trajectory still gets its forward."""
    temperature: float = 1.0
    """Divides the logits of log-probs, as `actor_rollout_ref.rollout.temperature` does; values ignore it."""
    key: str = "trainer.v1.oppo.intra_step"

    def __post_init__(self) -> None:
        minimum_of = {
            "cache_bytes": 1,
            "longest_trajectory": 1,
            "block_size": 1,
            "max_tokens_per_forward": 1,
            "max_context_per_forward": 1,
        }
        for name, minimum in minimum_of.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ValueError(f"{self.key}.{name} is {value!r}, allowed is an integer of {minimum} or more")
        if not self.temperature > 0:
            raise ValueError(f"{self.key}.temperature is {self.temperature!r}, allowed is a number above 0")


@dataclass
class CallReport:
    """What one prefill or score call of one rank did."""

    trajectories: int = 0
    tokens_computed: int = 0
    """Positions that went through the model, padding not counted."""
    tokens_padded: int = 0
    """Positions that only filled up a batch."""
    tokens_cached: int = 0
    """Positions that a score call found cached; 0 for prefill."""
    tokens_without_room: int = 0
    """Positions that prefill left out because the cache was full of trajectories of the same call."""
    chunks_ignored: int = 0
    """Chunks behind a gap: an earlier chunk is missing."""
    evicted: int = 0
    """Trajectories whose cache had to go for another one's."""
    forwards: int = 0
    """Collective forwards, those with only a dummy row included: equal on all ranks."""
    seconds: float = 0.0

    def add(self, other: CallReport) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class PrefillReply:
    """`cached`: positions now cached, for each trajectory of the call that still has a cache."""

    cached: dict[str, int]
    report: CallReport


@dataclass(frozen=True)
class Scored:
    """The outputs of one final call.

    `outputs`: float32 [positions]. A value model gives the value at each position of the final ids; a language model
    gives at position p the log-prob of token p + 1, so it has one output fewer than tokens.
    """

    trajectory_id: str
    outputs: np.ndarray
    cached_tokens: int
    """Positions, prompt included, that this call found cached."""

    @property
    def last(self) -> float:
        """Value at the last token: the score of a reward model."""
        return float(self.outputs[-1])

    def response(self, prompt_length: int, response_length: int) -> np.ndarray:
        """Outputs that belong to the response tokens, shape [response_length].

        Shifted left by one as `verl.workers.utils.padding.response_from_nested` does, for values and log-probs alike.
        """
        if prompt_length < 1:
            raise ValueError(
                f"trajectory {self.trajectory_id}: prompt_length is {prompt_length!r}, allowed is 1 or more"
            )
        first = prompt_length - 1
        if response_length < 0 or first + response_length > len(self.outputs):
            raise ValueError(
                f"trajectory {self.trajectory_id}: response_length is {response_length!r} after a prompt of "
                f"{prompt_length}, allowed is 0 to {len(self.outputs) - first}"
            )
        return self.outputs[first : first + response_length]

    def cached_response_tokens(self, prompt_length: int) -> int:
        """Response tokens found cached: the numerator of `oppo/overlap/cached_token_ratio`."""
        return max(0, self.cached_tokens - prompt_length)


@dataclass
class ScoreReply:
    """`scored` is in the order of the call's trajectories."""

    scored: list[Scored]
    report: CallReport


@dataclass
class ScorerStats:
    """Totals of one rank since its scorer was built, and the cache's present size."""

    prefill: CallReport = field(default_factory=CallReport)
    score: CallReport = field(default_factory=CallReport)
    cached_trajectories: int = 0
    cached_tokens: int = 0
    cache_bytes_used: int = 0
    """Bytes of blocks that hold tokens."""
    cache_bytes_allocated: int = 0
    """Bytes of memory taken; it only falls with `invalidate`."""
    cache_bytes_limit: int = 0
    bytes_per_token: int = 0
    weights_offloaded: bool = False
    """Whether every forward streams the weights from host memory: then streaming is not worth it on a GPU."""
    device_free_bytes: int | None = None
    """Bytes that this rank could still allocate on its device; None on a CPU."""


class Scorer(Protocol):
    """One rank of a scorer.

    `prefill` and `score` are collective: every rank is called, with its own (maybe empty) list, in the same order.
    """

    def prefill(self, chunks: Iterable[Chunk]) -> PrefillReply:
        """Computes what the chunks add to the cache. Raises ValueError on ids outside the vocabulary."""
        ...

    def score(self, trajectories: Sequence[Trajectory], keep: bool = False) -> ScoreReply:
        """Outputs on the final ids; the trajectories' cache is freed unless `keep`. Raises ValueError on bad input."""
        ...

    def invalidate(self) -> None:
        """Forgets everything and frees the memory: the weights have changed."""
        ...

    def drop(self, trajectory_ids: Iterable[str]) -> None:
        """Forgets these trajectories; unknown ids are fine."""
        ...

    def open_stream(self) -> None:
        """Brings offloaded weights to the device until `close_stream`."""
        ...

    def close_stream(self) -> None:
        """Undoes `open_stream`; the cache stays."""
        ...

    def stats(self) -> ScorerStats: ...
