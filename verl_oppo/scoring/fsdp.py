"""The scorer on verl's FSDP engines: values of a `value_model` engine, log-probs of a `language_model` engine.

Built by the worker classes in `workers`, one per rank around that rank's engine. What is computed is verl's own:
the engine's module, its autocast and its `prepare_model_outputs`; only the inputs differ, since rows bring a cache.
It knows neither Ray nor the stream.

Every forward is collective (FSDP gathers each layer's weights from all ranks), so all ranks run as many as the busiest
one: a rank with nothing left runs a dummy row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from verl_oppo.scoring import support
from verl_oppo.scoring.device_memory import free_device_bytes
from verl_oppo.scoring.paged_kv import Layout, PagedCache, Segment, dummy_segment, packed_layout, padded_layout
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


class FSDPScorer:
    """Implements `scorer.Scorer` on one rank's engine.

    Invariant: what `score` returns for a trajectory is a function of its final ids and the weights alone, within
    rounding; the cache decides only how much of it has to be computed.
    """

    def __init__(self, engine: FSDPEngineWithLMHead, settings: ScorerSettings) -> None:
        """`engine` must be initialized. Collective. Raises ValueError for what cannot be served, see `support`."""
        support.check_supported(engine.model_config, engine.engine_config, settings.key)
        config = engine.module.config
        support.check_attention_implementation(config._attn_implementation, settings.key)
        if hasattr(engine.module, "v_head"):
            raise ValueError(
                f"{settings.key} cannot stream: the value head is trl's v_head, allowed is a token classification model"
            )
        self._engine = engine
        self._settings = settings
        self._attention = config._attn_implementation
        self._dtype = engine._autocast_dtype
        self._vocab_size = config.get_text_config().vocab_size
        self._token_bytes = support.bytes_per_token(config, self._dtype)
        num_blocks = support.cache_blocks(settings, self._token_bytes)
        is_value_model = isinstance(engine, FSDPEngineWithValueHead)
        self._output_name = "values" if is_value_model else "log_probs"
        self._cache = PrefixCache(num_blocks, settings.block_size, lookahead=0 if is_value_model else 1)
        self._kv = PagedCache(config.get_text_config().num_hidden_layers)
        self._stream_open = False
        self._prefill_total, self._score_total = CallReport(), CallReport()
        self._check_cache_size()

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

    def open_stream(self) -> None:
        self._stream_open = True
        if self._engine.is_param_offload_enabled:
            self._move_weights(get_device_name())

    def close_stream(self) -> None:
        if self._stream_open and self._engine.is_param_offload_enabled:
            self._move_weights("cpu")
        self._stream_open = False

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
            weights_offloaded=support.streams_weights(self._engine),
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
        if self._attention in support.PACKED_ATTENTION:
            tokens, context = sum(lengths), sum(contexts)
        else:
            tokens, context = len(lengths) * max(lengths), len(contexts) * max(contexts)
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

    def _layout(self, segments: list[Segment]) -> Layout:
        if self._attention in support.PACKED_ATTENTION:
            return packed_layout(segments, get_device_id())
        return padded_layout(segments, get_device_id(), self._dtype if self._attention == "eager" else None)

    @torch.no_grad()
    def _forward(self, layout: Layout, segments: list[Segment]) -> list[np.ndarray]:
        """Outputs of each segment's tokens, float32 [new tokens]; none for a dummy row."""
        self._kv.lay_out(layout, self._slots_wanted())
        autocast = (
            nullcontext()
            if self._dtype == torch.float32
            else torch.autocast(device_type=get_device_name(), dtype=self._dtype)
        )
        with autocast:
            output = self._engine.module(
                input_ids=layout.input_ids,
                position_ids=layout.position_ids,
                past_key_values=self._kv,
                use_cache=True,
                **layout.attention_kwargs,
            )
            if not segments:
                return []
            outputs = self._head_outputs(layout.unpad(output.logits)[None], segments)
        return np.split(outputs, np.cumsum([segment.new for segment in segments])[:-1])

    def _head_outputs(self, logits: torch.Tensor, segments: list[Segment]) -> np.ndarray:
        """What verl makes of the logits [1, tokens, labels or vocabulary] of a packed batch, float32 [tokens]."""
        ids, labels = (
            torch.from_numpy(np.concatenate(parts)).to(logits.device)
            for parts in ([segment.ids for segment in segments], [segment.labels for segment in segments])
        )
        offsets = torch.tensor(np.cumsum([0, *(segment.new for segment in segments)]), device=logits.device)
        micro_batch = tu.get_tensordict(
            {"input_ids": torch.nested.nested_tensor_from_jagged(ids, offsets)},
            {"use_remove_padding": True, "use_fused_kernels": False, "pad_mode": DatasetPadMode.NO_PADDING},
        )
        temperature = self._settings.temperature
        output_args = {
            "temperature_is_one": float(temperature) == 1.0,
            "temperature_rmpad": torch.full(ids.shape, temperature, device=logits.device),
            "input_ids_rmpad_rolled": labels,
            "pad_size": 0,
        }
        model_output = self._engine.prepare_model_outputs(
            SimpleNamespace(logits=logits), output_args, micro_batch, logits_processor_func=None
        )
        return model_output[self._output_name].values().float().cpu().numpy()

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

    # Ranks, weights, reports ----------------------------------------------------------------------------------------

    def _agreed(self, prepare: Callable[[], Prepared]) -> Prepared:
        """What `prepare` returns; where it fails on one rank all ranks say so, before the first forward can hang."""
        refusal = None
        try:
            prepared = prepare()
        except ValueError as error:
            refusal = str(error)
        if not self._busiest_rank(int(refusal is not None)):
            return prepared
        refusals = [refusal] * self._engine.get_data_parallel_size()
        if len(refusals) > 1:
            torch.distributed.all_gather_object(refusals, refusal, group=self._engine.get_data_parallel_group())
        raise ValueError(
            "; ".join(f"rank {rank} of the scorer: {each}" for rank, each in enumerate(refusals) if each is not None)
        )

    def _busiest_rank(self, amount: int) -> int:
        """Largest amount of any rank."""
        if self._engine.get_data_parallel_size() == 1:
            return amount
        largest = torch.tensor([amount], device=get_device_id())
        group = self._engine.get_data_parallel_group()
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        return int(largest.item())

    def _eval_mode(self) -> AbstractContextManager:
        """verl's evaluation mode; while the stream is open the weights stay on the device after it."""
        if not self._stream_open:
            return self._engine.eval_mode()
        if self._engine.is_param_offload_enabled:
            # verl's own calls to the engine offload at their end, whether a stream is open or not.
            on_device = next(self._engine.module.parameters()).device.type == get_device_name()
            if not on_device:
                self._move_weights(get_device_name())
        return self._engine.eval_mode(disable_auto_offload=True)

    def _move_weights(self, device: str) -> None:
        self._engine.to(device, model=True, optimizer=False, grad=False)

    @contextmanager
    def _reporting(self, total: CallReport) -> Iterator[CallReport]:
        report = CallReport()
        started, evicted = time.perf_counter(), self._cache.evicted
        yield report
        report.evicted = self._cache.evicted - evicted
        report.seconds = time.perf_counter() - started
        total.add(report)
