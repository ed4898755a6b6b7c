"""A real online DPO run: three responses a prompt, streamed to the reference and to a reward server of vLLM."""

import math

import pytest
from e2e_runs import GetRun, Run
from e2e_specs import DPO_PROMPTS, DPO_RESPONSES, DPO_STEPS

pytestmark = pytest.mark.timeout(3600)

FIELD_NAMES = ("loss", *(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")))


@pytest.fixture(scope="module")
def run(runs: GetRun) -> Run:
    return runs("online_dpo")


def test_best_and_worst_of_each_prompt_are_trained_and_nothing_else(run: Run) -> None:
    for step in range(1, DPO_STEPS + 1):
        groups: dict[str, dict[str, dict]] = {}
        for key, row in run.trained_rows(step).items():
            if not key.startswith("pad"):
                groups.setdefault(key.split("_")[0], {})[key] = row
        assert len(groups) == DPO_PROMPTS and all(len(rows) == DPO_RESPONSES for rows in groups.values())
        weights = 0.0
        for rows in groups.values():
            scores = {key: sum(row["rm_scores"]) for key, row in rows.items()}
            pair = {key: row["pair_weight"] for key, row in rows.items() if "pair_weight" in row}
            assert len(pair) == 2 and len(set(pair.values())) == 1
            assert {scores[key] for key in pair} == {min(scores.values()), max(scores.values())}
            weights += next(iter(pair.values()))
        assert weights == pytest.approx(2), "the mean over the pairs of each of the two minibatches"


def test_metrics_have_the_fields_names_and_count_pairs(run: Run) -> None:
    assert len(run.metrics) == DPO_STEPS
    for data in run.metrics:
        assert all(math.isfinite(data[name]) for name in (*FIELD_NAMES, "logps/chosen", "logps/rejected"))
        assert data["rewards/margins"] == pytest.approx(data["rewards/chosen"] - data["rewards/rejected"], abs=1e-5)
        assert data["oppo/dpo/pairs"] + data["oppo/dpo/ties"] == DPO_PROMPTS
        assert data["oppo/dpo/pairs_fresh"] + data["oppo/dpo/pairs_stale"] == data["oppo/dpo/pairs"]
    first = run.metrics[0]
    assert first["oppo/dpo/margin_fresh_mean"] == pytest.approx(0, abs=1e-4), "the actor is its own reference"


def test_prompts_are_deferred(run: Run) -> None:
    assert max(data["oppo/deferred/num"] for data in run.metrics) > 0


@pytest.mark.parametrize("scorer", ["reward", "reference"])
def test_prefixes_were_cached_and_the_results_are_the_plain_ones(run: Run, scorer: str) -> None:
    assert max(data[f"oppo/overlap/{scorer}_cached_token_ratio"] for data in run.metrics) > 0.3
    verified = [data[key] for data in run.metrics if (key := f"oppo/verify/{scorer}_difference") in data]
    assert len(verified) == -(-DPO_STEPS // 2), "every second step, the first one included"
    assert max(verified) <= 1e-5


def test_there_is_no_critic(run: Run) -> None:
    """verl says which engines it builds, and times what they do."""
    assert "actor and ref model engine initialized" in run.log
    assert "critic model engine initialized" not in run.log
    assert not any(name in data for data in run.metrics for name in ("timing_s/values", "timing_s/update_critic"))
