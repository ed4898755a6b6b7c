"""verl's single-turn agent loop with the response length that the prompt's row states, for the same tokens in all arms.

verl's agent loop workers build it by `agent_loop.yaml`, in stock modes and in ours. It does not know arms, steps or
trainers. The responses are sampled from the policy without its end token and never end by themselves: rewards,
gradients and importance weights of such a run mean nothing.
"""

import time
from collections.abc import Mapping
from typing import Any

from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from verl_oppo.benchmark.work import LENGTH_KEY
from verl_oppo.trace_file import ROLLOUTS, trace_file

NEVER = -100.0
"""Bias of a logit that vLLM takes for an exclusion (its least one)."""


def length_of(fields: Mapping[str, Any]) -> int:
    """The response length that a prompt's row states.

    Raises:
        ValueError: the row states none, or one below 1.
    """
    length = (fields.get("extra_info") or {}).get(LENGTH_KEY)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"extra_info.{LENGTH_KEY} of a prompt is {length!r}; allowed: a whole number of 1 or more")
    return length


def replay_parameters(sampling_params: Mapping[str, Any], length: int, end_token: int | None) -> dict[str, Any]:
    """Sampling parameters with which vLLM decodes exactly `length` tokens.

    verl's resuming client lowers `max_tokens` by what it has when an aborted request goes on, so the whole response has
    `length` tokens after any number of carries (vLLM's `min_tokens`, a bound on each attempt, would not allow that).
    The end token is excluded and not only ignored: reward models drop it from the text, and their work would shrink.
    """
    bias = {} if end_token is None else {"logit_bias": {end_token: NEVER}}
    return {**sampling_params, "max_tokens": length, "ignore_eos": True, **bias}


class ReplayLengthsAgentLoop(SingleTurnAgentLoop):
    """Invariant: a response has as many tokens as its prompt's row states, or the rollout fails."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """As verl's; raises RuntimeError if the response has another length."""
        length = length_of(kwargs)
        started = time.time()
        parameters = replay_parameters(sampling_params, length, self.tokenizer.eos_token_id)
        output = await super().run(parameters, **kwargs)
        generated = sum(output.response_mask)
        if generated != length:
            raise RuntimeError(f"the response has {generated} tokens, its prompt's row states {length}")
        trace = trace_file(ROLLOUTS)
        if trace is not None:
            trace.write({"uid": kwargs.get("uid"), "length": length, "started": started, "ended": time.time()})
        return output
