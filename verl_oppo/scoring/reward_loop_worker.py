"""The worker of verl's reward loop that asks the stream service for the score of a discriminative reward model.

Built by `reward_loop.RewardLoopManagerOppo`; verl's agent loops call it at the end of each trajectory. It does not know
which kind of scorer answers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from omegaconf import DictConfig
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

from verl_oppo.scoring.reward_input import RewardInput
from verl_oppo.scoring.scorer import Scored, Trajectory

REWARD = "reward"
"""Name of the reward model among the stream's consumers."""


class StreamCalls(Protocol):
    """What is asked of `stream.service.StreamClient`."""

    async def call_async(self, method: str, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class ScoreRecord:
    """What the final call of one trajectory found, in tokens of the reward model's input."""

    response_tokens: int
    cached_response_tokens: int
    seconds: float
    """From the finished trajectory to its score."""
    scored_at: float = 0.0
    """When the score was there, seconds of `time.time()`: tells which trajectory completed a batch."""


class RewardLoopWorkerOppo(RewardLoopWorker):
    """verl's worker; a discriminative reward model's score comes from the stream service once that is attached.

    Invariant: a score is the scorer's answer on the final input, or an error; never a default.
    """

    def __init__(self, config: DictConfig, reward_router_address: str | None = None) -> None:
        super().__init__(config, reward_router_address)
        self._stream: StreamCalls | None = None
        self._failure: str | None = None
        self._records: dict[str, ScoreRecord] = {}
        if self.reward_model_tokenizer is not None:
            self._input = RewardInput(self.input_tokenizer, self.reward_model_tokenizer)

    async def oppo_attach(self, stream: StreamCalls) -> None:
        self._stream = stream

    async def oppo_failure(self) -> str | None:
        """Why scores can no longer be had, once that is so. A refused input is not among the reasons."""
        return self._failure

    async def oppo_take_records(self) -> dict[str, ScoreRecord]:
        """Records by trajectory id since the last call."""
        records, self._records = self._records, {}
        return records

    async def compute_score_disrm(self, data: DataProto) -> dict[str, Any]:
        """Score of one trajectory, with the `reward_extra_info` that verl's agent loop reads and verl leaves out.

        Raises the scorer's own error; ValueError, naming the trajectory, for an input that does not fit.
        """
        if self._stream is not None:
            return {"reward_score": await self._streamed_score(data), "reward_extra_info": {}}
        if self.reward_router_address is None:
            raise RuntimeError("the reward model has no server and the stream service is not attached yet")
        return {"reward_extra_info": {}, **await super().compute_score_disrm(data)}

    async def _streamed_score(self, data: DataProto) -> float:
        started = time.monotonic()
        input_ids = self._input.token_ids(await self._preprocess_reward_inputs(data))
        trajectory = Trajectory(trajectory_id(data), input_ids)
        try:
            (scored,) = await self._stream.call_async("score", REWARD, [trajectory])
        except ValueError:
            raise
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        self._records[trajectory.trajectory_id] = self._record(data, input_ids, scored, started)
        return scored.last

    def _record(self, data: DataProto, input_ids: Any, scored: Scored, started: float) -> ScoreRecord:
        first, end = self._input.response_span(list(data.non_tensor_batch["raw_prompt"][0]), input_ids)
        cached = min(end, scored.cached_tokens) - first
        return ScoreRecord(end - first, max(0, cached), time.monotonic() - started, time.time())


def trajectory_id(data: DataProto) -> str:
    """Identity of the trajectory as the token tee has it; a name of its own for a batch that carries none."""
    fields = data.non_tensor_batch
    if "uid" in fields and "session_id" in fields:
        return f"{fields['uid'][0]}_{fields['session_id'][0]}"
    return uuid4().hex
