"""The token tee without an engine and without Ray: a sink is a function that returns a future."""

import asyncio
import logging
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_oppo.rollout import tee as tee_module
from verl_oppo.rollout.tee import RequestStream, TokenTee, tag_request, trajectory_id, trajectory_of
from verl_oppo.scoring.scorer import Chunk

PROMPT = [100, 101, 102]


class FakeSink:
    """Keeps each push and answers none of them by itself, unless told to."""

    def __init__(self, answers: bool = True) -> None:
        self.pushes: list[list[Chunk]] = []
        self.futures: list[asyncio.Future[None]] = []
        self._answers = answers

    def __call__(self, chunks: list[Chunk]) -> "asyncio.Future[None]":
        self.pushes.append(chunks)
        future = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        if self._answers:
            future.set_result(None)
        return future

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for push in self.pushes for chunk in push]


def connected(sink: FakeSink, chunk_size: int | None) -> TokenTee:
    tee = TokenTee()
    tee.connect(sink, chunk_size)
    return tee


def assembled(chunks: Iterable[Chunk]) -> list[int]:
    """The context that the chunks of one trajectory add up to, in the order of their arrival; fails on a gap."""
    context: list[int] = []
    for chunk in chunks:
        assert chunk.offset <= len(context), f"gap before {chunk.offset}: {len(context)} tokens so far"
        context[chunk.offset :] = chunk.token_ids
    return context


async def settle() -> None:
    """Lets every callback run that is due, and those that they schedule."""
    for _ in range(8):
        await asyncio.sleep(0)


async def generate(stream: RequestStream, num_tokens: int, aborted: bool = False) -> list[int]:
    """One output a token, as vLLM's cumulative list that grows."""
    token_ids: list[int] = []
    for token in range(num_tokens):
        token_ids.append(token)
        stream.observe(PROMPT, token_ids, aborted and token == num_tokens - 1)
        await settle()
    stream.end()
    await settle()
    return token_ids


@pytest.mark.parametrize("uid", ["3f2a", "a|b", "with_underscore", ""])
def test_request_id_names_the_trajectory(uid):
    assert trajectory_of(tag_request("fresh", uid, 3)) == trajectory_id(uid, 3) == f"{uid}_3"


@pytest.mark.parametrize("request_id", ["3f2a9c", "oppo", "oppo|", "oppo|x", "cmpl-oppo|u_0|fresh", ""])
def test_other_request_ids_name_none(request_id):
    assert trajectory_of(request_id) is None


@pytest.mark.parametrize("chunk_size", [0, -1, 2.0, "8", True])
def test_bad_chunk_size_is_refused(chunk_size):
    tee = connected(FakeSink(), 8)
    with pytest.raises(ValueError, match=f"chunk_size of the token tee is {chunk_size!r}, allowed"):
        tee.set_chunk_size(chunk_size)
    with pytest.raises(ValueError, match="allowed is an integer of 1 or more"):
        TokenTee().connect(FakeSink(), chunk_size)
    assert tee.chunk_size == 8


async def test_first_chunk_brings_the_prompt_and_offsets_are_absolute():
    sink = FakeSink()
    await generate(connected(sink, 4).open("u_0"), 11)
    assert sink.chunks == [Chunk("u_0", 0, [*PROMPT, 0, 1, 2, 3]), Chunk("u_0", 7, [4, 5, 6, 7])]


async def test_an_abort_brings_the_tail_an_end_does_not():
    for aborted, expected in ((True, [*PROMPT, *range(6)]), (False, [*PROMPT, *range(4)])):
        sink = FakeSink()
        await generate(connected(sink, 4).open("u_0"), 6, aborted=aborted)
        assert assembled(sink.chunks) == expected


async def test_abort_before_the_first_token_pushes_nothing():
    sink = FakeSink()
    connected(sink, 4).open("u_0").observe(PROMPT, [], True)
    await settle()
    assert not sink.pushes


async def test_whole_response_pushes_nothing_but_counts():
    sink = FakeSink()
    tee = connected(sink, None)
    await generate(tee.open("u_0"), 9, aborted=True)
    assert not sink.pushes
    assert tee.stats()["tokens_seen"] == 9


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    sizes=st.lists(st.sampled_from([1, 2, 7, 64, None]), min_size=1, max_size=4),
    aborted=st.booleans(),
    answers=st.booleans(),
)
def test_chunks_add_up_to_the_context_whatever_the_sizes(steps, sizes, aborted, answers):
    """Several tokens an output (vLLM merges outputs that nobody fetched), the size changed on the way."""

    async def run() -> None:
        sink = FakeSink(answers)
        tee = connected(sink, sizes[0])
        stream = tee.open("u_0")
        token_ids: list[int] = []
        for index, step in enumerate(steps):
            tee.set_chunk_size(sizes[index % len(sizes)])
            token_ids.extend(range(len(token_ids), len(token_ids) + step))
            stream.observe(PROMPT, token_ids, aborted and index == len(steps) - 1)
            await settle()
        stream.end()
        while any(not future.done() for future in sink.futures):
            next(future for future in sink.futures if not future.done()).set_result(None)
            await settle()
        context = [*PROMPT, *token_ids]
        pushed = assembled(sink.chunks)
        assert pushed == context[: len(pushed)]
        last_size = tee.chunk_size
        if last_size is not None:
            assert len(context) - len(pushed) < last_size or len(token_ids) < last_size
            if aborted:
                assert pushed == context

    asyncio.run(run())


