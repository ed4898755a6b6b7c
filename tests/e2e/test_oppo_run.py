"""One real OPPO run with checkpoints and validation, and its resume: ledger, token versions, lengths, ages.

Real verl trainer, vLLM, Ray and TransferQueue; a colocated reward model, critic and reference take chunks, and every
second step is verified against verl's plain path.
"""

import json
from pathlib import Path

import pytest
from e2e_runs import GetRun, Run
from e2e_specs import BATCH_SIZE, MAX_RESPONSE, NUM_STEPS, RESUMED_FROM, RESUMED_STEPS, VALIDATE_EVERY

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def first(runs: GetRun) -> Run:
    return runs("first")


@pytest.fixture(scope="module")
def resumed(runs: GetRun) -> Run:
    return runs("resumed")


def check_ledger(metrics: list[dict], first_step: int) -> None:
    for step, data in enumerate(metrics, start=first_step):
        ledger = {name: data[f"oppo/ledger/{name}"] for name in ("submitted", "trained", "evicted", "outstanding")}
        assert ledger["submitted"] == ledger["trained"] + ledger["evicted"] + ledger["outstanding"], (step, ledger)
        assert ledger["trained"] == BATCH_SIZE * step, (step, ledger)


def test_ledger_adds_up_at_every_step(first: Run) -> None:
    metrics = first.metrics
    assert len(metrics) == NUM_STEPS
    check_ledger(metrics, first_step=1)
    assert max(data["oppo/deferred/num"] for data in metrics) > 0
    assert metrics[-1]["oppo/ledger/outstanding"] == 0, "prompts were admitted that could not be trained any more"


def test_every_token_of_a_carried_rollout_knows_its_version(first: Run) -> None:
    num_carried = 0
    for step in range(1, NUM_STEPS + 1):
        rows = first.trained_rows(step)
        assert len(rows) == BATCH_SIZE, (step, len(rows))
        for key, row in rows.items():
            length = len(row["responses"])
            assert 0 < length <= MAX_RESPONSE, (key, length)
            for field in ("response_mask", "rollout_log_probs", "old_log_probs", "values", "advantages", "rm_scores"):
                assert len(row[field]) == length, (key, field, len(row[field]), length)
            versions = [version for version, count in row["token_versions"] for _ in range(count)]
            assert len(versions) == length, key
            assert versions == sorted(versions), f"{key}: a later token from older weights: {row['token_versions']}"
            assert (versions[0], versions[-1]) == (row["tag"]["min_global_steps"], row["tag"]["max_global_steps"]), key
            assert versions[-1] <= step - 1, (key, step)
            num_carried += versions[0] != versions[-1]
    assert num_carried > 0, "no rollout spans two weight versions: nothing was carried"


def test_streamed_scores_values_and_log_probs_are_the_plain_ones(first: Run) -> None:
    metrics = first.metrics
    for name in ("reward", "critic", "reference"):
        key = f"oppo/verify/{name}_difference"
        verified = [data[key] for data in metrics if key in data]
        assert len(verified) == NUM_STEPS // 2
        assert max(verified) <= 1e-5
        assert max(data[f"oppo/overlap/{name}_cached_token_ratio"] for data in metrics) > 0.1
    assert sum(data["oppo/chunk/num"] for data in metrics) > 0


def test_validation_runs_during_training(first: Run) -> None:
    validated = [any(name.startswith("val-core/") for name in data) for data in first.metrics]
    assert validated == [step % VALIDATE_EVERY == 0 for step in range(1, NUM_STEPS + 1)]


def test_first_b_wakes_the_trainer_at_once(first: Run) -> None:
    latencies = sorted(data["timing_s/first_b_latency"] for data in first.metrics)
    assert latencies[len(latencies) // 2] < 1.0, "verl's own poll takes 2 s; the signal must not depend on it"


def state_at(run: Run, step: int) -> dict:
    return json.loads((run.folder / "checkpoints" / f"global_step_{step}" / "oppo.json").read_text())


def test_state_is_saved_before_the_pointer(first: Run) -> None:
    checkpoints = Path(first.folder, "checkpoints")
    pointer = checkpoints / "latest_checkpointed_iteration.txt"
    assert (checkpoints / f"global_step_{NUM_STEPS}" / "oppo.json").stat().st_mtime <= pointer.stat().st_mtime
    state = state_at(first, NUM_STEPS)
    assert state["admission"]["trained"] == BATCH_SIZE * NUM_STEPS
    assert len(state["overcommit"]["rewards"]) == NUM_STEPS


def test_resume_loses_nothing_and_trains_nothing_twice(first: Run, resumed: Run) -> None:
    metrics = resumed.metrics
    assert [data["training/global_step"] for data in metrics] == list(range(RESUMED_FROM + 1, RESUMED_STEPS + 1))
    check_ledger(metrics, first_step=RESUMED_FROM + 1)
    trained = [key.split("_")[0] for step in range(1, RESUMED_STEPS + 1) for key in resumed.trained_rows(step)]
    assert len(trained) == len(set(trained)) == BATCH_SIZE * RESUMED_STEPS
    in_flight = state_at(resumed, RESUMED_FROM)["admission"]["outstanding"]
    assert in_flight, "nothing was in flight at the checkpoint: the test shows nothing"
    assert {prompt["uid"] for prompt in in_flight} <= set(trained)


def test_the_age_of_a_carried_prompt_survives_a_resume(first: Run, resumed: Run) -> None:
    before = {
        prompt["uid"]: prompt["deferrals"] for prompt in state_at(resumed, RESUMED_FROM)["admission"]["outstanding"]
    }
    after = {
        prompt["uid"]: prompt["deferrals"] for prompt in state_at(resumed, RESUMED_FROM + 1)["admission"]["outstanding"]
    }
    assert max(before.values()) > 0
    for uid in before.keys() & after.keys():
        assert after[uid] >= before[uid]
    # The oldest go first: what was deferred most is trained before what was admitted after the resume.
    assert resumed.metrics[0]["oppo/deferred/age_max"] <= 4
