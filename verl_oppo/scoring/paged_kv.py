"""Keys and values of a scorer's cache, and the layout that lets one forward serve trajectories of any cached length.

Used by `paged_scorer` and its subclasses. It knows tensors and transformers' cache interface; which block belongs to
which trajectory is `prefix_cache`'s business: here a token is a slot number.

Legend: B rows, Q new tokens of the longest row, K cached plus new tokens of the longest row, H KV heads, D head size,
T new tokens of all rows, S cached plus new tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

PADDING_SLOT = 0
"""Padding tokens are written here and read from here: always finite, never attended to by a real token."""


@dataclass(frozen=True)
class Segment:
    """The new tokens of one row, and where its keys and values lie. All arrays int64."""

    ids: np.ndarray
    """[new tokens]"""
    labels: np.ndarray
    """[new tokens] The token after each of them; any valid id where the model's head ignores it."""
    slots: np.ndarray
    """[cached + new tokens] The new tokens' slots come last."""

    @property
    def new(self) -> int:
        return len(self.ids)

    @property
    def context(self) -> int:
        return len(self.slots)

    @property
    def cached(self) -> int:
        return self.context - self.new


def dummy_segment() -> Segment:
    """One padding token, for a rank that has nothing to do in a collective forward."""
    zero = np.zeros(1, dtype=np.int64)
    return Segment(ids=zero, labels=zero, slots=np.full(1, PADDING_SLOT, dtype=np.int64))


