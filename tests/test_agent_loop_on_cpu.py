"""The versions that an agent loop's outputs carry into training: several turns, several outputs, none."""

from collections.abc import Sequence
from typing import Any

import pytest
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

from verl_oppo.rollout.agent_loop import TOKEN_VERSIONS_KEY, attach_versions
from verl_oppo.rollout.partial import TokenLedger


def recorded(segments: Sequence[tuple[int, int]]) -> TokenLedger:
    session = TokenLedger("u", 0)
    for version, num_tokens in segments:
        session.record(version, num_tokens)
    return session


def loop_output(mask: list[int], **extra_fields: Any) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=[0, 1],
        response_ids=list(range(len(mask))),
        response_mask=mask,
        metrics=AgentLoopMetrics(),
        extra_fields=extra_fields,
    )


def test_versions_span_all_turns_of_a_multi_turn_loop():
    """verl's tool loop keeps the last turn's versions only."""
    output = loop_output([1, 1, 0, 0, 1, 1, 0, 1], min_global_steps=5, max_global_steps=5)
    attach_versions([output], recorded([(3, 2), (4, 1), (5, 2)]))
    assert output.extra_fields[TOKEN_VERSIONS_KEY] == [[3, 2], [-1, 2], [4, 1], [5, 1], [-1, 1], [5, 1]]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 5)


def test_outputs_of_one_session_share_its_tokens_in_order():
    outputs = [loop_output([1, 1]), loop_output([0, 1, 1]), loop_output([1])]
    attach_versions(outputs, recorded([(3, 3), (4, 2)]))
    assert [output.extra_fields[TOKEN_VERSIONS_KEY] for output in outputs] == [
        [[3, 2]],
        [[-1, 1], [3, 1], [4, 1]],
        [[4, 1]],
    ]
    spans = [(output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) for output in outputs]
    assert spans == [(3, 3), (3, 4), (4, 4)]


@pytest.mark.parametrize("mask", [[], [0, 0]])
def test_an_output_without_a_generated_token_keeps_verls_versions(mask):
    output = loop_output(mask, min_global_steps=2, max_global_steps=2)
    attach_versions([output], recorded([(3, 1)]))
    assert sum(count for _, count in output.extra_fields[TOKEN_VERSIONS_KEY]) == len(mask)
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (2, 2)
