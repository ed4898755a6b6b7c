"""The pump: one call at a time, scores first, and what it counts."""

import asyncio
import random

import pytest
from fake_scorer import LONG_S, FakeScorer, chunk, opened, settle, soon, sums, trajectory, turns
from ray.exceptions import ActorDiedError

from verl_oppo.scoring.scorer import Chunk, Trajectory
from verl_oppo.stream.consumer import ConsumerSettings
from verl_oppo.stream.pump import CallGate, Pump


async def test_what_arrives_during_a_call_is_merged_into_the_next():
    target = FakeScorer()
    pump = await opened(target)
    target.hold()
    pump.push([chunk("a")])
    await target.called.wait()
    for offset in range(4, 40, 4):
        pump.push([chunk("a", offset), chunk("b", offset - 4)])
    target.release()
    await settle()
    assert target.made("prefill") == [("prefill", ["a"]), ("prefill", ["a", "b"])]
    assert [len(target.caches[0].known(name)) for name in "ab"] == [40, 36]


async def test_prefill_waits_for_the_stream_to_open_and_scores_do_not():
    target = FakeScorer()
    pump = Pump("critic", target, ConsumerSettings(call_timeout_s=LONG_S))
    pump.push([chunk("a"), chunk("b")])
    [scored] = await pump.score([trajectory("a")])
    assert list(scored.outputs) == sums()
    await settle()
    assert target.calls == [("score", ["a"])]
    await pump.open()
    await settle()
    assert target.calls[1:] == [("open_stream", []), ("prefill", ["b"])], "what was scored is not prefilled any more"
    await pump.close(LONG_S)
    pump.push([chunk("b", 4)])
    await pump.score([trajectory("c")])
    assert [method for method, _ in target.calls[3:]] == ["close_stream", "score"]


async def test_scores_go_before_prefill_and_those_that_wait_share_a_call():
    target = FakeScorer(num_ranks=2)
    pump = await opened(target)
    target.hold()
    pump.push([chunk("a"), chunk("b")])
    await target.called.wait()
    pump.push([chunk("d"), chunk("a", 4)])
    first = await soon(pump.score([trajectory("b", 8), trajectory("c", 5)]))
    second = await soon(pump.score([trajectory("a", 6)]))
    assert "scoring 2 trajectories, scoring 1 trajectories" in pump.waiting_for()
    target.release()
    assert [list(one.outputs) for one in await first] == [sums(8), sums(5)]
    assert [(one.trajectory_id, one.cached_tokens) for one in await second] == [("a", 4)]
    await settle()
    assert [method for method, _ in target.calls] == ["open_stream", "prefill", "score", "prefill"]
    assert [sorted(names) for _, names in target.calls[2:]] == [["a", "b", "c"], ["d"]]


async def test_requests_are_not_merged_beyond_the_bound_nor_with_the_same_trajectory_nor_another_keep():
    target = FakeScorer()
    pump = await opened(target, max_tokens_per_score=20)
    target.hold()
    pump.push([chunk("x")])
    await target.called.wait()
    requests = [
        await soon(pump.score([trajectory("a", 8)])),
        await soon(pump.score([trajectory("b", 8)])),
        await soon(pump.score([trajectory("c", 8)])),
        await soon(pump.score([trajectory("c", 8)], keep=True)),
        await soon(pump.score([trajectory("d", 30)], keep=True)),
        await soon(pump.score([trajectory("d", 1)], keep=True)),
    ]
    target.release()
    scored = [(await request)[0] for request in requests]
    assert [len(one.outputs) for one in scored] == [8, 8, 8, 8, 30, 1]
    assert [names for _, names in target.made("score")] == [["a", "b"], ["c"], ["c"], ["d"], ["d"]]


async def test_close_waits_for_the_prefill_in_flight_and_lets_none_begin():
    target = FakeScorer()
    pump = await opened(target)
    target.hold()
    pump.push([chunk("a")])
    await target.called.wait()
    pump.push([chunk("a", 4)])
    closing = await soon(pump.close(LONG_S))
    assert not closing.done() and target.in_flight == 1
    target.release()
    await closing
    assert target.in_flight == 0 and [method for method, _ in target.calls] == [
        "open_stream",
        "prefill",
        "close_stream",
    ]
    pump.push([chunk("b")])
    await settle()
    assert len(target.calls) == 3
    await pump.close(LONG_S)
    assert len(target.calls) == 3, "closing once more calls nothing"


