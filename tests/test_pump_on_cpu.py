"""The pump and the targets: one call at a time, scores first, and every wait ends, with an error if need be."""

import asyncio
import logging
import random

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from verl_oppo.scoring.prefix_cache import PrefixCache
from verl_oppo.scoring.scorer import CallReport, Chunk, PrefillReply, Scored, ScoreReply, Trajectory
from verl_oppo.stream.consumer import ConsumerSettings
from verl_oppo.stream.pump import CallGate, Pump
from verl_oppo.stream.target import WorkerGroupTarget

LONG_S = 30.0
"""A deadline that only a hanging test meets."""


class FakeScorer:
    """A target in this process, slow, stuck or dying on demand; its score is the running sum of the ids.

    It refuses ids below 0, as a scorer refuses ids outside its vocabulary, before anything has changed.
    """

    def __init__(self, num_ranks: int = 1, processes: str = "own") -> None:
        self.num_ranks = num_ranks
        self.processes = frozenset([processes])
        self.caches = [PrefixCache(num_blocks=1000, block_size=4, lookahead=0) for _ in range(num_ranks)]
        self.calls: list[tuple[str, list[str]]] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.called = asyncio.Event()
        self.breaks_with: BaseException | None = None
        self.in_flight = 0

    async def _begin(self, method: str, names: list[str]) -> None:
        self.calls.append((method, names))
        self.called.set()
        assert self.in_flight == 0, "one call at a time"
        self.in_flight += 1
        try:
            await self.goes_on.wait()
            await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
        if self.breaks_with is not None:
            raise self.breaks_with

    def _check(self, items_by_rank) -> None:
        for item in (item for items in items_by_rank for item in items):
            if min(item.token_ids, default=0) < 0:
                raise ValueError(f"trajectory {item.trajectory_id}: token id {min(item.token_ids)}")

    async def prefill(self, chunks_by_rank) -> list[PrefillReply]:
        await self._begin("prefill", names_of(chunks_by_rank))
        self._check(chunks_by_rank)
        replies = []
        for cache, chunks in zip(self.caches, chunks_by_rank, strict=True):
            known = {chunk.trajectory_id for chunk in chunks if cache.extend(chunk)}
            report = CallReport(
                tokens_computed=sum(len(chunk.token_ids) for chunk in chunks), seconds=float(len(chunks))
            )
            replies.append(PrefillReply({name: len(cache.known(name)) for name in known}, report))
        return replies

    async def score(self, trajectories_by_rank, keep: bool = False) -> list[ScoreReply]:
        await self._begin("score", names_of(trajectories_by_rank))
        self._check(trajectories_by_rank)
        replies = []
        for cache, trajectories in zip(self.caches, trajectories_by_rank, strict=True):
            scored = []
            for each in trajectories:
                before = cache.known(each.trajectory_id) if each.trajectory_id in cache else np.empty(0)
                cache.rewrite(each.trajectory_id, np.asarray(each.token_ids))
                outputs = np.cumsum(each.token_ids).astype(np.float32)
                scored.append(Scored(each.trajectory_id, outputs, len(before)))
            if not keep:
                cache.drop(each.trajectory_id for each in trajectories)
            replies.append(
                ScoreReply(scored, CallReport(tokens_cached=sum(s.cached_tokens for s in scored), seconds=2.0))
            )
        return replies

    async def invalidate(self) -> None:
        await self._begin("invalidate", [])
        for cache in self.caches:
            cache.clear()

    async def drop(self, trajectory_ids) -> None:
        await self._begin("drop", sorted(trajectory_ids))
        for cache in self.caches:
            cache.drop(trajectory_ids)

    async def open_stream(self) -> None:
        await self._begin("open_stream", [])

    async def close_stream(self) -> None:
        await self._begin("close_stream", [])

    def hold(self) -> None:
        """The next call is slow, until `release`."""
        self.goes_on.clear()
        self.called.clear()

    def release(self) -> None:
        self.goes_on.set()

    def made(self, *methods: str) -> list[tuple[str, list[str]]]:
        return [call for call in self.calls if call[0] in methods]


def names_of(items_by_rank) -> list[str]:
    return [item.trajectory_id for items in items_by_rank for item in items]


def chunk(name: str, offset: int = 0, length: int = 4) -> Chunk:
    return Chunk(name, offset, list(range(offset, offset + length)))


def trajectory(name: str, length: int = 8) -> Trajectory:
    return Trajectory(name, list(range(length)))


def sums(length: int = 8) -> list[int]:
    return list(np.cumsum(range(length)))


async def opened(target: FakeScorer, **settings) -> Pump:
    pump = Pump("critic", target, ConsumerSettings(**{"call_timeout_s": LONG_S} | settings))
    await pump.open()
    return pump


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def settle() -> None:
    """Until everything has happened that can: the fake scorer answers within a few turns of the event loop."""
    await turns(300)


async def soon(call) -> asyncio.Task:
    """The call as a task that has got as far as it can without the scorer."""
    task = asyncio.ensure_future(call)
    await turns(5)
    return task


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


# The target on a worker group -----------------------------------------------------------------------------------------


class FakeMethod:
    def __init__(self, answer) -> None:
        self._answer = answer

    def remote(self, *args, **kwargs):
        return asyncio.ensure_future(self._answer(*args, **kwargs))


