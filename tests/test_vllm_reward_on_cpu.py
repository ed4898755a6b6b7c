"""Reward servers as a target of the stream: a real vLLM engine's prefix cache, and what goes to which replica."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from verl_oppo.scoring.scorer import Chunk, Trajectory
from verl_oppo.scoring.vllm_reward import RewardServerInfo, VllmRewardTarget

SCRIPT = Path(__file__).parent / "reward_scoring" / "vllm_engine.py"
BLOCK = 32


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the script saw; a process of its own, since vLLM reads its platform at import."""
    folder = tmp_path_factory.mktemp("vllm")
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, timeout=800, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "seen.json").read_text())


engine_test = pytest.mark.timeout(900)


@engine_test
def test_the_input_is_tokenised_as_the_server_tokenises_the_text(seen):
    assert all(seen["served_ids"])


@engine_test
def test_growing_prefixes_are_found_cached_by_the_final_request(seen):
    for length, (start, end), cached in zip(seen["lengths"], seen["spans"], seen["cached"], strict=True):
        # The last chunk of 16 words and the last word are left, each of up to four tokens, and a part of a block.
        assert cached >= end - 4 * 17 - BLOCK
        assert cached <= length and cached % BLOCK == 0
        assert cached > start or end - start < 4 * 17 + BLOCK


@engine_test
def test_each_prefix_is_asked_for_only_when_it_has_another_full_block(seen):
    for lengths in seen["prefilled"]:
        assert all(length % BLOCK == 0 for length in lengths)
        assert all(later > earlier for earlier, later in zip(lengths, lengths[1:], strict=False))
    assert max(map(len, seen["prefilled"])) > 4


@engine_test
def test_streamed_scores_are_those_of_an_uncached_request_and_of_the_model_itself(seen):
    np.testing.assert_allclose(seen["scores"], seen["plain"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(seen["scores"], seen["transformers"], rtol=1e-5, atol=1e-5)
    assert np.ptp(seen["plain"]) > 0.1, "the scores tell the trajectories apart"


@engine_test
def test_a_prefix_that_the_final_input_contradicts_changes_no_score(seen):
    assert seen["wrong"] == pytest.approx(seen["plain"][-1], rel=1e-5, abs=1e-5)


@engine_test
def test_an_input_beyond_the_context_is_refused_by_name_and_the_server_goes_on(seen):
    assert "trajectory long_0" in seen["too_long"] and "allowed is 1 to 639" in seen["too_long"]
    assert seen["again"] == pytest.approx(seen["plain"][0], rel=1e-5, abs=1e-5)
    assert seen["failure"] is None


@engine_test
def test_a_prefix_beyond_the_context_is_prefilled_up_to_it(seen):
    assert seen["over"] == {"over_0": 639 - 639 % BLOCK}


@engine_test
def test_an_input_as_long_as_the_context_admits_is_answered(seen):
    """vLLM never answers one of `max_model_len` tokens whose prefill is chunked."""
    assert seen["full"] == pytest.approx(seen["full_plain"], rel=1e-5, abs=1e-5)


# What goes to which replica -------------------------------------------------------------------------------------------


class Server:
    """Keeps what it was asked for, and answers as the handle of a reward server."""

    def __init__(self) -> None:
        self.prefixes: list[dict[str, np.ndarray]] = []
        self.scored: list[str] = []
        self.cleared = 0
        self.oppo_prefill = SimpleNamespace(remote=self._prefill)
        self.oppo_score = SimpleNamespace(remote=self._score)
        self.clear_kv_cache = SimpleNamespace(remote=self._clear)

    async def _prefill(self, prefixes):
        self.prefixes.append(prefixes)
        return dict.fromkeys(prefixes, 0)

    async def _score(self, trajectory_id, ids):
        self.scored.append(trajectory_id)
        return float(len(ids)), 0

    async def _clear(self):
        self.cleared += 1


def two_replicas() -> tuple[VllmRewardTarget, list[Server]]:
    servers = [Server(), Server()]
    infos = [RewardServerInfo(block_size=4, longest_input=20, caches_prefixes=True, classifies=True)] * 2
    return VllmRewardTarget(servers, infos), servers


def chunk(name: str, start: int, stop: int) -> Chunk:
    return Chunk(name, start, np.arange(start, stop))


def test_ranks_are_replicas_and_a_trajectory_stays_where_it_is_pinned():
    target, servers = two_replicas()
    asyncio.run(target.prefill([[chunk("a", 0, 9)], [chunk("b", 0, 5)]]))
    replies = asyncio.run(target.score([[Trajectory("a", range(9))], [Trajectory("b", range(5))]]))
    assert [list(each.prefixes[0]) for each in servers] == [["a"], ["b"]]
    assert [each.scored for each in servers] == [["a"], ["b"]]
    assert [[(one.trajectory_id, one.last) for one in reply.scored] for reply in replies] == [
        [("a", 9.0)],
        [("b", 5.0)],
    ]


def test_only_whole_new_blocks_are_asked_for_and_the_reply_names_every_trajectory():
    target, (server, _) = two_replicas()
    cached = []
    for start, stop in ((0, 3), (3, 7), (7, 8), (8, 30)):
        (reply, _) = asyncio.run(target.prefill([[chunk("a", start, stop)], []]))
        cached.append(reply.cached)
    assert cached == [{"a": 0}, {"a": 4}, {"a": 8}, {"a": 20}]
    assert [len(prefixes["a"]) for prefixes in server.prefixes] == [4, 8, 20]


def test_a_chunk_behind_a_gap_is_ignored_and_counted():
    target, (server, _) = two_replicas()
    (reply, _) = asyncio.run(target.prefill([[chunk("a", 5, 9)], []]))
    assert reply.cached == {} and reply.report.chunks_ignored == 1
    assert server.prefixes == []


def test_a_contradicted_prefix_is_asked_for_again():
    target, (server, _) = two_replicas()
    asyncio.run(target.prefill([[chunk("a", 0, 8)], []]))
    asyncio.run(target.prefill([[Chunk("a", 2, np.array([50, 51, 52, 53, 54, 55]))], []]))
    assert [prefixes["a"].tolist() for prefixes in server.prefixes][1] == [0, 1, 50, 51, 52, 53, 54, 55]


def test_what_is_scored_or_dropped_is_forgotten_unless_it_is_to_be_kept():
    target, (server, _) = two_replicas()
    for keep in (True, False):
        asyncio.run(target.prefill([[chunk("a", 0, 8), chunk("b", 0, 8)], []]))
        asyncio.run(target.score([[Trajectory("a", range(8))], []], keep))
    assert sorted(target._known) == ["b"]
    asyncio.run(target.drop(["b", "unknown"]))
    assert target._known == {} and target._prefilled == {}


def test_invalidating_empties_every_server():
    target, servers = two_replicas()
    asyncio.run(target.prefill([[chunk("a", 0, 8)], []]))
    asyncio.run(target.invalidate())
    assert [server.cleared for server in servers] == [1, 1]
    assert target._known == {}


def test_servers_without_descriptions_are_refused():
    with pytest.raises(ValueError, match="0 servers with 0 descriptions, allowed is one of each or more"):
        VllmRewardTarget([], [])
