"""Partial rollouts: versions of every token, and verl's resuming client on a scripted server behind verl's balancer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import ray
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import get_router_handle

from verl_oppo.metrics import expand_versions
from verl_oppo.rollout.controller import RolloutControllerGroup
from verl_oppo.rollout.partial import (
    TOOL_TOKEN_VERSION,
    LLMServerClientOppo,
    TokenLedger,
    align_versions,
    current_session,
    token_versions,
)
from verl_oppo.rollout.tee import trajectory_of

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 120.0
PROMPT = [0, 1]

# ---------------------------------- versions ----------------------------------

run_lists = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=6)
masks = st.lists(st.integers(0, 1), max_size=40)


def recorded(segments: Sequence[tuple[int, int]]) -> TokenLedger:
    session = TokenLedger("u", 0)
    for version, num_tokens in segments:
        session.record(version, num_tokens)
    return session


@given(run_lists)
def test_the_record_is_a_run_length_code_of_the_segments(segments):
    session = recorded(segments)
    assert expand_versions(session.runs).tolist() == [version for version, count in segments for _ in range(count)]
    assert session.num_tokens == sum(count for _, count in segments)
    assert all(count > 0 for _, count in session.runs)
    assert all(left[0] != right[0] for left, right in zip(session.runs, session.runs[1:], strict=False))


@given(run_lists, masks)
@example([(3, 5)], [1, 1]).via("the loop truncated the response")
@example([(3, 2), (4, 1)], [1, 0, 1, 1, 1, 1]).via("the loop made tokens of its own")
@example([], [1, 0]).via("nothing recorded")
def test_every_response_token_gets_a_version_in_the_order_of_generation(segments, mask):
    session = recorded(segments)
    versions = expand_versions(align_versions(token_versions(session.runs), mask)).tolist()
    assert len(versions) == len(mask)
    assert all((version == TOOL_TOKEN_VERSION) == (not made) for version, made in zip(versions, mask, strict=True)) or (
        not session.runs
    )
    generated = [version for version, made in zip(versions, mask, strict=True) if made]
    known = expand_versions(session.runs).tolist()
    oldest = min(known, default=TOOL_TOKEN_VERSION)
    assert generated == (known + [oldest] * len(mask))[: len(generated)], "an unknown token counts as the oldest"


# ---------------------------------- the client on a real server actor ----------------------------------


class Attempt(NamedTuple):
    """What the server saw of one request."""

    request_id: str
    prompt_len: int
    max_tokens: int


@ray.remote(num_cpus=0)
class ScriptedServer:
    """A replica whose answers are a script of (tokens it would give, stop reason, weight version).

    A token is its position in prompt + response and its log-prob the negative of it, so what is lost, doubled or out of
    order shows. Once `hold` was called, answers wait for `let_go`.
    """

    def __init__(self) -> None:
        self.load([])

    def load(self, script: list[tuple[int, str, int]]) -> None:
        self._script = list(script)
        self._attempts: list[tuple[str, int, int]] = []
        self._num_running = self._peak = 0
        self._permits: asyncio.Semaphore | None = None

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict, image_data: Any, video_data: Any
    ) -> TokenOutput:
        self._attempts.append((request_id, len(prompt_ids), sampling_params["max_tokens"]))
        num_tokens, stop_reason, version = self._script[len(self._attempts) - 1]
        self._num_running += 1
        self._peak = max(self._peak, self._num_running)
        try:
            if self._permits is not None:
                await self._permits.acquire()
            if stop_reason == "error":
                raise ValueError("the engine is dead")
        finally:
            self._num_running -= 1
        first = len(prompt_ids)
        tokens = list(range(first, first + min(num_tokens, sampling_params["max_tokens"])))
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-float(token) for token in tokens],
            stop_reason=stop_reason,
            num_preempted=0,
            extra_fields={"global_steps": version},
        )

    def hold(self) -> None:
        self._permits = asyncio.Semaphore(0)

    def let_go(self, num_requests: int) -> None:
        for _ in range(num_requests):
            self._permits.release()

    def attempts(self) -> list[tuple[str, int, int]]:
        return self._attempts

    def load_now_and_at_most(self) -> tuple[int, int]:
        return self._num_running, self._peak


class Replicas:
    """Two servers, of which verl's balancer knows the first; a client as an agent loop worker has it."""

    def __init__(self) -> None:
        self.servers = [ScriptedServer.remote() for _ in range(2)]
        self.balancer = get_router_handle({"server0": self.servers[0]})

    def client(self, controller: RolloutControllerGroup, **settings: Any) -> LLMServerClientOppo:
        rollout = {"name": "vllm", "response_length": 64, "full_determinism": False}
        rollout |= {key: settings.pop(key) for key in list(settings) if key in rollout}
        return LLMServerClientOppo(
            config=OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}),
            load_balancer_handle=self.balancer,
            controller=controller.handle,
            **{"max_inflight": 8, **settings},
        )

    def load(self, *script: tuple[int, str, int], server: int = 0) -> None:
        ray.get(self.servers[server].load.remote(list(script)), timeout=PATIENCE_S)

    def attempts(self, server: int = 0) -> list[Attempt]:
        return [Attempt(*seen) for seen in ray.get(self.servers[server].attempts.remote(), timeout=PATIENCE_S)]


