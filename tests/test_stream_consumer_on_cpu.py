"""The stream service in this process: every consumer gets its chunks, its errors and its end."""

import asyncio
from typing import Any

import numpy as np
import pytest

from verl_oppo.scoring.scorer import CallReport, Chunk, PrefillReply, Scored, ScoreReply, Trajectory
from verl_oppo.stream.consumer import ConsumerSettings
from verl_oppo.stream.service import StreamService

LONG_S = 200.0


class InProcess:
    """A target on this event loop that notes its calls."""

    num_ranks = 1

    def __init__(self, *processes: str) -> None:
        self.processes = frozenset(processes)
        self.prefilled: list[Chunk] = []
        self.dropped: list[str] = []
        self.invalidated = 0
        self.most_in_flight = 0

    async def prefill(self, chunks_by_rank: list[list[Chunk]]) -> list[PrefillReply]:
        self.prefilled += chunks_by_rank[0]
        return [PrefillReply({chunk.trajectory_id: len(chunk.token_ids) for chunk in chunks_by_rank[0]}, CallReport())]

    async def score(self, trajectories_by_rank: list[list[Trajectory]], keep: bool = False) -> list[ScoreReply]:
        return [
            ScoreReply(
                [Scored(t.trajectory_id, np.float32(t.token_ids), 0) for t in trajectories_by_rank[0]], CallReport()
            )
        ]

    async def invalidate(self) -> None:
        self.invalidated += 1

    async def drop(self, trajectory_ids: list[str]) -> None:
        self.dropped += trajectory_ids

    async def open_stream(self) -> None: ...

    async def close_stream(self) -> None: ...


class Doubling:
    """A translator whose model reads every token twice."""

    def __init__(self) -> None:
        self.prompts: dict[str, Any] = {}
        self.over: list[str] = []

    def register_prompt(self, uid: str, messages: Any, prompt_length: int | None = None) -> None:
        self.prompts[uid] = (messages, prompt_length)

    def translate(self, chunk: Chunk) -> list[Chunk]:
        if chunk.trajectory_id == "untranslatable":
            raise ValueError("no template for it")
        if chunk.trajectory_id == "bug":
            raise KeyError("a bug of the translator")
        return [Chunk(chunk.trajectory_id, 2 * chunk.offset, list(np.repeat(chunk.token_ids, 2)))]

    def forget(self, trajectory_ids: list[str]) -> None:
        self.over += trajectory_ids


async def with_two_consumers() -> tuple[StreamService, InProcess, InProcess, Doubling]:
    service, critic, reward, translator = StreamService(), InProcess("p"), InProcess("q"), Doubling()
    await service.add_consumer("critic", critic, ConsumerSettings())
    await service.add_consumer("reward", reward, ConsumerSettings(), translator)
    await service.open(["critic", "reward"])
    return service, critic, reward, translator


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_every_consumer_gets_every_chunk_in_its_own_tokens():
    service, critic, reward, translator = await with_two_consumers()
    await service.register_prompt("u", [{"role": "user", "content": "hi"}], prompt_length=2)
    await service.push([Chunk("t", 0, [5, 6]), Chunk("untranslatable", 0, [1])])
    await service.push([Chunk("t", 2, [7])])
    await settle()
    assert [(c.trajectory_id, c.offset, list(c.token_ids)) for c in reward.prefilled] == [("t", 0, [5, 5, 6, 6, 7, 7])]
    assert [c.trajectory_id for c in critic.prefilled] == ["t", "untranslatable"]
    assert translator.prompts == {"u": ([{"role": "user", "content": "hi"}], 2)}
    stats = await service.stats()
    assert stats["reward"].trajectories_refused == 1 and stats["critic"].hub.tokens_taken == 4


async def test_what_is_over_is_forgotten_by_scorer_and_translator():
    service, critic, reward, translator = await with_two_consumers()
    await service.push([Chunk("t", 0, [5, 6]), Chunk("s", 0, [1])])
    await settle()
    await service.score("reward", [Trajectory("s", [1, 1])], keep=True)
    assert translator.over == []
    await service.score("reward", [Trajectory("s", [1, 1])])
    assert translator.over == ["s"]
    await service.drop(["t"])
    assert translator.over == ["s", "t"] and (critic.dropped, reward.dropped) == (["t"], ["t"])
    await service.invalidate("critic")
    assert (critic.invalidated, reward.invalidated) == (1, 0)


async def test_a_translator_that_fails_ends_its_own_consumer_and_says_so():
    service, critic, reward, _ = await with_two_consumers()
    await service.push([Chunk("bug", 0, [1])])
    await service.push([Chunk("t", 0, [1])])
    await settle()
    assert [c.trajectory_id for c in critic.prefilled] == ["bug", "t"] and not reward.prefilled
    with pytest.raises(KeyError, match="a bug of the translator"):
        await service.score("reward", [Trajectory("t", [1, 1])])
    with pytest.raises(KeyError, match="a bug of the translator"):
        await service.close(["reward", "critic"], LONG_S)
    await service.push([Chunk("t", 1, [1])])
    await settle()
    assert len(critic.prefilled) == 2, "the other one was closed all the same"
    assert len(await service.score("critic", [Trajectory("t", [1])])) == 1


async def test_consumers_in_the_same_processes_share_a_gate():
    service = StreamService()
    targets = {"critic": InProcess("p0", "p1"), "reference": InProcess("p0", "p1"), "reward": InProcess("q0")}
    for name, target in targets.items():
        await service.add_consumer(name, target, ConsumerSettings())
    gates = {name: consumer.gate for name, consumer in service._consumers.items()}
    assert gates["critic"] is gates["reference"] is not gates["reward"]
    with pytest.raises(ValueError, match="shares worker processes with two targets that share none"):
        await service.add_consumer("both", InProcess("p0", "q0"), ConsumerSettings())


async def test_unknown_and_doubled_names():
    service, *_ = await with_two_consumers()
    for call in (
        service.score("rewards", [Trajectory("a", [1, 1])]),
        service.open(["rewards"]),
        service.invalidate("rewards"),
    ):
        with pytest.raises(ValueError, match="consumer is 'rewards', allowed: 'critic', 'reward'"):
            await call
    with pytest.raises(ValueError, match="consumer 'critic' is there already"):
        await service.add_consumer("critic", InProcess(), ConsumerSettings())