async def test_a_chunk_is_a_copy_and_holds_only_what_was_observed():
    sink = FakeSink()
    stream = connected(sink, 2).open("u_0")
    token_ids = [1, 2]
    stream.observe(PROMPT, token_ids, False)
    token_ids += [3, 4]
    await settle()
    token_ids[0] = -1
    assert sink.chunks == [Chunk("u_0", 0, [*PROMPT, 1, 2])]


async def test_requests_of_one_turn_of_the_loop_share_a_push():
    sink = FakeSink()
    tee = connected(sink, 2)
    for session in range(5):
        tee.open(f"u_{session}").observe(PROMPT, [7, 8], False)
    assert not sink.pushes
    await settle()
    assert [[chunk.trajectory_id for chunk in push] for push in sink.pushes] == [[f"u_{i}" for i in range(5)]]


async def test_a_silent_sink_gets_one_push_and_later_everything_at_once():
    sink = FakeSink(answers=False)
    tee = connected(sink, 2)
    await generate(tee.open("u_0"), 51)
    assert sink.chunks == [Chunk("u_0", 0, [*PROMPT, 0, 1])]
    assert tee.stats()["chunks_waiting"] == 1
    sink.futures[0].set_result(None)
    await settle()
    assert sink.chunks[1:] == [Chunk("u_0", 5, list(range(2, 50)))]
    assert tee.stats()["chunks_dropped"] == 0


async def test_of_requests_that_ended_unpushed_the_oldest_are_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(tee_module, "MAX_ENDED_WAITING", 3)
    sink = FakeSink(answers=False)
    tee = connected(sink, 1)
    for index in range(6):
        await generate(tee.open(f"u_{index}"), 1)
    assert tee.stats()["chunks_dropped"] == 2
    sink.futures[0].set_result(None)
    await settle()
    assert [[chunk.trajectory_id for chunk in push] for push in sink.pushes] == [["u_0"], ["u_3", "u_4", "u_5"]]


async def test_a_push_ends_after_the_chunk_that_fills_it(monkeypatch):
    monkeypatch.setattr(tee_module, "MAX_TOKENS_PER_PUSH", 9)
    sink = FakeSink()
    tee = connected(sink, 2)
    for session in range(5):
        tee.open(f"u_{session}").observe(PROMPT, [7, 8], False)
    await settle()
    assert [len(push) for push in sink.pushes] == [2, 2, 1]


@pytest.mark.parametrize("fails_at_once", [True, False])
async def test_a_sink_that_fails_is_left_alone_after_one_log_line(caplog, fails_at_once):
    sink = FakeSink(answers=False)
    calls = []

    def push(chunks: list[Chunk]) -> "asyncio.Future[None]":
        calls.append(chunks)
        if fails_at_once:
            raise RuntimeError("the sink is gone")
        return sink(chunks)

    tee = TokenTee()
    tee.connect(push, 1)
    stream = tee.open("u_0")
    with caplog.at_level(logging.WARNING):
        for token in range(3):
            stream.observe(PROMPT, list(range(token + 1)), False)
            await settle()
        for future in sink.futures:
            future.set_exception(RuntimeError("the sink is gone"))
        await settle()
        num_calls = len(calls)
        await generate(tee.open("u_1"), 3)
    assert len(calls) == num_calls
    assert len([record for record in caplog.records if "the sink is gone" in record.message]) == 1
    assert not tee.active
    assert tee.stats()["stopped_by"] == "RuntimeError: the sink is gone"
    assert tee.stats()["tokens_seen"] == 6


async def test_a_new_sink_is_not_blamed_for_the_old_one():
    old, new = FakeSink(answers=False), FakeSink()
    tee = connected(old, 1)
    await generate(tee.open("u_0"), 3)
    tee.connect(new, 1)
    for future in old.futures:
        future.set_exception(RuntimeError("gone"))
    await settle()
    await generate(tee.open("u_1"), 3)
    assert tee.active
    assert not tee.stats()["push_in_flight"]
    assert assembled(new.chunks) == [*PROMPT, 0, 1, 2]


async def test_without_a_sink_nothing_is_kept():
    tee = TokenTee()
    tee.set_chunk_size(1)
    await generate(tee.open("u_0"), 3)
    assert not tee.active
    assert tee.stats()["chunks_waiting"] == 0


async def test_time_spent_is_accounted():
    tee = connected(FakeSink(), 1)
    assert tee.stats()["seconds"] == 0
    await generate(tee.open("u_0"), 3)
    assert tee.stats()["seconds"] > 0