@pytest.fixture(scope="module")
def replicas(shared_ray: None) -> Iterator[Replicas]:
    replicas = Replicas()
    yield replicas
    for actor in (*replicas.servers, replicas.balancer):
        ray.kill(actor)


@pytest.fixture(autouse=True)
def no_pause_before_resuming(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's client sleeps 1 s after an abort."""
    brief = SimpleNamespace(gather=asyncio.gather, sleep=lambda seconds: asyncio.sleep(0))
    monkeypatch.setattr(llm_server, "asyncio", brief)


async def generate(client: LLMServerClientOppo, session: TokenLedger | None = None, **params: Any) -> TokenOutput:
    """One request as an agent loop makes it; without a session as validation makes it."""
    current_session.set(session)
    return await client.generate(uuid4().hex, prompt_ids=PROMPT, sampling_params=params)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.01)


async def inflight(replicas: Replicas) -> int:
    """Requests that verl's balancer counts, those that wait in the client included."""
    return await replicas.balancer.get_total_inflight.remote()


async def nothing_inflight(replicas: Replicas) -> bool:
    return await inflight(replicas) == 0


async def test_a_request_aborted_twice_comes_back_whole(replicas, controller):
    controller.call("admit", ["u", "v"], step=1)
    replicas.load((3, "aborted", 4), (2, "abort", 5), (10, "completed", 6))
    session = TokenLedger("u", 0)
    output = await generate(replicas.client(controller), session)
    assert output.token_ids == list(range(2, 17))
    assert output.log_probs == [-float(token) for token in output.token_ids]
    assert output.stop_reason == "completed"
    assert session.runs == [[4, 3], [5, 2], [6, 10]]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (4, 6)
    attempts = replicas.attempts()
    assert [(attempt.prompt_len, attempt.max_tokens) for attempt in attempts] == [(2, 64), (5, 61), (7, 59)]
    assert len({attempt.request_id for attempt in attempts}) == 3
    assert {trajectory_of(attempt.request_id) for attempt in attempts} == {"u_0"}

    async def both_aborts_are_told() -> bool:
        return controller.call("state").carried_tokens == 5

    await until(both_aborts_are_told, "what the last abort left of the session")


@pytest.mark.parametrize("stop_reason", ["completed", "aborted"])
async def test_the_controller_learns_that_a_prompt_has_tokens(replicas, controller, stop_reason):
    controller.call("admit", ["u", "v"], step=1)
    replicas.load((3, stop_reason, 4), (1, "completed", 4))
    await generate(replicas.client(controller), TokenLedger("u", 1))

    async def it_is_told() -> bool:
        prompts = controller.call("state_dict")["outstanding"]
        return {prompt["uid"]: prompt["started"] for prompt in prompts} == {"u": True, "v": False}

    await until(it_is_told, "the event, which Ray may deliver later than a call made after it")


async def test_an_abort_before_the_first_token_is_no_deferral(replicas, controller):
    controller.call("admit", ["u", "v", "w"], step=1)
    for uid in "vw":
        ray.get(controller.handle.completed.remote(uid))
    controller.call("select", ["v", "w"], step=1)
    replicas.load((0, "aborted", 4), (0, "aborted", 5), (2, "completed", 6))
    session = TokenLedger("u", 0)
    output = await generate(replicas.client(controller), session)
    assert output.token_ids == [2, 3]
    assert session.runs == [[6, 2]]
    assert controller.call("deferrals", ["u"]) == [0]
    assert controller.call("state").carried_tokens == 0


async def test_validation_records_nothing(replicas, controller):
    controller.call("admit", ["u"], step=1)
    before = controller.call("state_dict")
    replicas.load((3, "aborted", 4), (2, "completed", 5))
    output = await generate(replicas.client(controller))
    assert output.token_ids == [2, 3, 4, 5, 6]
    assert [trajectory_of(attempt.request_id) for attempt in replicas.attempts()] == [None, None]
    assert controller.call("state_dict") == before
    assert controller.call("state").carried_tokens == 0


