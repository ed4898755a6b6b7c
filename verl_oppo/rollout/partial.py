"""Partial rollouts: which weight version produced which token, and how many requests a replica holds.

`LLMServerClientOppo` runs inside an agent loop worker, one instance a worker. verl's `FullyAsyncLLMServerClient`
already resumes an aborted request on prompt + partial tokens; the class under it in the method resolution order sees
each single attempt and records it in the session's `TokenLedger`. It does not know what an agent loop does with the
tokens.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import ray
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_oppo.rollout.tee import tag_request

TOOL_TOKEN_VERSION = -1
"""Version of a response token that no model produced (tool output)."""

Runs = list[list[int]]
"""Run-length code of the versions of a response: `[[version, count], ...]`."""


@dataclass
class TokenLedger:
    """Weight versions of the tokens that one session (trajectory) generated, in order.

    Invariant: `sum(count for _, count in runs)` is the number of tokens the servers returned for the session.
    """

    uid: str
    session_id: int
    runs: Runs = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.runs)

    def record(self, version: int, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        if self.runs and self.runs[-1][0] == version:
            self.runs[-1][1] += num_tokens
        else:
            self.runs.append([version, num_tokens])


current_session: ContextVar[TokenLedger | None] = ContextVar("oppo_current_session", default=None)
"""The training session whose agent loop runs in this asyncio task; None during validation."""


def token_versions(runs: Runs) -> Iterator[int]:
    """Yield the version of each recorded token, then the oldest one without end.

    The endless tail serves loops that return more tokens than the servers gave them (they made some themselves):
    staleness is then never understated.
    """
    for version, count in runs:
        yield from repeat(version, count)
    yield from repeat(min((version for version, _ in runs), default=TOOL_TOKEN_VERSION))


def align_versions(versions: Iterator[int], response_mask: Sequence[int]) -> Runs:
    """Take one version for each generated token of a response; tokens with mask 0 get `TOOL_TOKEN_VERSION`."""
    aligned = TokenLedger(uid="", session_id=0)
    for is_generated in response_mask:
        aligned.record(next(versions) if is_generated else TOOL_TOKEN_VERSION, 1)
    return aligned.runs


class _RecordingClient(LLMServerClient):
    """Records every single attempt of verl's resuming client.

    Invariant: an attempt's tokens are recorded before the resuming client sees them. No more than
    `max_inflight` requests of this client are submitted to one replica; the others wait here, in order of arrival.
    """

    def __init__(
        self,
        *args: Any,
        controller: ray.actor.ActorHandle,
        max_inflight: int,
        stream: ray.actor.ActorHandle | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._controller = controller
        self._stream = stream
        self._max_inflight = max_inflight
        self._slots: dict[str, asyncio.Semaphore] = {}

    @property
    def controller(self) -> ray.actor.ActorHandle:
        return self._controller

    @property
    def stream(self) -> ray.actor.ActorHandle | None:
        """The stream service, or None where nothing streams."""
        return self._stream

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, ray.actor.ActorHandle]:
        server_id, server = await super()._acquire_server(request_id, **extra)
        slots = self._slots.setdefault(server_id, asyncio.Semaphore(self._max_inflight))
        try:
            await slots.acquire()
        except asyncio.CancelledError:
            super()._release_server(server_id, request_id=request_id)
            raise
        return server_id, server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._slots[server_id].release()
        super()._release_server(server_id, request_id=request_id)

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        output = await super().generate(request_id, **kwargs)
        session = current_session.get()
        if session is not None and output.token_ids:
            session.record(output.extra_fields["global_steps"], len(output.token_ids))
            if output.stop_reason in ("abort", "aborted"):
                self._controller.carried.remote(session.uid, session.session_id, session.num_tokens)
            else:
                self._controller.started.remote(session.uid)
        return output


class LLMServerClientOppo(FullyAsyncLLMServerClient, _RecordingClient):
    """verl's resuming client over the recording one (the order of the bases is the mechanism)."""

    def _vllm_request_id(self, request_id: str) -> str:
        fresh_id = super()._vllm_request_id(request_id)
        session = current_session.get()
        # Under full_determinism verl hands the caller's id through, and nothing is streamed.
        if session is None or fresh_id == request_id:
            return fresh_id
        return tag_request(fresh_id, session.uid, session.session_id)
