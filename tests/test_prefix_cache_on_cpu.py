"""The scorer's prefix cache: chunks in any state, crops, least-recently-used eviction, and blocks that never mix."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_oppo.scoring.prefix_cache import FIRST_BLOCK, PrefixCache, as_ids, common_prefix_length
from verl_oppo.scoring.scorer import Chunk

BLOCK_SIZE = 4


class Computed:
    """A cache together with the "keys and values" behind its slots, each one the tuple of ids that decides it."""

    def __init__(self, num_blocks: int = 16, lookahead: int = 0) -> None:
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE, lookahead)
        self.memory: dict[int, tuple[int, ...]] = {}

    def compute(self, trajectory_id: str, keep: Sequence[str] = ()) -> bool:
        """What a scorer does with a trajectory's missing positions; False if there is no room for them."""
        cache = self.cache
        start = cache.cached(trajectory_id)
        stop = start + cache.missing(trajectory_id)
        if not cache.make_room(trajectory_id, stop, keep):
            return False
        ids = cache.known(trajectory_id)
        slots = cache.slots(trajectory_id, 0, stop)
        for position in range(start, stop):
            assert slots[position] >= FIRST_BLOCK * BLOCK_SIZE
            self.memory[int(slots[position])] = tuple(ids[: position + 1])
        for position in range(stop):
            assert self.memory[int(slots[position])] == tuple(ids[: position + 1])
        cache.commit(trajectory_id, np.array([output_of(ids, p, cache.lookahead) for p in range(start, stop)]))
        return True

    def prefill(self, trajectory_id: str, offset: int, ids: Sequence[int]) -> bool:
        taken = self.cache.extend(Chunk(trajectory_id, offset, ids))
        return taken and (trajectory_id not in self.cache or self.compute(trajectory_id))


def output_of(ids: np.ndarray, position: int, lookahead: int) -> float:
    """A number that all ids up to position + lookahead decide, exact in float32."""
    return float(hash(tuple(ids[: position + 1 + lookahead].tolist())) % 2**20)


def expected_outputs(ids: Sequence[int], lookahead: int) -> list[float]:
    return [output_of(np.array(ids), position, lookahead) for position in range(len(ids) - lookahead)]


def test_a_value_is_cached_at_every_position_and_a_log_prob_at_all_but_the_last():
    for lookahead, cached in ((0, 7), (1, 6)):
        computed = Computed(lookahead=lookahead)
        assert computed.prefill("a", 0, [3, 1, 4, 1])
        assert computed.prefill("a", 4, [5, 9, 2])
        assert computed.cache.cached("a") == cached
        assert computed.cache.missing("a") == 0
        assert computed.cache.outputs("a").tolist() == expected_outputs([3, 1, 4, 1, 5, 9, 2], lookahead)


def test_a_chunk_behind_a_gap_is_ignored():
    computed = Computed()
    assert not computed.prefill("a", 4, [5, 9])
    assert "a" not in computed.cache
    assert computed.prefill("a", 0, [3, 1, 4, 1])
    assert not computed.prefill("a", 5, [9])
    assert computed.cache.known("a").tolist() == [3, 1, 4, 1]


def test_a_repeated_chunk_takes_nothing_away():
    computed = Computed()
    computed.prefill("a", 0, range(10))
    assert computed.prefill("a", 0, range(6))
    assert computed.prefill("a", 4, range(4, 10))
    assert computed.cache.cached("a") == 10


def test_a_chunk_that_contradicts_replaces_what_comes_after_and_keeps_the_common_prefix():
    computed = Computed()
    computed.prefill("a", 0, range(10))
    assert computed.cache.extend(Chunk("a", 4, [4, 5, 77, 78]))
    assert computed.cache.known("a").tolist() == [0, 1, 2, 3, 4, 5, 77, 78]
    assert computed.cache.cached("a") == 6
    assert computed.cache.missing("a") == 2


@pytest.mark.parametrize(
    ("final", "cached_values", "cached_log_probs"),
    [
        (range(10), 10, 9),
        (range(6), 6, 5),
        (range(14), 10, 9),
        ([0, 1, 2, 99, 4, 5, 6, 7, 8, 9], 3, 2),
        ([99, 1, 2], 0, 0),
    ],
)
def test_final_ids_keep_the_positions_that_they_confirm(final, cached_values, cached_log_probs):
    for lookahead, cached in ((0, cached_values), (1, cached_log_probs)):
        computed = Computed(lookahead=lookahead)
        computed.prefill("a", 0, range(10))
        assert computed.cache.rewrite("a", as_ids(list(final))) == cached
        assert computed.compute("a")
        assert computed.cache.outputs("a").tolist() == expected_outputs(list(final), lookahead)