async def test_close_says_what_it_could_not_wait_for():
    target = FakeScorer()
    pump = await opened(target)
    target.hold()
    pump.push([chunk("a")])
    await target.called.wait()
    with pytest.raises(TimeoutError, match=r"not drained within 0.01 s; critic: a call \(prefill\) is in flight for"):
        await pump.close(0.01)
    target.release()
    await pump.close(LONG_S)
    assert target.in_flight == 0 and target.calls[-1][0] == "close_stream"


async def test_closing_before_an_open_has_been_served_leaves_it_closed():
    target = FakeScorer()
    pump = Pump("critic", target, ConsumerSettings(call_timeout_s=LONG_S))
    target.hold()
    opening = await soon(pump.open())
    closing = await soon(pump.close(LONG_S))
    target.release()
    await asyncio.gather(opening, closing)
    pump.push([chunk("a")])
    await settle()
    assert [method for method, _ in target.calls] == ["open_stream", "close_stream"]


async def test_after_invalidate_only_what_is_streamed_from_the_start_counts():
    target = FakeScorer()
    pump = await opened(target)
    pump.push([chunk("a"), chunk("b")])
    await settle()
    await pump.invalidate()
    pump.push([chunk("a", 4), chunk("b", 0, 8)])
    await settle()
    assert target.made("prefill")[1:] == [("prefill", ["b"])]
    assert [one.cached_tokens for one in await pump.score([trajectory("a"), trajectory("b")])] == [0, 8]


async def test_what_the_scorer_evicted_is_streamed_again_from_the_start_only():
    target = FakeScorer()
    pump = await opened(target)
    pump.push([chunk("a")])
    await settle()
    target.caches[0].drop(["a"])
    for offset in (4, 8):
        pump.push([chunk("a", offset)])
        await settle()
    assert len(target.made("prefill")) == 2, "the second chunk told us, the third was of no use"
    pump.push([chunk("a", 0, 16)])
    await settle()
    assert len(target.caches[0].known("a")) == 16


async def test_drop_frees_what_the_scorer_has_and_asks_it_nothing_else():
    target = FakeScorer(num_ranks=2)
    pump = await opened(target)
    pump.push([chunk("a"), chunk("b")])
    await settle()
    await pump.drop(["a", "unknown"])
    await pump.drop(["unknown"])
    assert target.made("drop") == [("drop", ["a"])]
    assert sorted(name for cache in target.caches for name in "ab" if name in cache) == ["b"]


async def test_a_kept_score_keeps_cache_and_pin_and_streams_on():
    target = FakeScorer(num_ranks=3)
    pump = await opened(target)
    pump.push([chunk(name) for name in "abc"])
    await settle()
    await pump.score([trajectory("b", 8)], keep=True)
    pump.push([chunk("b", 4, 8)])
    await settle()
    [scored] = await pump.score([trajectory("b", 12)])
    assert scored.cached_tokens == 12 and list(scored.outputs) == sums(12)


async def test_two_scorers_in_the_same_processes_are_never_called_at_the_same_time():
    gate, critic, reference = CallGate(), FakeScorer(), FakeScorer()
    settings = ConsumerSettings(call_timeout_s=LONG_S)
    pumps = [Pump("critic", critic, settings, gate), Pump("reference", reference, settings, gate)]
    for pump in pumps:
        await pump.open()
    critic.hold()
    pumps[0].push([chunk("a")])
    await critic.called.wait()
    scoring = await soon(pumps[1].score([trajectory("a")]))
    assert [method for method, _ in reference.calls] == ["open_stream"] and not scoring.done()
    closing = await soon(pumps[1].close(LONG_S))
    assert not closing.done(), "closed means that nothing is in flight in these processes"
    critic.release()
    await asyncio.gather(scoring, closing)
    critic.hold()
    critic.breaks_with = ActorDiedError()
    pumps[0].push([chunk("a", 4)])
    await critic.called.wait()
    scoring = await soon(pumps[1].score([trajectory("b")]))
    critic.release()
    with pytest.raises(ActorDiedError):
        await scoring
    assert [method for method, _ in reference.calls] == ["open_stream", "score", "close_stream"]


