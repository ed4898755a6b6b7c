"""Which tokens of which trajectory are cached, and in which blocks: the bookkeeping of a scorer's KV cache.

Used by the scorers. It knows neither tensors nor models: a position is cached when its keys and values lie in a block
and its output is known, and whoever computes them says so with `commit`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from verl_oppo.scoring.scorer import Chunk, TokenIds

FIRST_BLOCK = 1
"""Block 0 belongs to nobody: padding is written to it and read from it."""


@dataclass
class CachedTrajectory:
    """Invariant: the first `len(outputs)` positions are cached, and `ids[: len(outputs) + lookahead]` decided them."""

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    outputs: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    blocks: list[int] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return len(self.outputs)


def common_prefix_length(left: np.ndarray, right: np.ndarray) -> int:
    """Number of leading elements that are equal."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def as_ids(token_ids: TokenIds) -> np.ndarray:
    """Token ids as int64 [tokens]; raises ValueError if they are not a flat list of integers."""
    ids = np.asarray(token_ids)
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token_ids has shape {ids.shape} and type {ids.dtype}, allowed is a flat list of integers")
    return ids.astype(np.int64, copy=False)


class PrefixCache:
    """Blocks of `block_size` tokens, dealt out to trajectories and taken back from the least recently used.

    Invariant: a block belongs to one trajectory or is free, and never more than `num_blocks` are dealt out.
    """

    def __init__(self, num_blocks: int, block_size: int, lookahead: int) -> None:
        """`lookahead`: tokens after a position that its output depends on (value 0, next token's log-prob 1)."""
        assert num_blocks > 0 and block_size > 0 and lookahead >= 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.lookahead = lookahead
        self.evicted = 0
        self._trajectories: OrderedDict[str, CachedTrajectory] = OrderedDict()
        self._returned: list[int] = []
        self._next_new = FIRST_BLOCK

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._trajectories

    def __len__(self) -> int:
        return len(self._trajectories)

    @property
    def free_blocks(self) -> int:
        return len(self._returned) + FIRST_BLOCK + self.num_blocks - self._next_new

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks

    @property
    def cached_tokens(self) -> int:
        return sum(trajectory.cached for trajectory in self._trajectories.values())

    @property
    def block_limit(self) -> int:
        """Every block ever dealt out lies below this number."""
        return self._next_new

    def known(self, trajectory_id: str) -> np.ndarray:
        """Token ids known of a trajectory, int64 [tokens], whether cached yet or not."""
        return self._trajectories[trajectory_id].ids

    def cached(self, trajectory_id: str) -> int:
        """Positions cached, 0 for an unknown trajectory."""
        trajectory = self._trajectories.get(trajectory_id)
        return trajectory.cached if trajectory else 0

    def outputs(self, trajectory_id: str) -> np.ndarray:
        """Outputs of the cached positions, float32 [positions]."""
        return self._trajectories[trajectory_id].outputs

    def extend(self, chunk: Chunk) -> bool:
        """Takes in a chunk's token ids; False if an earlier chunk is missing, and then nothing changes.

        Where a chunk contradicts what is known, the chunk is right: the trajectory was restarted or tokenised anew.
        A chunk that only repeats known ids takes nothing away.
        """
        ids = as_ids(chunk.token_ids)
        trajectory = self._trajectories.get(chunk.trajectory_id)
        known = trajectory.ids if trajectory else np.empty(0, dtype=np.int64)
        if chunk.offset > len(known):
            return False
        agreed = chunk.offset + common_prefix_length(known[chunk.offset :], ids)
        if agreed < chunk.offset + len(ids):
            self.rewrite(chunk.trajectory_id, np.concatenate([known[: chunk.offset], ids]))
        elif trajectory:
            self._trajectories.move_to_end(chunk.trajectory_id)
        return True

    def rewrite(self, trajectory_id: str, ids: np.ndarray) -> int:
        """Replaces the known ids, crops the cache to what both have in common and returns the positions left."""
        trajectory = self._trajectories.setdefault(trajectory_id, CachedTrajectory())
        common = common_prefix_length(trajectory.ids, ids)
        trajectory.ids = ids
        trajectory.outputs = trajectory.outputs[: max(0, common - self.lookahead)]
        needed = self._blocks_for(trajectory.cached)
        self._give_back(trajectory.blocks[needed:])
        del trajectory.blocks[needed:]
        self._trajectories.move_to_end(trajectory_id)
        return trajectory.cached

    def missing(self, trajectory_id: str) -> int:
        """Positions that the known ids decide and that are not cached yet."""
        trajectory = self._trajectories[trajectory_id]
        return max(0, len(trajectory.ids) - self.lookahead - trajectory.cached)

    def make_room(self, trajectory_id: str, length: int, keep: Collection[str]) -> bool:
        """Blocks for the first `length` positions, taken from others, least recently used first, if need be.

        Never takes from a trajectory in `keep`; False, and nothing changes, if it would have to.
        """
        trajectory = self._trajectories[trajectory_id]
        needed = self._blocks_for(length) - len(trajectory.blocks)
        victims = []
        available = self.free_blocks
        for other_id, other in self._trajectories.items():
            if available >= needed:
                break
            if other.blocks and other_id != trajectory_id and other_id not in keep:
                victims.append(other_id)
                available += len(other.blocks)
        if available < needed:
            return False
        self.evicted += len(victims)
        self.drop(victims)
        trajectory.blocks.extend(self._take() for _ in range(needed))
        return True

    def slots(self, trajectory_id: str, start: int, stop: int) -> np.ndarray:
        """Slots (block * block_size + place in it) of positions start to stop - 1, int64 [positions]."""
        blocks = np.asarray(self._trajectories[trajectory_id].blocks, dtype=np.int64)
        positions = np.arange(start, stop)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def commit(self, trajectory_id: str, outputs: np.ndarray) -> None:
        """The next `len(outputs)` positions are in their blocks; `outputs`: float32 [positions]."""
        trajectory = self._trajectories[trajectory_id]
        trajectory.outputs = np.concatenate([trajectory.outputs, outputs.astype(np.float32, copy=False)])
        assert trajectory.cached + self.lookahead <= len(trajectory.ids)
        assert self._blocks_for(trajectory.cached) <= len(trajectory.blocks)

    def drop(self, trajectory_ids: Iterable[str]) -> None:
        """Forgets trajectories and frees their blocks; unknown ids are fine."""
        for trajectory_id in trajectory_ids:
            trajectory = self._trajectories.pop(trajectory_id, None)
            if trajectory:
                self._give_back(trajectory.blocks)

    def clear(self) -> None:
        """Forgets everything."""
        self._trajectories.clear()
        self._returned.clear()
        self._next_new = FIRST_BLOCK

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _take(self) -> int:
        """Lowest free block, so that the tensors behind the blocks stay as small as the cache ever was."""
        if self._returned:
            return heapq.heappop(self._returned)
        self._next_new += 1
        return self._next_new - 1

    def _give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._returned, block)