def test_cropping_frees_the_blocks_behind():
    computed = Computed(num_blocks=4)
    computed.prefill("a", 0, range(16))
    assert computed.cache.free_blocks == 0
    computed.cache.rewrite("a", as_ids(list(range(5)) + [99]))
    assert computed.cache.used_blocks == 2


def test_the_least_recently_used_goes_first():
    computed = Computed(num_blocks=6)
    for name in "abc":
        computed.prefill(name, 0, range(8))
    computed.cache.extend(Chunk("a", 0, range(8)))
    computed.prefill("d", 0, range(8))
    assert [name in computed.cache for name in "abcd"] == [True, False, True, True]
    assert computed.cache.evicted == 1


def test_an_evicted_trajectory_is_not_taken_up_again_in_the_middle():
    computed = Computed(num_blocks=4)
    computed.prefill("a", 0, range(8))
    computed.prefill("b", 0, range(16))
    assert "a" not in computed.cache
    assert not computed.prefill("a", 8, range(8, 12))


def test_what_is_in_use_is_never_evicted_and_a_refusal_changes_nothing():
    computed = Computed(num_blocks=4)
    computed.prefill("a", 0, range(4))
    computed.prefill("b", 0, range(8))
    computed.cache.extend(Chunk("c", 0, range(8)))
    assert not computed.compute("c", keep=["a", "b"])
    assert [computed.cache.cached(name) for name in "abc"] == [4, 8, 0]
    assert computed.cache.evicted == 0
    assert computed.compute("c", keep=["a"])
    assert [computed.cache.cached(name) for name in "abc"] == [4, 0, 8]


def test_dropping_and_clearing_free_every_block():
    computed = Computed(num_blocks=4)
    computed.prefill("a", 0, range(8))
    computed.prefill("b", 0, range(8))
    computed.cache.drop(["a", "unknown"])
    assert (len(computed.cache), computed.cache.used_blocks, computed.cache.cached_tokens) == (1, 2, 8)
    computed.cache.clear()
    assert (len(computed.cache), computed.cache.used_blocks) == (0, 0)
    assert computed.prefill("c", 0, range(16))


def test_blocks_are_reused_from_the_lowest_so_the_tensors_behind_stay_small():
    computed = Computed(num_blocks=16)
    for name in "abcdefgh":
        computed.prefill(name, 0, range(8))
        computed.cache.drop([name])
    assert computed.cache.block_limit == FIRST_BLOCK + 2


@pytest.mark.parametrize("token_ids", [[[1, 2]], [0.5], ["a"], 3])
def test_token_ids_must_be_a_flat_list_of_integers(token_ids):
    with pytest.raises(ValueError, match="flat list of integers"):
        as_ids(token_ids)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_is_the_longest_equal_start(left, right):
    length = common_prefix_length(as_ids(left), as_ids(right))
    assert left[:length] == right[:length]
    assert length in (len(left), len(right)) or left[length] != right[length]


CHUNKS = st.tuples(
    st.just("chunk"), st.sampled_from("abcd"), st.integers(0, 12), st.lists(st.integers(0, 1), max_size=9)
)
FINALS = st.tuples(
    st.just("final"), st.sampled_from("abcd"), st.just(0), st.lists(st.integers(0, 1), min_size=1, max_size=16)
)
DROPS = st.tuples(st.just("drop"), st.sampled_from("abcd"), st.just(0), st.just([]))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1), st.lists(st.one_of(CHUNKS, CHUNKS, FINALS, DROPS), max_size=40))
def test_whatever_arrives_the_outputs_are_those_of_the_final_ids(lookahead, events):
    """Chunks at random offsets over an alphabet of two: repeats, gaps, contradictions and evictions all happen."""
    computed = Computed(num_blocks=6, lookahead=lookahead)
    for kind, name, offset, ids in events:
        if kind == "chunk":
            computed.prefill(name, offset, ids)
        elif kind == "final":
            computed.cache.rewrite(name, as_ids(ids))
            assert computed.compute(name), "16 positions fit 6 blocks once all others are gone"
            assert computed.cache.outputs(name).tolist() == expected_outputs(ids, lookahead)
        else:
            computed.cache.drop([name])
        held = {other: computed.cache.cached(other) for other in "abcd" if other in computed.cache}
        slots = np.concatenate([computed.cache.slots(other, 0, cached) for other, cached in held.items()] or [[]])
        assert len(set(slots.tolist())) == len(slots) == computed.cache.cached_tokens
        assert 0 <= computed.cache.used_blocks <= 6
