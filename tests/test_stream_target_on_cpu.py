"""The target on a worker group: which rank gets what, and which error reaches the pump."""

import asyncio
import logging

import pytest
from ray.exceptions import ActorDiedError

from verl_oppo.stream.target import WorkerGroupTarget


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
