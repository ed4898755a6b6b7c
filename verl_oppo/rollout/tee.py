"""The token tee: which tokens of the decoding requests go downstream, when, and never at the cost of decoding.

`vllm_server.py` holds one `TokenTee` a server, on the server's event loop, and shows it every output; `partial.py`
writes the trajectory into the request id. It knows neither vLLM nor Ray: a push is a call that returns a future.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from verl_oppo.scoring.scorer import Chunk

logger = logging.getLogger(__name__)

MAX_TOKENS_PER_PUSH = 65536
"""A push is full once it holds this many tokens; a silent sink holds back no more than one push."""
MAX_ENDED_WAITING = 256
"""Requests that ended with tokens still to push; beyond it the oldest is dropped. (Running ones the engine bounds.)"""

_PREFIX = "oppo|"

Push = Callable[[list[Chunk]], "asyncio.Future[Any]"]


def trajectory_id(uid: str, session_id: int) -> str:
    """Identity of a trajectory on its way to the scorers."""
    return f"{uid}_{session_id}"


def tag_request(request_id: str, uid: str, session_id: int) -> str:
    """Request id for vLLM that names the trajectory; `request_id` keeps it unique, for a resumed request too."""
    return f"{_PREFIX}{trajectory_id(uid, session_id)}|{request_id}"


def trajectory_of(request_id: str) -> str | None:
    """Trajectory that `tag_request` wrote into the id; None where there is none (validation, reward and teacher)."""
    if not request_id.startswith(_PREFIX):
        return None
    return request_id[len(_PREFIX) :].rpartition("|")[0] or None


def check_chunk_size(chunk_size: int | None) -> int | None:
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(
            f"chunk_size of the token tee is {chunk_size!r}, allowed is an integer of 1 or more, "
            "or None for the whole response"
        )
    return chunk_size


class RequestStream:
    """The tokens of one request, and how many of them were pushed.

    Invariant: positions [0, len(prompt_ids) + num_pushed) of the context went downstream, or none while `num_pushed` is
    0. `token_ids` is vLLM's own list, which only grows: only `num_seen` of it count, and a chunk is a copy.
    """

    __slots__ = ("trajectory_id", "prompt_ids", "token_ids", "num_seen", "num_pushed", "aborted", "_tee")

    def __init__(self, tee: TokenTee, trajectory_id: str) -> None:
        self.trajectory_id = trajectory_id
        self.prompt_ids: Sequence[int] = ()
        self.token_ids: Sequence[int] = ()
        self.num_seen = 0
        self.num_pushed = 0
        self.aborted = False
        self._tee = tee

    def observe(self, prompt_ids: Sequence[int], token_ids: Sequence[int], aborted: bool) -> None:
        """Take note of one output; `token_ids` are all tokens generated so far. An aborted request will be carried."""
        started = perf_counter()
        tee = self._tee
        num_seen = len(token_ids)
        tee.tokens_seen += num_seen - self.num_seen
        self.prompt_ids, self.token_ids, self.num_seen, self.aborted = prompt_ids, token_ids, num_seen, aborted
        if self.num_due(tee.chunk_size):
            tee.wait_for_push(self)
        tee.seconds += perf_counter() - started

    def end(self) -> None:
        """No more outputs will come."""
        self._tee.ended(self)

    def num_due(self, chunk_size: int | None) -> int:
        """Generated tokens to push now: full chunks, after an abort the rest too."""
        if chunk_size is None:
            return 0
        waiting = self.num_seen - self.num_pushed
        return waiting if self.aborted else waiting - waiting % chunk_size

    def take(self, chunk_size: int | None) -> Chunk | None:
        """What is due, as one chunk; the first one brings the prompt. Counts as pushed from here on."""
        num_due = self.num_due(chunk_size)
        if not num_due:
            return None
        first, last = self.num_pushed, self.num_pushed + num_due
        self.num_pushed = last
        if first == 0:
            return Chunk(self.trajectory_id, 0, [*self.prompt_ids, *self.token_ids[:last]])
        return Chunk(self.trajectory_id, len(self.prompt_ids) + first, list(self.token_ids[first:last]))


class TokenTee:
    """Pushes due tokens of all requests of one server, batched per turn of the event loop, one push at a time.

    Invariant: nothing here waits, and nothing raised by the sink reaches the decode: a sink that fails is left alone
    from then on. While a push is unanswered, due tokens stay with their request and grow into fewer, larger chunks. So
    a slow sink leaves no gaps, and chunks arrive in order even at an async actor, which may start calls in any order.
    """

    def __init__(self) -> None:
        self.chunk_size: int | None = None
        """Generated tokens of a chunk; None pushes nothing."""
        self.tokens_seen = 0
        self.seconds = 0.0
        self._num_chunks_pushed = 0
        self._num_chunks_dropped = 0
        self._stopped_by: str | None = None
        self._push: Push | None = None
        self._push_in_flight = False
        self._flush_scheduled = False
        # Requests with tokens to push, in order of arrival: those that still run, and those that ended.
        self._waiting: dict[RequestStream, None] = {}
        self._ended_waiting: dict[RequestStream, None] = {}

    @property
    def active(self) -> bool:
        """Whether there is a sink to push to."""
        return self._push is not None

    def connect(self, push: Push, chunk_size: int | None) -> None:
        """Push to this sink from now on. Raises ValueError on a chunk size below 1."""
        self.set_chunk_size(chunk_size)
        self._disconnect()
        self._push = push
        self._stopped_by = None

    def set_chunk_size(self, chunk_size: int | None) -> None:
        """Holds from the next output on, for running requests too. Raises ValueError on a chunk size below 1."""
        self.chunk_size = check_chunk_size(chunk_size)

    def open(self, trajectory_id: str) -> RequestStream:
        return RequestStream(self, trajectory_id)

    def wait_for_push(self, stream: RequestStream) -> None:
        if self._push is None or stream in self._waiting:
            return
        self._waiting[stream] = None
        if not self._flush_scheduled and not self._push_in_flight:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def ended(self, stream: RequestStream) -> None:
        if stream not in self._waiting:
            return
        del self._waiting[stream]
        self._ended_waiting[stream] = None
        if len(self._ended_waiting) > MAX_ENDED_WAITING:
            del self._ended_waiting[next(iter(self._ended_waiting))]
            self._num_chunks_dropped += 1

    def stats(self) -> dict[str, Any]:
        """Totals since the start: tokens, chunks, and seconds of the event loop spent here.

        `chunks_waiting`: chunks that wait for the answer to the last push. `stopped_by`: why the sink was given up, or
        None.
        """
        return {
            "tokens_seen": self.tokens_seen,
            "chunks_pushed": self._num_chunks_pushed,
            "chunks_dropped": self._num_chunks_dropped,
            "chunks_waiting": len(self._ended_waiting) + len(self._waiting),
            "push_in_flight": self._push_in_flight,
            "seconds": self.seconds,
            "chunk_size": self.chunk_size,
            "stopped_by": self._stopped_by,
        }

    def _flush(self) -> None:
        started = perf_counter()
        self._flush_scheduled = False
        if self._push is not None and not self._push_in_flight and (batch := self._batch()):
            self._send(self._push, batch)
        self.seconds += perf_counter() - started

    def _send(self, push: Push, batch: list[Chunk]) -> None:
        try:
            pushed = push(batch)
        except Exception as error:
            self._give_up(error)
            return
        self._push_in_flight = True
        self._num_chunks_pushed += len(batch)
        pushed.add_done_callback(partial(self._on_pushed, push))

    def _batch(self) -> list[Chunk]:
        batch: list[Chunk] = []
        num_tokens = 0
        for waiting in (self._ended_waiting, self._waiting):
            while waiting and num_tokens < MAX_TOKENS_PER_PUSH:
                stream = next(iter(waiting))
                del waiting[stream]
                chunk = stream.take(self.chunk_size)
                if chunk is not None:
                    batch.append(chunk)
                    num_tokens += len(chunk.token_ids)
        return batch

    def _on_pushed(self, push: Push, pushed: asyncio.Future[Any]) -> None:
        if pushed.cancelled():
            return
        error = pushed.exception()
        if push is not self._push:
            return
        if error is not None:
            self._give_up(error)
            return
        self._push_in_flight = False
        self._flush()

    def _give_up(self, error: BaseException) -> None:
        self._num_chunks_dropped += len(self._ended_waiting) + len(self._waiting)
        self._disconnect()
        self._stopped_by = f"{type(error).__name__}: {error}"
        logger.warning(f"tokens are no longer streamed, decoding goes on: the sink failed with {self._stopped_by}")

    def _disconnect(self) -> None:
        self._push = None
        self._push_in_flight = False
        self._waiting.clear()
        self._ended_waiting.clear()