async def test_full_determinism_keeps_the_callers_request_id(replicas, controller):
    replicas.load((3, "completed", 4))
    current_session.set(TokenLedger("u", 0))
    client = replicas.client(controller, full_determinism=True)
    await client.generate("the caller's", prompt_ids=PROMPT, sampling_params={})
    assert [attempt.request_id for attempt in replicas.attempts()] == ["the caller's"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    carried=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=6),
    last=st.integers(1, 12),
    budget=st.integers(1, 20),
    is_explicit=st.booleans(),
)
@example(carried=[(8, 0)] * 3, last=1, budget=16, is_explicit=False).via("the abort finds the budget just used up")
def test_the_response_budget_holds_over_any_number_of_carries(replicas, controller, carried, last, budget, is_explicit):
    """`carried`: tokens before each abort, and how many weight versions later the next attempt runs."""
    version, script = 3, []
    for num_tokens, num_syncs in carried:
        script.append((num_tokens, "aborted", version))
        version += num_syncs
    replicas.load(*script, (last, "completed", version))
    session = TokenLedger("u", 0)
    client = replicas.client(controller, response_length=64 if is_explicit else budget)
    output = asyncio.run(generate(client, session, **({"max_tokens": budget} if is_explicit else {})))

    assert len(output.token_ids) == min(budget, sum(num_tokens for num_tokens, _ in carried) + last)
    assert output.token_ids == list(range(2, 2 + len(output.token_ids)))
    assert len(output.log_probs) == session.num_tokens == len(output.token_ids)
    attempts = replicas.attempts()
    assert all(attempt.max_tokens == budget - (attempt.prompt_len - len(PROMPT)) > 0 for attempt in attempts)
    versions = [
        script_version
        for attempt, (num_tokens, _, script_version) in zip(attempts, [*script, (last, "", version)], strict=False)
        for _ in range(min(num_tokens, attempt.max_tokens))
    ]
    assert expand_versions(session.runs).tolist() == versions


# ---------------------------------- request slots ----------------------------------


async def test_a_replica_holds_at_most_its_slots_and_the_rest_wait(replicas, controller):
    replicas.load(*[(4, "completed", 1)] * 5)
    server = replicas.servers[0]
    await server.hold.remote()
    client = replicas.client(controller, max_inflight=2)
    requests = [asyncio.create_task(generate(client, TokenLedger(f"u{i}", 0))) for i in range(5)]

    async def all_have_asked() -> bool:
        return await inflight(replicas) == 5 and (await server.load_now_and_at_most.remote())[0] == 2

    await until(all_have_asked, "two requests on the server and three in the client")
    await server.let_go.remote(5)
    outputs = await asyncio.gather(*requests)
    assert all(output.token_ids == [2, 3, 4, 5] for output in outputs)
    assert await server.load_now_and_at_most.remote() == (0, 2)
    await until(lambda: nothing_inflight(replicas), "the balancer's count to return to 0")


async def test_each_replica_has_slots_of_its_own(replicas, controller):
    await replicas.balancer.add_servers.remote({"server1": replicas.servers[1]})
    try:
        for index, server in enumerate(replicas.servers):
            replicas.load((1, "completed", 1), server=index)
            await server.hold.remote()
        client = replicas.client(controller, max_inflight=1)
        requests = [asyncio.create_task(generate(client)) for _ in range(2)]

        async def one_each() -> bool:
            return [(await server.load_now_and_at_most.remote())[0] for server in replicas.servers] == [1, 1]

        await until(one_each, "one request on each replica")
        for server in replicas.servers:
            await server.let_go.remote(1)
        await asyncio.gather(*requests)
    finally:
        await replicas.balancer.remove_servers.remote(["server1"])


async def test_an_error_of_the_server_comes_through_and_frees_the_slot(replicas, controller):
    replicas.load((0, "error", 1), (2, "completed", 1))
    client = replicas.client(controller, max_inflight=1)
    with pytest.raises(ValueError, match="the engine is dead"):
        await generate(client)
    output = await asyncio.wait_for(generate(client), PATIENCE_S)
    assert output.token_ids == [2, 3]
    await until(lambda: nothing_inflight(replicas), "the balancer's count to return to 0")


async def test_cancelled_requests_free_their_slots_and_their_places(replicas, controller):
    """One runs and one waits; both are cancelled; the slot is free, and the balancer counts none of them."""
    replicas.load((1, "completed", 1), (2, "completed", 1))
    server = replicas.servers[0]
    await server.hold.remote()
    client = replicas.client(controller, max_inflight=1)
    running = asyncio.create_task(generate(client))

    async def it_runs() -> bool:
        return (await server.load_now_and_at_most.remote())[0] == 1

    await until(it_runs, "the first request on the server")
    waiting = asyncio.create_task(generate(client))

    async def it_waits() -> bool:
        return await inflight(replicas) == 2

    await until(it_waits, "the second request in the client")
    await asyncio.sleep(0)
    for request in (waiting, running):
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await until(lambda: nothing_inflight(replicas), "the balancer's count to return to 0")
    third = asyncio.create_task(generate(client))
    await server.let_go.remote(2)
    assert len((await asyncio.wait_for(third, PATIENCE_S)).token_ids) == 2
