"""The chunk hub: what was put comes out once and in order, whatever happens to the chunks on the way."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_oppo.scoring.prefix_cache import PrefixCache
from verl_oppo.scoring.scorer import Chunk
from verl_oppo.stream.hub import ChunkHub

LENGTHS = {"a": 1, "b": 17, "c": 40}
TRUTH = {name: np.arange(length) + 100 * index for index, (name, length) in enumerate(LENGTHS.items())}
TAKE = "take"


@st.composite
def slices(draw) -> Chunk:
    name = draw(st.sampled_from(sorted(LENGTHS)))
    start = draw(st.integers(0, LENGTHS[name] - 1))
    stop = draw(st.integers(start, LENGTHS[name]))
    return Chunk(name, start, list(TRUTH[name][start:stop]))


@st.composite
def cut_and_shuffled(draw) -> list[Chunk]:
    """Chunks that cover every trajectory, some left out, some twice, in any order."""
    chunks = []
    for name, length in LENGTHS.items():
        bounds = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=6))})
        chunks += [Chunk(name, i, list(TRUTH[name][i:j])) for i, j in zip(bounds, bounds[1:], strict=False)]
    copies = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2]), min_size=len(chunks), max_size=len(chunks)))
    return draw(st.permutations([chunk for chunk, count in zip(chunks, copies, strict=True) for _ in range(count)]))


@dataclass
class Taken:
    """What came out so far; `add` checks that it continues what came before."""

    ids: defaultdict
    rank: dict

    @classmethod
    def nothing(cls) -> "Taken":
        return cls(defaultdict(list), {})

    def add(self, by_rank: list[list[Chunk]], max_tokens: int) -> int:
        for rank, chunks in enumerate(by_rank):
            assert sum(len(chunk.token_ids) for chunk in chunks) <= max_tokens
            assert len({chunk.trajectory_id for chunk in chunks}) == len(chunks)
            for chunk in chunks:
                assert self.rank.setdefault(chunk.trajectory_id, rank) == rank
                assert chunk.offset == len(self.ids[chunk.trajectory_id]), "taken once, without gaps"
                self.ids[chunk.trajectory_id] += list(chunk.token_ids)
        return sum(map(len, by_rank))


def whole(hub: ChunkHub, taken: Taken, max_tokens: int = 7) -> None:
    while taken.add(hub.take(max_tokens), max_tokens):
        pass


def covered(chunks: list[Chunk], name: str) -> int:
    """Positions from 0 on that the chunks cover without a gap."""
    positions = {
        chunk.offset + i for chunk in chunks if chunk.trajectory_id == name for i in range(len(chunk.token_ids))
    }
    return next(i for i in range(LENGTHS[name] + 1) if i not in positions)


def adds_up(hub: ChunkHub) -> bool:
    count = hub.counters
    return count.tokens_received == (
        count.tokens_taken + count.tokens_dropped + count.tokens_stale + hub.tokens_waiting
    )


@settings(max_examples=150, deadline=None)
@given(st.one_of(cut_and_shuffled(), st.lists(slices(), max_size=30)), st.data(), st.integers(1, 3))
def test_what_was_put_comes_out_once_in_order_up_to_the_first_gap(chunks, data, num_ranks):
    hub, taken = ChunkHub(num_ranks, max_tokens=10_000), Taken.nothing()
    for chunk in chunks:
        hub.put(chunk)
        if data.draw(st.booleans(), label=TAKE):
            size = data.draw(st.integers(1, 9))
            taken.add(hub.take(size), size)
    whole(hub, taken)
    for name in LENGTHS:
        assert taken.ids[name] == list(TRUTH[name][: covered(chunks, name)])
    assert hub.counters.tokens_dropped == 0 and adds_up(hub)
    assert hub.counters.chunks_received == len(chunks)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(slices(), st.just(TAKE)), max_size=40), st.integers(1, 30))
def test_memory_stays_bounded_and_what_comes_out_is_still_right(steps, max_tokens):
    hub, taken = ChunkHub(2, max_tokens), Taken.nothing()
    for step in steps:
        if step == TAKE:
            taken.add(hub.take(5), 5)
        else:
            hub.put(step)
        assert hub.tokens_held <= max_tokens and adds_up(hub)
    whole(hub, taken)
    for name in LENGTHS:
        assert taken.ids[name] == list(TRUTH[name][: len(taken.ids[name])])
    chunks = [step for step in steps if step != TAKE]
    if hub.counters.tokens_dropped == 0:
        assert all(len(taken.ids[name]) == covered(chunks, name) for name in LENGTHS)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 39), st.integers(1, 12), st.integers(1, 12), st.integers(0, 40), st.booleans())
def test_a_later_version_of_the_tokens_replaces_the_earlier_one(same, size, other_size, seen, take_between):
    """A restarted or newly tokenised trajectory: the scorer behind the hub ends up with the later ids."""
    first = TRUTH["c"]
    second = np.where(np.arange(40) < same, first, first + 1000)
    hub, scorer = ChunkHub(1, 10_000), PrefixCache(num_blocks=100, block_size=4, lookahead=0)

    def prefill() -> None:
        while chunks := hub.take(11)[0]:
            assert all(scorer.extend(chunk) for chunk in chunks)

    for ids, step in ((first[:seen], size), (second, other_size)):
        for offset in range(0, len(ids), step):
            hub.put(Chunk("c", offset, ids[offset : offset + step]))
            if take_between:
                prefill()
    prefill()
    assert list(scorer.known("c")) == list(second) and adds_up(hub)


def put(hub: ChunkHub, name: str, offset: int, length: int) -> None:
    hub.put(Chunk(name, offset, list(range(offset, offset + length))))


def taken(hub: ChunkHub, max_tokens: int = 1000) -> list[list[tuple[str, int, int]]]:
    return [
        [(chunk.trajectory_id, chunk.offset, len(chunk.token_ids)) for chunk in chunks]
        for chunks in hub.take(max_tokens)
    ]


def test_chunks_of_a_trajectory_are_merged_and_a_gap_waits():
    hub = ChunkHub(1, 1000)
    put(hub, "a", 0, 10)
    put(hub, "a", 10, 10)
    put(hub, "a", 25, 5)
    assert taken(hub) == [[("a", 0, 20)]]
    assert taken(hub) == [[]]
    put(hub, "a", 18, 7)
    assert taken(hub) == [[("a", 20, 10)]]


def test_trajectories_go_to_the_least_loaded_rank_and_stay_there():
    hub = ChunkHub(2, 1000)
    put(hub, "long", 0, 100)
    put(hub, "short", 0, 10)
    put(hub, "next", 0, 10)
    assert [[name for name, _, _ in chunks] for chunks in taken(hub)] == [["long"], ["short", "next"]]
    put(hub, "short", 10, 200)
    assert taken(hub) == [[], [("short", 10, 200)]]
    hub.drop(["short"])
    assert hub.rank_of("after") == 1, "the load of a dropped trajectory is gone"


def test_trajectories_that_were_never_streamed_spread_over_the_ranks():
    hub = ChunkHub(4, 1000)
    assert sorted(hub.rank_of(f"t{i}", tokens=50) for i in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(hub.rank_of(f"u{i}") for i in range(4)) == [0, 1, 2, 3]


def test_a_full_rank_does_not_stop_the_other_and_the_oldest_goes_first():
    hub = ChunkHub(2, 1000)
    put(hub, "a", 0, 30)
    put(hub, "b", 0, 5)
    put(hub, "c", 0, 5)
    assert taken(hub, 8) == [[("a", 0, 8)], [("b", 0, 5), ("c", 0, 3)]]
    put(hub, "b", 5, 5)
    assert taken(hub, 8) == [[("a", 8, 8)], [("c", 3, 2), ("b", 5, 5)]]


def test_memory_runs_short_the_oldest_trajectory_goes_until_its_tokens_come_again():
    hub = ChunkHub(1, 100)
    put(hub, "old", 0, 40)
    assert taken(hub) == [[("old", 0, 40)]]
    put(hub, "old", 40, 20)
    put(hub, "new", 0, 90)
    assert (hub.counters.chunks_dropped, hub.counters.tokens_dropped) == (1, 20)
    put(hub, "old", 60, 5)
    assert (hub.counters.chunks_dropped, hub.counters.tokens_dropped) == (2, 25), "behind what is gone"
    assert taken(hub) == [[("new", 0, 90)]]
    put(hub, "old", 0, 65)
    assert taken(hub) == [[("old", 40, 25)]], "the resumed request brings everything; the scorer has 40 of it"


def test_a_chunk_larger_than_the_memory_is_dropped():
    hub = ChunkHub(1, 10)
    put(hub, "a", 0, 11)
    assert taken(hub) == [[]] and hub.counters.tokens_dropped == 11 and hub.tokens_held == 0


def test_late_chunks_of_a_dropped_trajectory_vanish():
    hub = ChunkHub(1, 100)
    put(hub, "a", 0, 10)
    put(hub, "b", 0, 10)
    assert hub.drop(["a", "unknown"]) == [], "the scorer has nothing of them"
    taken(hub)
    put(hub, "b", 10, 5)
    assert hub.drop(["b"]) == ["b"]
    put(hub, "a", 10, 10)
    put(hub, "b", 0, 20)
    assert taken(hub) == [[]] and hub.tokens_held == 0 and adds_up(hub)


def test_what_the_scorer_lost_counts_again_from_the_start_on():
    hub = ChunkHub(1, 100)
    put(hub, "a", 0, 10)
    put(hub, "unsent", 5, 5)
    taken(hub)
    put(hub, "a", 10, 5)
    hub.lost_all()
    put(hub, "a", 15, 5)
    assert taken(hub) == [[]]
    put(hub, "a", 0, 20)
    put(hub, "unsent", 0, 5)
    assert taken(hub) == [[("unsent", 0, 10), ("a", 0, 20)]], "what was never sent was not lost"
    assert adds_up(hub)


def test_after_a_kept_score_only_new_tokens_come_out():
    hub = ChunkHub(1, 100)
    put(hub, "a", 0, 10)
    hub.scored("a", list(range(20)))
    put(hub, "a", 5, 15)
    assert taken(hub) == [[]]
    put(hub, "a", 0, 25)
    assert taken(hub) == [[("a", 20, 5)]] and adds_up(hub)


def test_the_number_of_trajectories_is_bounded():
    hub = ChunkHub(1, 100, max_trajectories=2)
    for name in "abc":
        put(hub, name, 0, 3)
    assert [name for name, _, _ in taken(hub)[0]] == ["b", "c"]
    hub.drop(["x", "y", "z"])
    put(hub, "x", 0, 1)
    put(hub, "z", 0, 1)
    assert taken(hub) == [[("x", 0, 1)]], "only the last two ended ones are known"
    assert adds_up(hub)


def test_clear_forgets_everything():
    hub = ChunkHub(2, 100)
    put(hub, "a", 0, 10)
    put(hub, "b", 0, 10)
    taken(hub, 4)
    hub.clear()
    assert hub.tokens_held == 0 and taken(hub) == [[], []] and adds_up(hub)


@pytest.mark.parametrize(
    ("offset", "token_ids", "message"),
    [
        (-1, [1], "trajectory t7: chunk offset is -1, allowed is 0 or more"),
        (1.5, [1], "trajectory t7: chunk offset is 1.5"),
        (True, [1], "trajectory t7: chunk offset is True"),
        (0, [[1]], r"trajectory t7: token_ids has shape \(1, 1\)"),
        (0, [0.5], "trajectory t7: token_ids .* float64"),
    ],
)
def test_a_malformed_chunk_names_its_trajectory(offset, token_ids, message):
    with pytest.raises(ValueError, match=message):
        ChunkHub(1, 10).put(Chunk("t7", offset, token_ids))


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1.0, 1, 1), (True, 1, 1)])
def test_bad_sizes(sizes):
    with pytest.raises(ValueError, match="allowed is an integer of 1 or more"):
        ChunkHub(*sizes)


def test_the_hub_keeps_no_view_of_the_message_it_came_in():
    hub, message = ChunkHub(1, 100), np.arange(1000)
    hub.put(Chunk("a", 0, message[:10]))
    message[:] = -1
    assert list(hub.take(10)[0][0].token_ids) == list(range(10))