@dataclass(frozen=True)
class Layout:
    """Model inputs of one forward over ragged rows. Tensors on the model's device."""

    input_ids: torch.Tensor
    """[B, Q] padded, [1, T] packed"""
    position_ids: torch.Tensor
    """as `input_ids`"""
    write_slots: torch.Tensor
    """[B * Q] padded, [T] packed"""
    read_slots: torch.Tensor
    """[B, K] padded, [1, S] packed"""
    attention_kwargs: dict[str, torch.Tensor | int | None]
    """`attention_mask`, and for a packed row what flash attention needs to know about its rows."""
    real: torch.Tensor | None
    """[B, Q] bool, which tokens are no padding; None if none is."""
    tokens: int
    """Padding included."""

    def unpad(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs [B, Q, ...] or [1, T, ...] of the real tokens, row by row: [T, ...]."""
        return outputs.flatten(0, 1) if self.real is None else outputs[self.real]


def padded_layout(segments: list[Segment], device: torch.device | str, additive: torch.dtype | None = None) -> Layout:
    """One row per segment, padded on the right, with a 4D mask: for sdpa and eager attention.

    The mask is boolean (True is attended to) as sdpa takes it, or of the type `additive` as eager attention adds it:
    in the model's compute type, since FSDP casts floating inputs and float32's minimum becomes -inf in bfloat16.
    """
    rows, queries = len(segments), max(segment.new for segment in segments)
    keys = max(segment.context for segment in segments)
    ids = np.zeros((rows, queries), dtype=np.int64)
    write = np.full((rows, queries), PADDING_SLOT, dtype=np.int64)
    read = np.full((rows, keys), PADDING_SLOT, dtype=np.int64)
    for row, segment in enumerate(segments):
        ids[row, : segment.new] = segment.ids
        write[row, : segment.new] = segment.slots[segment.cached :]
        read[row, : segment.context] = segment.slots
    cached = torch.tensor([[segment.cached] for segment in segments], device=device)
    context = torch.tensor([[segment.context] for segment in segments], device=device)
    # A padding token takes the last real position and so attends to real keys: a row of an all-False mask is NaN.
    positions = torch.minimum(cached + torch.arange(queries, device=device), context - 1)
    attended = torch.arange(keys, device=device) <= positions[..., None]
    if additive is not None:
        attended = torch.zeros_like(attended, dtype=additive).masked_fill(~attended, torch.finfo(additive).min)
    return Layout(
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=positions,
        write_slots=torch.from_numpy(write.reshape(-1)).to(device),
        read_slots=torch.from_numpy(read).to(device),
        attention_kwargs={"attention_mask": attended[:, None]},
        real=torch.arange(queries, device=device) < context - cached,
        tokens=rows * queries,
    )


def packed_layout(segments: list[Segment], device: torch.device | str) -> Layout:
    """All rows in one row without padding: for flash attention, whose kernels take no 4D mask.

    The cumulative lengths must be given: derived from `position_ids` they would assume that every row starts at 0
    (transformers' `_prepare_from_posids`). Causal attention of fewer queries than keys is aligned at the end, as here.
    """

    def joined(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    def cumulative(lengths: list[int]) -> torch.Tensor:
        return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)

    new, context = [segment.new for segment in segments], [segment.context for segment in segments]
    return Layout(
        input_ids=joined([segment.ids for segment in segments])[None],
        position_ids=joined([np.arange(segment.cached, segment.context) for segment in segments])[None],
        write_slots=joined([segment.slots[segment.cached :] for segment in segments]),
        read_slots=joined([segment.slots for segment in segments])[None],
        attention_kwargs={
            "attention_mask": None,
            "cu_seq_lens_q": cumulative(new),
            "cu_seq_lens_k": cumulative(context),
            "max_length_q": max(new),
            "max_length_k": max(context),
        },
        real=None,
        tokens=sum(new),
    )


class PagedLayer(CacheLayerMixin):
    """Keys and values [slots, H, D] of one attention layer.

    Invariant: `update` returns what the layout's rows attend to, their new tokens included, in transformers' shape.
    """

    def __init__(self, cache: PagedCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (self._resized(None, states) for states in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes [B, H, Q, D] and returns [B, H, K, D]; packed, [1, H, T, D] and [1, H, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif len(self.keys) < self._cache.num_slots:
            self.keys = self._resized(self.keys, key_states)
            self.values = self._resized(self.values, value_states)
        assert key_states.dtype == self.dtype, f"cache holds {self.dtype}, the model now computes in {key_states.dtype}"
        return self._exchange(self.keys, key_states), self._exchange(self.values, value_states)

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Only flash attention's mask function asks, and it makes no mask of them: the row lengths are in kwargs."""
        return self._cache.layout.read_slots.shape[1], 0

    def get_max_cache_shape(self) -> int:
        return -1

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0

    def _resized(self, old: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
        heads, size = states.shape[1], states.shape[3]
        new = states.new_empty(self._cache.num_slots, heads, size)
        kept = 0 if old is None else len(old)
        if old is None:
            new[PADDING_SLOT] = 0
        else:
            new[:kept] = old
        return new

    def _exchange(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        layout = self._cache.layout
        store.index_copy_(0, layout.write_slots, states.transpose(1, 2).flatten(0, 1))
        attended = store.index_select(0, layout.read_slots.flatten())
        return attended.view(*layout.read_slots.shape, *store.shape[1:]).transpose(1, 2)


class PagedCache(Cache):
    """The KV cache of one model, all trajectories in one tensor per layer.

    Invariant: during a forward, `layout` says where its new tokens go and what its rows read. Unlike transformers' own
    caches it outlives the batch: rows come and go with the layout, the tensors stay.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_slots = 0
        self._layout: Layout | None = None
        super().__init__(layers=[PagedLayer(self) for _ in range(num_layers)])

    @property
    def layout(self) -> Layout:
        assert self._layout is not None, "the cache is used outside of a forward that laid it out"
        return self._layout

    @property
    def nbytes(self) -> int:
        """Bytes of device memory taken."""
        return sum(layer.nbytes for layer in self.layers)

    def lay_out(self, layout: Layout, num_slots: int) -> None:
        """Prepares the next forward; layers grow to `num_slots` as they are reached, one at a time."""
        self._layout = layout
        self.num_slots = max(self.num_slots, num_slots)

    def release(self) -> None:
        """Frees the memory and whatever was cached in it."""
        self.num_slots = 0
        self._layout = None
        self.layers = [PagedLayer(self) for _ in self.layers]
