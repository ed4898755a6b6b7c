"""On real FSDP engines on gloo, on 1 and on 2 ranks: streamed scores, values and log-probs equal verl's plain path, and
loss and gradient of online DPO equal a float64 reference.

The cases run in processes of their own (`fsdp_scoring`), once per number of ranks; here each is judged.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CASES_FOLDER = Path(__file__).parent / "fsdp_scoring"
TOLERANCE = 1e-5
"""Of |difference| / max(1, |plain|) in float32."""
DPO_TOLERANCE = 1e-6
"""Of the DPO loss and of each element of its gradient, both of which are below 1, in float32."""
DEADLINE = 840
"""Seconds for all cases of one number of ranks, the imports included."""

pytestmark = pytest.mark.timeout(DEADLINE + 60)

MODELS = ("critic", "reference", "reference07")
CHUNKS = [f"chunks-{model}-{size}" for model in MODELS for size in ("1", "7", "64", "whole")]
HOW = ("dropped", "doubled", "reordered", "shuffled", "retokenised", "restarted", "aborted", "resumed")
DISTURBED = [f"disturbed-{model}-{how}" for model in MODELS for how in HOW]
TIGHT = [f"{kind}-{model}" for kind in ("unstreamed", "evicted", "carried", "short") for model in MODELS]
ENGINES = ["chunks-critic_fsdp1-7", "chunks-reference_fsdp1-7", "chunks-reference_fsdp107-7", "chunks-reference_moe-7"]
CHANGED = ["updated", "reloaded"]
EQUAL_TO_PLAIN = [*CHUNKS, *DISTURBED, *TIGHT, *ENGINES, *CHANGED, "reward", "uneven", "refused_input", "offloaded"]
DPO = [f"dpo-{variant}" for variant in ("sigmoid", "smoothed", "ipo", "packed", "carried")]
ON_EVERY_RANK_COUNT = [*EQUAL_TO_PLAIN, "bfloat16", *DPO]
ON_ONE_RANK = ["refused_setup", "unready", "reference_role"]
WORLD_SIZES = (1, 2)


def cases_of(world_size: int) -> list[str]:
    return ON_EVERY_RANK_COUNT + (ON_ONE_RANK if world_size == 1 else [])


class Ranks:
    """The processes of one number of ranks, and what their cases left."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size, self.folder = world_size, folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._processes = [self._start(rank, port) for rank in range(world_size)]

    def _start(self, rank: int, port: int) -> subprocess.Popen:
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        with open(self.folder / f"log.{rank}", "w") as log:
            return subprocess.Popen(
                [sys.executable, str(CASES_FOLDER), str(self.folder), *cases_of(self.world_size)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        """Until all are through or one has failed; then, or at the deadline, the others are ended."""
        try:
            for process in self._processes:
                process.wait(DEADLINE)
        finally:
            self.end()

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def results(self, case: str) -> list[dict]:
        """One result per rank; fails with the ranks' own errors."""
        files = [self.folder / f"{case}.{rank}.json" for rank in range(self.world_size)]
        results = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        errors = [result["error"] for result in results if "error" in result]
        if errors:
            pytest.fail("\n".join(errors))
        if not all(results):
            failed = sorted(file.name for file in self.folder.glob("*.json") if '"error"' in file.read_text())
            log = (self.folder / "log.0").read_text()[-3000:]
            pytest.fail(f"{case} did not run; failed before it: {failed}\n{log}")
        return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Both numbers of ranks at once: most of the time goes into imports."""
    running = {size: Ranks(size, tmp_path_factory.mktemp(f"ranks{size}")) for size in WORLD_SIZES}
    try:
        for each in running.values():
            each.wait()
    finally:
        for each in running.values():
            each.end()
    return running


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", EQUAL_TO_PLAIN)
def test_streamed_equals_plain(ranks, case, world_size):
    differences = [result["difference"] for result in ranks[world_size].results(case)]
    assert max(differences) <= TOLERANCE


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_reward_models_score_is_that_of_its_sequence_classification_head(ranks, world_size):
    results = ranks[world_size].results("reward")
    assert max(result["difference_from_transformers"] for result in results) <= TOLERANCE


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_in_bfloat16_the_cache_adds_no_more_than_rounding(ranks, world_size):
    for result in ranks[world_size].results("bfloat16"):
        assert result["difference"] <= max(2 * result["noise"], 2**-7)
        assert result["bytes_per_token"] == 128, "the cache is of the compute type"


def test_all_ranks_run_the_same_number_of_forwards(ranks):
    first, second = ranks[2].results("unstreamed-critic")
    assert first["forwards"] == second["forwards"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("token id", "trajectory t7: token id 97, allowed is 0 to 96"),
        ("negative", "trajectory t7: token id -1, allowed is 0 to 96"),
        ("offset", "trajectory t7: chunk offset is -1, allowed is 0 or more"),
        ("list", "trajectory t7: token_ids has shape (1, 1)"),
        ("too long", "trajectory t7 has 129 tokens, allowed is trainer.v1.oppo.intra_step.longest_trajectory, 128"),
        ("long", "trajectory t7 has 129 tokens, allowed is trainer.v1.oppo.intra_step.longest_trajectory, 128"),
        ("empty", "trajectory t7 has 0 tokens, allowed is 1 or more"),
        ("twice", "trajectory t7 is in one score call twice, allowed is once"),
    ],
)
def test_every_rank_says_which_trajectory_one_rank_refused(ranks, what, message, world_size):
    for result in ranks[world_size].results("refused_input"):
        assert f"rank {world_size - 1} of the scorer: {message}" in result["messages"][what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sequence parallel", "the.key cannot stream: ulysses_sequence_parallel_size is 2, allowed is 1"),
        ("strategy", "the.key cannot stream: strategy is 'fsdp_turbo', allowed is fsdp or fsdp2"),
        ("fused kernels", "the.key cannot stream: use_fused_kernels is True, allowed is False"),
        ("determinism", "the.key cannot stream: full_determinism is True, allowed is False"),
        ("lora", "the.key cannot stream: lora_rank is 8, allowed is 0"),
        ("sliding layers", "the.key cannot stream: layer_types is ['sliding_attention'], allowed is full_attention"),
        ("dynamic rope", "the.key cannot stream: rope_type is 'dynamic', allowed is"),
        ("bidirectional", "the.key cannot stream: model_type is 'qwen2', allowed is a decoder with causal attention"),
        ("attention", "the.key cannot stream: attn_implementation is 'flex_attention', allowed is one of sdpa, eager"),
        ("no room", "the.key.cache_bytes is 16384, allowed is 36864 or more"),
        ("two labels", "with num_labels 2, allowed is 1: a scalar head"),
        ("generative", "with architectures ['Qwen2ForCausalLM'], allowed is a *ForSequenceClassification"),
        ("no head", "without a weight named score.weight, allowed is a head of that name"),
        ("context", "the.key.longest_trajectory (prompt + response + template) is 513, allowed is 512 or less"),
        ("no model", "reward.reward_model.model_path is None, allowed is a checkpoint's path"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(ranks, what, message):
    assert message in ranks[1].results("refused_setup")[0]["messages"][what]


def test_a_worker_without_a_scorer_says_what_is_missing(ranks):
    assert ranks[1].results("unready")[0]["message"].startswith("RefWorkerOppo has no scorer yet: call oppo_setup")


def test_the_reference_inside_verls_own_worker_scores_and_a_worker_without_one_is_refused(ranks):
    (result,) = ranks[1].results("reference_role")
    assert result["difference"] <= TOLERANCE
    assert "intra_step.reference cannot stream: the worker's role is" in result["message"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", DPO)
def test_loss_and_gradient_of_online_dpo_equal_a_float64_reference(ranks, case, world_size):
    for result in ranks[world_size].results(case):
        assert result["loss"] <= DPO_TOLERANCE
        assert result["gradient"] <= DPO_TOLERANCE < 0.1 < result["largest_gradient"]
        assert result["margins"] == pytest.approx(result["expected_margins"], abs=1e-5)
