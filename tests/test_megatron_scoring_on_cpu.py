"""Megatron-Core scorers: weights against transformers, streamed scores and values against the plain path.

The cases run in two processes of their own (`megatron_scoring`): as one tensor-parallel group of 2, then as two
data-parallel ranks of tensor parallel 1. Here each is judged.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CASES_FOLDER = Path(__file__).parent / "megatron_scoring"
TOLERANCE = 1e-5
"""Of |difference| / max(1, |plain|) in float32."""
DEADLINE = 420
"""Seconds for all cases, the imports included."""
TENSOR_PARALLEL = (2, 1)

pytestmark = pytest.mark.timeout(DEADLINE + 60)

MODELS = ("qwen2_value", "qwen2_reward")
CHUNKS = [f"chunks-{model}-{size}" for model in MODELS for size in ("1", "7", "64", "whole")]
HOW = ("dropped", "doubled", "reordered", "shuffled", "retokenised", "restarted", "aborted", "resumed")
DISTURBED = [f"disturbed-qwen2_value-{how}" for how in HOW]
TIGHT = [f"{kind}-{model}" for kind in ("unstreamed", "evicted", "carried", "short") for model in MODELS]
REWARDS = [
    "last_of_a_reward-qwen2_reward",
    "last_of_a_reward-llama_reward",
    "chunks-llama_reward-7",
    "chunks-one_head_reward-7",
]
MAPPED = [f"mapped-{model}" for model in ("qwen2_tied", "qwen2_untied", "llama_tied", "llama_untied")]
EQUAL_TO_PLAIN = [*MAPPED, *CHUNKS, *DISTURBED, *TIGHT, *REWARDS, "split-qwen2_value", "critic-qwen2_value"]
EQUAL_TO_PLAIN += ["refused_input", "alone"]
ALL = [*EQUAL_TO_PLAIN, "registered", "refused_critics"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks, which have ended, left the results."""
    folder = tmp_path_factory.mktemp("megatron")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [start(folder, rank, port) for rank in range(2)]
    try:
        for rank in ranks:
            rank.wait(DEADLINE)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return folder


def start(folder: Path, rank: int, port: int) -> subprocess.Popen:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    names = [f"tp{size}-{case}" for size in TENSOR_PARALLEL for case in ALL]
    with open(folder / f"log.{rank}", "w") as log:
        return subprocess.Popen(
            [sys.executable, str(CASES_FOLDER), str(folder), *names], env=environment, stdout=log, stderr=log
        )


def results(folder: Path, tensor_parallel: int, case: str) -> list[dict]:
    """One result per rank; fails with the ranks' own errors."""
    files = [folder / f"tp{tensor_parallel}-{case}.{rank}.json" for rank in range(2)]
    found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    errors = [each["error"] for each in found if "error" in each]
    if errors or not all(found):
        failed = sorted(file.name for file in folder.glob("*.json") if '"error"' in file.read_text())
        pytest.fail("\n".join([*errors, f"failed: {failed}", (folder / "log.0").read_text()[-2000:]]))
    return found


@pytest.mark.parametrize("tensor_parallel", TENSOR_PARALLEL)
@pytest.mark.parametrize("case", EQUAL_TO_PLAIN)
def test_equals_transformers(folder: Path, case: str, tensor_parallel: int) -> None:
    differences = [each["difference"] for each in results(folder, tensor_parallel, case)]
    assert max(differences) <= TOLERANCE


@pytest.mark.parametrize(
    ("tensor_parallel", "expected"),
    [(2, [(0, True), (0, False)]), (1, [(0, True), (1, True)])],
)
def test_ranks_of_a_tensor_parallel_group_are_one_rank_of_the_data_mesh(
    folder: Path, tensor_parallel: int, expected: list[tuple[int, bool]]
) -> None:
    found = results(folder, tensor_parallel, "registered")
    assert [(each["data_rank"], each["collects"]) for each in found] == expected


@pytest.mark.parametrize(("tensor_parallel", "refusing"), [(2, (0, 1)), (1, (1,))])
def test_every_rank_says_what_a_rank_refused(folder: Path, tensor_parallel: int, refusing: tuple[int, ...]) -> None:
    expected = "; ".join(
        f"rank {rank} of the scorer: trajectory t7: token id 97, allowed is 0 to 96, the scoring model's vocabulary"
        for rank in refusing
    )
    assert [each["message"] for each in results(folder, tensor_parallel, "refused_input")] == [expected] * 2


@pytest.mark.parametrize("tensor_parallel", TENSOR_PARALLEL)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "pipeline_model_parallel_size",
            "trainer.v1.oppo.intra_step cannot stream: pipeline_model_parallel_size is 2, allowed is 1",
        ),
        ("context_parallel_size", "trainer.v1.oppo.intra_step cannot stream: context_parallel_size is 2, allowed is 1"),
        ("window_size", "trainer.v1.oppo.intra_step cannot stream: the model's window_size is (8, 0), allowed is None"),
        (
            "num_moe_experts",
            "trainer.v1.oppo.intra_step cannot stream: the model's num_moe_experts is 4, allowed is None",
        ),
    ],
)
def test_a_critic_that_cannot_take_chunks_is_refused(
    folder: Path, name: str, message: str, tensor_parallel: int
) -> None:
    for each in results(folder, tensor_parallel, "refused_critics"):
        assert message in each["messages"][name]