async def test_statistics_are_those_of_the_scorer_and_of_the_clock():
    target = FakeScorer(num_ranks=2)
    pump = await opened(target)
    pump.push([chunk("a"), chunk("b"), chunk("c"), chunk("a")])
    await settle()
    await pump.score([trajectory("a"), trajectory("b")])
    pump.push([chunk("d", 4)])
    kept = pump.stats(reset=False)
    stats = pump.stats()
    assert stats == kept
    assert (stats.hub.chunks_received, stats.hub.tokens_received, stats.hub.tokens_stale) == (5, 20, 4)
    assert (stats.hub.tokens_taken, stats.hub.tokens_dropped, stats.tokens_waiting) == (12, 0, 4)
    assert (stats.prefill.calls, stats.prefill.busy_s, stats.prefill.report.seconds) == (1, 2.0, 3.0)
    assert (stats.score.calls, stats.score.busy_s, stats.score.report.seconds) == (1, 2.0, 4.0)
    assert (stats.prefill.report.tokens_computed, stats.score.report.tokens_cached) == (12, 8)
    assert [kind for kind, _, _ in stats.spans] == ["prefill", "score"]
    assert all(start <= end for _, start, end in stats.spans)
    assert stats.prefill.wall_s == pytest.approx(stats.spans[0][2] - stats.spans[0][1])
    after = pump.stats()
    assert (after.hub.chunks_received, after.prefill.calls, after.spans, after.tokens_waiting) == (0, 0, [], 4)


@pytest.mark.parametrize("seed", range(10))
async def test_scores_are_right_whatever_happens_around_them(seed):
    """Random pushes, openings, closings, drops and invalidations; the fake asserts that calls never overlap."""
    rng, target = random.Random(seed), FakeScorer(num_ranks=2)
    pump = await opened(target, max_held_tokens=60, max_tokens_per_prefill=10)
    scoring = []

    async def score_and_check(name: str, length: int, keep: bool) -> None:
        bad = [-1] if rng.random() < 0.2 else []
        if bad:
            with pytest.raises(ValueError, match=f"trajectory {name}"):
                await pump.score([Trajectory(name, [*range(length), *bad])], keep)
        else:
            assert list((await pump.score([trajectory(name, length)], keep))[0].outputs) == sums(length)

    for step in range(200):
        name, length = f"t{step // 20 + rng.randint(0, 3)}", rng.randint(1, 20)
        what = rng.choice(["push"] * 8 + ["score"] * 3 + ["close", "drop", "invalidate"] + ["wait"] * 4)
        if what == "push":
            pump.push([Chunk(name, offset := rng.choice([0, 0, 0, 5, 10]), [*range(offset, offset + length)])])
        elif what == "score":
            scoring.append(asyncio.ensure_future(score_and_check(name, length, rng.random() < 0.5)))
        elif what == "close":
            await pump.close(LONG_S)
            assert not (target.in_flight and target.calls[-1][0] == "prefill")
            num_prefills = len(target.made("prefill"))
            pump.push([chunk(f"new{step}")])
            await settle()
            assert len(target.made("prefill")) == num_prefills
            await pump.open()
        elif what == "drop":
            scoring.append(asyncio.ensure_future(pump.drop([name])))
        elif what == "invalidate":
            scoring.append(asyncio.ensure_future(pump.invalidate()))
        else:
            await turns(rng.randint(1, 20))
    await asyncio.gather(*scoring)
    await pump.close(LONG_S)
    assert pump.failure is None and len(target.made("prefill")) > 5


@pytest.mark.parametrize(
    "fields",
    [{"max_held_tokens": 0}, {"max_tokens_per_prefill": 1.5}, {"max_tokens_per_score": True}, {"call_timeout_s": 0}],
)
def test_bad_settings_name_their_key(fields):
    with pytest.raises(ValueError, match=rf"trainer.v1.oppo.intra_step.{next(iter(fields))} is .*, allowed is"):
        ConsumerSettings(**fields)
