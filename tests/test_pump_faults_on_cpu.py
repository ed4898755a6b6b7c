"""The pump before a scorer that is stuck, dies, refuses or answers nonsense: every wait ends."""

import asyncio
import logging

import pytest
from fake_scorer import LONG_S, FakeScorer, chunk, names_of, opened, settle, soon, sums, trajectory
from ray.exceptions import ActorDiedError

from verl_oppo.scoring.scorer import CallReport, Chunk, ScoreReply, Trajectory
from verl_oppo.stream.pump import Pump


@pytest.mark.parametrize("method", ["prefill", "score"])
async def test_a_stuck_scorer_ends_every_request_at_its_deadline(method):
    target = FakeScorer()
    pump = await opened(target, call_timeout_s=0.05)
    target.hold()
    if method == "prefill":
        pump.push([chunk("a")])
        await target.called.wait()
    requests = [asyncio.ensure_future(pump.score([trajectory(name)])) for name in "abc"]
    closing = asyncio.ensure_future(pump.close(LONG_S))
    for ended in await asyncio.gather(*requests, closing, return_exceptions=True):
        assert isinstance(ended, TimeoutError)
        assert f"critic: a call ({method}) is not answered within" in str(ended)
    await assert_broken(pump, target, TimeoutError)


async def test_a_dying_scorer_ends_every_request_with_its_own_error():
    target = FakeScorer()
    pump = await opened(target)
    target.hold()
    pump.push([chunk("a")])
    await target.called.wait()
    requests = [await soon(pump.score([trajectory(name)])) for name in "abc"]
    target.breaks_with = ActorDiedError()
    target.release()
    for ended in await asyncio.gather(*requests, return_exceptions=True):
        assert type(ended) is ActorDiedError and str(ended) == str(ActorDiedError())
    await assert_broken(pump, target, ActorDiedError)


async def assert_broken(pump: Pump, target: FakeScorer, error: type[BaseException]) -> None:
    """Every later request gets the error at once, and the scorer is left alone."""
    target.breaks_with = None
    target.release()
    calls = len(target.calls)
    pump.push([chunk("z")])
    requests = [
        lambda: pump.score([trajectory("z")]),
        pump.open,
        lambda: pump.close(LONG_S),
        pump.invalidate,
        lambda: pump.drop(["z"]),
    ]
    for _ in range(3):
        for request in requests:
            with pytest.raises(error) as raised:
                await request()
            assert len(raised.traceback) < 20, "raised again and again, it does not grow"
    await settle()
    assert len(target.calls) == calls and pump.stats().tokens_waiting == 0


async def test_a_trajectory_whose_chunks_are_refused_costs_no_other_its_place(caplog):
    target = FakeScorer(num_ranks=2)
    pump = await opened(target)
    good = [f"good{i}" for i in range(5)]
    pump.push([*(chunk(name) for name in good[:3]), Chunk("bad", 0, [1, -7]), *(chunk(name) for name in good[3:])])
    pump.push([Chunk("worse", 0, [-8])])
    with caplog.at_level(logging.WARNING):
        await settle()
    cached = {name for cache in target.caches for name in good if name in cache and len(cache.known(name)) == 4}
    assert cached == set(good)
    assert [record.message for record in caplog.records] == [
        "trajectory bad is no longer streamed to critic: trajectory bad: token id -7"
    ], "said once; the others are counted"
    assert pump.stats().trajectories_refused == 2
    calls = len(target.calls)
    pump.push([chunk("bad", 2)])
    await settle()
    assert len(target.calls) == calls, "what comes later of it is left out"
    with pytest.raises(ValueError, match="trajectory bad: token id -7"):
        await pump.score([Trajectory("bad", [1, -7])])
    assert list((await pump.score([trajectory("good0")]))[0].outputs) == sums()


async def test_a_trajectory_scored_or_dropped_while_under_suspicion_is_not_prefilled():
    target = FakeScorer()
    pump = await opened(target)
    target.hold()
    pump.push([chunk("a"), Chunk("bad", 0, [-1]), chunk("b"), chunk("c")])
    await target.called.wait()
    scoring = await soon(pump.score([trajectory("b")], keep=True))
    dropping = await soon(pump.drop(["c"]))
    target.release()
    await asyncio.gather(scoring, dropping)
    await settle()
    assert [names for _, names in target.made("prefill")][1:] == [["a", "bad"], ["a"], ["bad"]]


async def test_a_malformed_chunk_costs_no_other_its_place():
    target = FakeScorer()
    pump = await opened(target)
    pump.push([chunk("a"), Chunk("bad", -1, [1]), Chunk("bad", 0, [0.5]), chunk("b")])
    await settle()
    assert target.made("prefill") == [("prefill", ["a", "b"])] and pump.stats().trajectories_refused == 1


async def test_of_several_score_requests_only_the_one_at_fault_fails():
    target = FakeScorer()
    pump = await opened(target)
    target.hold()
    pump.push([chunk("x")])
    await target.called.wait()
    first = await soon(pump.score([trajectory("a"), trajectory("b")]))
    guilty = await soon(pump.score([trajectory("c"), Trajectory("bad", [-1])]))
    last = await soon(pump.score([trajectory("d")]))
    target.release()
    assert [list(one.outputs) for one in await first + await last] == [sums()] * 3
    with pytest.raises(ValueError, match="trajectory bad: token id -1"):
        await guilty
    assert [list(one.outputs) for one in await pump.score([trajectory("c")])] == [sums()]


async def test_a_scorer_that_dies_among_requests_served_one_by_one_ends_those_left():
    target = FakeScorer()
    pump = await opened(target)
    target.hold()
    pump.push([chunk("x")])
    await target.called.wait()
    requests = [await soon(pump.score([Trajectory(name, [-1])])) for name in "abc"]
    score = target.score

    async def dies_at_last(trajectories_by_rank, keep):
        if names_of(trajectories_by_rank) == ["b"]:
            target.breaks_with = ActorDiedError()
        return await score(trajectories_by_rank, keep)

    target.score = dies_at_last
    target.release()
    ended = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(error) for error in ended] == [ValueError, ActorDiedError, ActorDiedError]


async def test_an_answer_that_makes_no_sense_reaches_who_waits():
    target = FakeScorer()
    pump = await opened(target)

    async def forgets_one(trajectories_by_rank, keep):
        return [ScoreReply([], CallReport())]

    target.score = forgets_one
    with pytest.raises(AssertionError, match=r"critic scored \[\], asked for were \['a'\]"):
        await pump.score([trajectory("a")])
    await assert_broken(pump, target, AssertionError)


async def test_a_pump_that_is_stopped_leaves_nobody_waiting():
    target = FakeScorer()
    pump = await opened(target)
    target.hold()
    waiting = [await soon(pump.score([trajectory("a")])), await soon(pump.score([trajectory("b")], keep=True))]
    pump._runner.cancel()
    for ended in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(ended, RuntimeError) and "the stream to critic was stopped" in str(ended)