class FakeHandle:
    """An actor handle whose methods run on this event loop."""

    def __init__(self, **answers) -> None:
        for name, answer in answers.items():
            setattr(self, name, FakeMethod(answer))


def answers(result):
    async def answer(*args, **kwargs):
        if isinstance(result, BaseException):
            raise result
        return result if result is not None else (args, kwargs)

    return answer


async def never(*args, **kwargs):
    await asyncio.Event().wait()


async def test_a_call_goes_to_all_ranks_under_the_name_that_verl_gives_it():
    names = ["prefill", "score", "drop", "invalidate", "stream_open", "stream_close"]
    handles = [FakeHandle(**{f"critic_oppo_{name}": answers(None) for name in names}) for _ in range(2)]
    target = WorkerGroupTarget(handles, "critic_")
    assert target.num_ranks == 2 and target.processes == frozenset(handles)
    assert await target.prefill([["x"], []]) == [((["x"],), {}), (([],), {})]
    assert await target.score([["x"], ["y"]]) == [((["x"],), {}), ((["y"],), {})]
    assert await target.score([["x"], []], keep=True) == [((["x"],), {"keep": True}), (([],), {"keep": True})]
    for call in (target.drop(["a"]), target.invalidate(), target.open_stream(), target.close_stream()):
        assert await call is None


async def test_workers_of_a_tensor_parallel_group_get_the_same_and_answer_once():
    names = ["prefill", "score", "drop", "invalidate", "stream_open", "stream_close"]
    asked = []

    def recorded(worker, name):
        async def answer(*args, **kwargs):
            asked.append((worker, name, *args))
            return worker

        return answer

    handles = [FakeHandle(**{f"oppo_{name}": recorded(worker, name) for name in names}) for worker in range(4)]
    target = WorkerGroupTarget(handles, data_ranks=[0, 0, 1, 1])
    assert target.num_ranks == 2 and len(target.processes) == 4
    assert await target.prefill([["x"], ["y"]]) == [0, 2]
    assert sorted(asked) == [(worker, "prefill", ["x"] if worker < 2 else ["y"]) for worker in range(4)]
    asked.clear()
    assert await target.score([["x"], []]) == [0, 2]
    assert sorted(asked) == [(worker, "score", ["x"] if worker < 2 else []) for worker in range(4)]
    asked.clear()
    await target.drop(["a"])
    await target.invalidate()
    assert sorted(asked) == sorted(
        [(worker, "drop", ["a"]) for worker in range(4)] + [(worker, "invalidate") for worker in range(4)]
    )


@pytest.mark.parametrize("data_ranks", [[0], [0, 2], [1, 1]])
def test_ranks_that_leave_out_a_worker_are_refused(data_ranks):
    handles = [FakeHandle(oppo_prefill=never) for _ in range(2)]
    with pytest.raises(ValueError, match="data_ranks is .*, allowed is one per worker"):
        WorkerGroupTarget(handles, data_ranks=data_ranks)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([ValueError("refused"), ValueError("refused too")], (ValueError, "refused")),
        ([RuntimeError("connection closed"), ActorDiedError()], (ActorDiedError, "died")),
        ([ValueError("refused"), RuntimeError("out of memory")], (RuntimeError, "out of memory")),
        ([ActorDiedError(), "never"], (ActorDiedError, "died")),
        ([ValueError("refused"), "never"], (RuntimeError, r"ranks \[1\] of 2 are still busy")),
    ],
)
async def test_the_error_of_a_call_is_the_one_that_explains_the_others(ranks, expected, monkeypatch):
    monkeypatch.setattr("verl_oppo.stream.target.OTHER_RANKS_S", 0.01)
    handles = [FakeHandle(oppo_prefill=never if rank == "never" else answers(rank)) for rank in ranks]
    with pytest.raises(expected[0], match=expected[1]):
        await WorkerGroupTarget(handles).prefill([[], []])


async def test_a_call_given_up_says_which_ranks_have_not_answered(caplog):
    target = WorkerGroupTarget([FakeHandle(oppo_prefill=answers(1)), FakeHandle(oppo_prefill=never)])
    with pytest.raises(asyncio.TimeoutError), caplog.at_level(logging.ERROR):
        await asyncio.wait_for(target.prefill([[], []]), 0.01)
    assert "oppo_prefill is given up, no answer from ranks [1] of 2" in caplog.text


def test_workers_without_the_methods_are_refused():
    with pytest.raises(ValueError, match="prefix is 'critic_', but the workers have no method critic_oppo_prefill"):
        WorkerGroupTarget([FakeHandle(oppo_prefill=never)], "critic_")
    with pytest.raises(ValueError, match="handles is empty"):
        WorkerGroupTarget([])


@pytest.mark.parametrize(
    "fields",
    [{"max_held_tokens": 0}, {"max_tokens_per_prefill": 1.5}, {"max_tokens_per_score": True}, {"call_timeout_s": 0}],
)
def test_bad_settings_name_their_key(fields):
    with pytest.raises(ValueError, match=rf"trainer.v1.oppo.intra_step.{next(iter(fields))} is .*, allowed is"):
        ConsumerSettings(**fields)
