"""What every scorer of ours does with its chunks and final calls, whatever engine computes: `PagedScorer`.

Subclassed by the scorers on verl's FSDP engines and on Megatron-Core. It checks the input, decides which positions come
next, keeps the cache and counts; a subclass runs one forward over the segments it is given. It knows neither Ray nor
the stream.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import numpy as np
import torch
from verl.utils.device import get_device_id

from verl_oppo.scoring import support
from verl_oppo.scoring.device_memory import free_device_bytes
from verl_oppo.scoring.paged_kv import Layout, PagedCache, Segment, dummy_segment
from verl_oppo.scoring.prefix_cache import FIRST_BLOCK, PrefixCache, as_ids
from verl_oppo.scoring.scorer import (
    CallReport,
    Chunk,
    PrefillReply,
    Scored,
    ScoreReply,
    ScorerSettings,
    ScorerStats,
    TokenIds,
    Trajectory,
)

Prepared = TypeVar("Prepared")


class PagedScorer(ABC):
    """Implements `scorer.Scorer` on one rank, but for the forward.

    Invariant: what `score` returns for a trajectory is a function of its final ids and the weights alone, within
    rounding; the cache decides only how much of it has to be computed.
    """

    def __init__(
        self, settings: ScorerSettings, kv: PagedCache, *, vocab_size: int, token_bytes: int, lookahead: int
    ) -> None:
        """`kv`: keys and values, `token_bytes` bytes per token on this rank; `lookahead`: see `PrefixCache`.

        Raises ValueError if the cache does not hold one longest trajectory.
        """
        self._settings = settings
        self._kv = kv
        self._vocab_size = vocab_size
        self._token_bytes = token_bytes
        num_blocks = support.cache_blocks(settings, token_bytes)
        self._cache = PrefixCache(num_blocks, settings.block_size, lookahead)
        self._prefill_total, self._score_total = CallReport(), CallReport()

    # What a subclass knows -------------------------------------------------------------------------------------------

    @abstractmethod
    def open_stream(self) -> None: ...

    @abstractmethod
    def close_stream(self) -> None: ...

    @abstractmethod
    def _layout(self, segments: list[Segment]) -> Layout:
        """Model inputs of one forward over these segments."""

    @abstractmethod
    def _forward(self, layout: Layout, segments: list[Segment]) -> list[np.ndarray]:
        """Outputs of each segment's tokens, float32 [new tokens]; none for a dummy row, whose segments are empty."""

    @abstractmethod
    def _eval_mode(self) -> AbstractContextManager:
        """Where forwards run: dropout off, weights on the device."""

    @abstractmethod
    def _group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks that a refused input concerns; None if this rank is the only one."""

    def _busiest_rank(self, amount: int) -> int:
        """Largest amount of any rank whose forwards are collective with this one's."""
        return self._largest_of_group(amount)

    def _pads_rows(self) -> bool:
        """Whether rows of a forward are padded to the longest, or packed."""
        return True

    def _weights_offloaded(self) -> bool:
        """Whether every forward streams the weights from host memory."""
        return False

    # The protocol ----------------------------------------------------------------------------------------------------

    def prefill(self, chunks: Iterable[Chunk]) -> PrefillReply:
        """See `scorer.Scorer`. Trajectories of one call never evict each other: what finds no room is left out."""
        with self._reporting(self._prefill_total) as report:
            ordered = self._agreed(lambda: self._checked_chunks(chunks))
            report.chunks_ignored = sum(not self._cache.extend(chunk) for chunk in ordered)
            known = list(dict.fromkeys(chunk.trajectory_id for chunk in ordered if chunk.trajectory_id in self._cache))
            report.trajectories = len(known)
            with self._eval_mode():
                self._prefill_known(known, report)
        return PrefillReply({each: self._cache.cached(each) for each in known if each in self._cache}, report)

    def score(self, trajectories: Sequence[Trajectory], keep: bool = False) -> ScoreReply:
        """See `scorer.Scorer`. Where the cache is too small for all, trajectories not yet scored lose theirs."""
        with self._reporting(self._score_total) as report:
            final = self._agreed(lambda: self._checked_trajectories(trajectories))
            found = {each: self._cache.rewrite(each, ids) for each, ids in final.items()}
            report.trajectories = len(final)
            with self._eval_mode():
                outputs = self._score_all(final, found, keep, report)
            report.tokens_cached = sum(found.values())
        return ScoreReply([Scored(each, outputs[each], found[each]) for each in final], report)

    def invalidate(self) -> None:
        self._cache.clear()
        self._kv.release()

    def drop(self, trajectory_ids: Iterable[str]) -> None:
        self._cache.drop(trajectory_ids)

    def stats(self) -> ScorerStats:
        block_bytes = self._settings.block_size * self._token_bytes
        return ScorerStats(
            prefill=self._prefill_total,
            score=self._score_total,
            cached_trajectories=len(self._cache),
            cached_tokens=self._cache.cached_tokens,
            cache_bytes_used=self._cache.used_blocks * block_bytes,
            cache_bytes_allocated=self._kv.nbytes,
            cache_bytes_limit=self._settings.cache_bytes,
            bytes_per_token=self._token_bytes,
            weights_offloaded=self._weights_offloaded(),
            device_free_bytes=free_device_bytes(),
        )

    # Input, checked before anything changes -----------------------------------------------------------------------

    def _checked_chunks(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Chunks in the order of their offsets, so that those reordered within a call close their own gaps."""
        checked = []
        for chunk in chunks:
            if isinstance(chunk.offset, bool) or chunk.offset != int(chunk.offset) or chunk.offset < 0:
                raise ValueError(
                    f"trajectory {chunk.trajectory_id}: chunk offset is {chunk.offset!r}, allowed is 0 or more"
                )
            ids = self._checked_ids(chunk.trajectory_id, chunk.token_ids)
            self._check_length(chunk.trajectory_id, chunk.offset + len(ids))
            checked.append(Chunk(chunk.trajectory_id, int(chunk.offset), ids))
        return sorted(checked, key=lambda chunk: chunk.offset)

    def _checked_trajectories(self, trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
        final: dict[str, np.ndarray] = {}
        for trajectory in trajectories:
            if trajectory.trajectory_id in final:
                raise ValueError(f"trajectory {trajectory.trajectory_id} is in one score call twice, allowed is once")
            ids = self._checked_ids(trajectory.trajectory_id, trajectory.token_ids)
            if len(ids) == 0:
                raise ValueError(f"trajectory {trajectory.trajectory_id} has 0 tokens, allowed is 1 or more")
            self._check_length(trajectory.trajectory_id, len(ids))
            final[trajectory.trajectory_id] = ids
        return final

    def _checked_ids(self, trajectory_id: str, token_ids: TokenIds) -> np.ndarray:
        try:
            ids = as_ids(token_ids)
        except ValueError as error:
            raise ValueError(f"trajectory {trajectory_id}: {error}") from error
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise ValueError(
                f"trajectory {trajectory_id}: token id {outside[0]}, allowed is 0 to {self._vocab_size - 1}, the "
                f"scoring model's vocabulary"
            )
        return ids

    def _check_length(self, trajectory_id: str, length: int) -> None:
        if length > self._settings.longest_trajectory:
            raise ValueError(
                f"trajectory {trajectory_id} has {length} tokens, allowed is {self._settings.key}.longest_trajectory, "
                f"{self._settings.longest_trajectory}"
            )

    # What to compute next -------------------------------------------------------------------------------------------

    def _prefill_known(self, known: list[str], report: CallReport) -> None:
        pending = [each for each in known if self._cache.missing(each)]
        while self._busiest_rank(len(pending)):
            batch = []
            for each in self._largest_first(pending):
                segment_length = self._fitting(each, batch)
                if segment_length == 0:
                    break
                if self._cache.make_room(each, self._cache.cached(each) + segment_length, keep=known):
                    batch.append((each, segment_length))
                else:
                    report.tokens_without_room += self._cache.missing(each)
                    pending.remove(each)
            self._compute(batch, report)
            pending = [each for each in pending if self._cache.missing(each)]

    def _score_all(
        self, final: dict[str, np.ndarray], found: dict[str, int], keep: bool, report: CallReport
    ) -> dict[str, np.ndarray]:
        """Outputs of each trajectory; sets `found` to 0 where a trajectory lost its cache before its turn came."""
        outputs: dict[str, np.ndarray] = {}
        pending = list(final)
        while True:
            for each in [each for each in pending if each in self._cache and not self._cache.missing(each)]:
                outputs[each] = self._cache.outputs(each)
                pending.remove(each)
                if not keep:
                    self._cache.drop([each])
            if not self._busiest_rank(len(pending)):
                return outputs
            for each in [each for each in pending if each not in self._cache]:
                found[each] = self._cache.rewrite(each, final[each])
            self._compute(self._next_to_score(pending), report)

    def _next_to_score(self, pending: list[str]) -> list[tuple[str, int]]:
        """The next rows; the first always finds room, at the cost of others' cache if need be."""
        batch: list[tuple[str, int]] = []
        for each in self._largest_first(pending):
            segment_length = self._fitting(each, batch)
            if segment_length == 0:
                break
            length = self._cache.cached(each) + segment_length
            if not self._cache.make_room(each, length, keep=pending):
                if batch:
                    break
                fits = self._cache.make_room(each, length, keep=())
                assert fits, "the cache holds one longest trajectory"
            batch.append((each, segment_length))
        return batch

    def _largest_first(self, pending: Collection[str]) -> list[str]:
        """Rows of like size together, so that little of a batch is padding."""
        return sorted(pending, key=lambda each: (-self._cache.missing(each), -self._cache.cached(each)))

    def _fitting(self, trajectory_id: str, batch: list[tuple[str, int]]) -> int:
        """New tokens that this trajectory may add to the batch: 0 if the batch is full, cut if it alone is too long."""
        settings = self._settings
        new = min(self._cache.missing(trajectory_id), settings.max_tokens_per_forward)
        if not batch:
            return new
        lengths = [length for _, length in batch] + [new]
        contexts = [self._cache.cached(each) + length for each, length in batch]
        contexts.append(self._cache.cached(trajectory_id) + new)
        if self._pads_rows():
            tokens, context = len(lengths) * max(lengths), len(contexts) * max(contexts)
        else:
            tokens, context = sum(lengths), sum(contexts)
        full = tokens > settings.max_tokens_per_forward or context > settings.max_context_per_forward
        return 0 if full else new

    # The forward ----------------------------------------------------------------------------------------------------

    def _compute(self, batch: list[tuple[str, int]], report: CallReport) -> None:
        """One collective forward: the next positions of each row of the batch, or a dummy row."""
        segments = [self._segment(each, length) for each, length in batch]
        layout = self._layout(segments or [dummy_segment()])
        outputs = self._forward(layout, segments)
        for (each, _), row in zip(batch, outputs, strict=True):
            self._cache.commit(each, row)
        computed = sum(length for _, length in batch)
        report.forwards += 1
        report.tokens_computed += computed
        report.tokens_padded += layout.tokens - computed

    def _segment(self, trajectory_id: str, length: int) -> Segment:
        ids, start = self._cache.known(trajectory_id), self._cache.cached(trajectory_id)
        stop = start + length
        following = slice(start + self._cache.lookahead, stop + self._cache.lookahead)
        return Segment(ids[start:stop], ids[following], self._cache.slots(trajectory_id, 0, stop))

    def _slots_wanted(self) -> int:
        """Slots for every block dealt out; at least twice as many as before, so that growing copies little."""
        block_size = self._settings.block_size
        needed, limit = self._cache.block_limit * block_size, (self._cache.num_blocks + FIRST_BLOCK) * block_size
        if needed <= self._kv.num_slots:
            return self._kv.num_slots
        return min(limit, max(needed, 2 * self._kv.num_slots))

    def _check_cache_size(self) -> None:
        """Runs a dummy row: the model must use the cache, and as much of it as its configuration says."""
        with self._eval_mode():
            self._compute([], CallReport())
        cached_bytes = self._kv.nbytes // self._kv.num_slots
        self._kv.release()
        if cached_bytes != self._token_bytes:
            raise ValueError(
                f"{self._settings.key} cannot stream: the model caches {cached_bytes} bytes per token, allowed is "
                f"{self._token_bytes}, what its configuration says"
            )

    # Ranks and reports -----------------------------------------------------------------------------------------------

    def _agreed(self, prepare: Callable[[], Prepared]) -> Prepared:
        """What `prepare` returns; where it fails on one rank all ranks say so, before the first forward can hang."""
        refusal = None
        try:
            prepared = prepare()
        except ValueError as error:
            refusal = str(error)
        if not self._largest_of_group(int(refusal is not None)):
            return prepared
        group = self._group()
        refusals = [refusal]
        if group is not None:
            refusals *= torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(refusals, refusal, group=group)
        raise ValueError(
            "; ".join(f"rank {rank} of the scorer: {each}" for rank, each in enumerate(refusals) if each is not None)
        )

    def _largest_of_group(self, amount: int) -> int:
        group = self._group()
        if group is None:
            return amount
        largest = torch.tensor([amount], device=get_device_id())
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        return int(largest.item())

    @contextmanager
    def _reporting(self, total: CallReport) -> Iterator[CallReport]:
        report = CallReport()
        started, evicted = time.perf_counter(), self._cache.evicted
        yield report
        report.evicted = self._cache.evicted - evicted
        report.seconds = time.perf_counter() - started
        total.add(report)
