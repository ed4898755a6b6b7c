"""What a pump is asked for, and the gate that lets its calls into the worker processes one at a time.

Used by the pump and the stream service, on the service's event loop. It does not know what is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from verl_oppo.scoring.scorer import Trajectory


class CallGate:
    """Lets one call at a time into the worker processes behind it.

    Shared by the pumps whose targets live in the same processes, as verl fuses critic and reference with the actor.
    Invariant: a broken call breaks the gate for all of them, since its processes may never answer again.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.failure: BaseException | None = None


def new_future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass
class Request:
    """A call that somebody waits for; `answer` may be cancelled by then."""

    what: str
    call: Callable[[], Awaitable[Any]] | None = None
    answer: asyncio.Future[Any] = field(default_factory=new_future)

    def succeed(self, result: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            # One error may be raised many times, and each time would make its traceback longer.
            self.answer.set_exception(error.with_traceback(None))


@dataclass
class ScoreRequest(Request):
    trajectories: list[Trajectory] = field(default_factory=list)
    keep: bool = False

    @property
    def ids(self) -> set[str]:
        return {each.trajectory_id for each in self.trajectories}

    @property
    def tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.trajectories)
