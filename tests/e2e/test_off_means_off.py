"""Off means off: on the same replayed rollouts stock verl, our entry with `sync`, and `oppo` with delta 0 agree.

verl's `skip.rollout_tq` caches the rollouts of the stock run and replays them into the others. The reward model is
colocated, so every run scores the replayed responses itself: verl computes those rewards after sampling, and the cache
holds none.

Tolerance: the runs do the same float32 arithmetic on the same rows. Rows may reach a micro batch in another order (they
are sorted by length, ties by arrival), which changes the order of sums: 1e-4 relative for losses and gradient norms
after some updates, 1e-5 for what is computed row by row from equal weights. Whitened advantages add up to zero, so the
policy loss of one minibatch is nothing but the rounding of its sum: 1e-5 absolute, as for the rows it is the mean of.
"""

import numpy as np
import pytest
from e2e_runs import GetRun, Run
from e2e_specs import BATCH_SIZE, REPLAYED_STEPS

ROW_TOLERANCE = 1e-5
SUM_TOLERANCE = 1e-4
SUMS = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/entropy")

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def stock(runs: GetRun) -> Run:
    return runs("stock")


def canonical_rows(run: Run, step: int) -> list[dict]:
    """The step's trained rows, ordered by their responses: uids are fresh in every run."""
    rows = run.trained_rows(step).values()
    assert len(rows) == BATCH_SIZE
    return sorted(rows, key=lambda row: (row["responses"], row["rm_scores"]))


def assert_rows_equal(left: Run, right: Run, step: int, fields: tuple[str, ...], tolerance: float) -> None:
    for ours, theirs in zip(canonical_rows(left, step), canonical_rows(right, step), strict=True):
        assert ours["responses"] == theirs["responses"]
        for field in fields:
            np.testing.assert_allclose(ours[field], theirs[field], rtol=tolerance, atol=tolerance, err_msg=field)


@pytest.mark.parametrize("name", ["ours_sync", "oppo_off"])
def test_same_rewards_advantages_losses_and_gradients(name: str, stock: Run, runs: GetRun) -> None:
    run = runs(name)
    assert "Injected" in run.log, "the rollouts were not replayed"
    for step in range(1, REPLAYED_STEPS + 1):
        tolerance = ROW_TOLERANCE if step == 1 else SUM_TOLERANCE
        fields = ("rm_scores", "old_log_probs", "values", "advantages")
        assert_rows_equal(run, stock, step, fields, tolerance)
        for metric in SUMS:
            ours, theirs = run.metrics[step - 1][metric], stock.metrics[step - 1][metric]
            absolute = ROW_TOLERANCE if metric == "actor/pg_loss" else 1e-6
            assert ours == pytest.approx(theirs, rel=SUM_TOLERANCE, abs=absolute), (step, metric)


def test_rewards_are_not_all_alike(stock: Run) -> None:
    scores = {round(sum(row["rm_scores"]), 4) for row in canonical_rows(stock, 1)}
    assert len(scores) > BATCH_SIZE // 2, "a constant reward would make every comparison pass"


def test_what_shuffled_minibatches_cannot_change(stock: Run, runs: GetRun) -> None:
    """Before the first update nothing depends on the minibatches."""
    oppo_shuffled = runs("oppo_shuffled")
    assert_rows_equal(oppo_shuffled, stock, 1, ("rm_scores", "old_log_probs", "values", "advantages"), ROW_TOLERANCE)
    assert oppo_shuffled.metrics[0]["actor/entropy"] == pytest.approx(stock.metrics[0]["actor/entropy"], rel=1e-5)


def test_a_part_that_is_off_has_no_actor(stock: Run, runs: GetRun) -> None:
    """Beyond stock verl's named actors `oppo` with both overlaps off has none but the rollout controller's group."""

    def kinds(run: Run) -> set[str]:
        named = run.recorded(1)["actors"]
        return {
            kind for kind in ("reward", "vllm_server", "agent_loop", "stream") if any(kind in name for name in named)
        }

    assert kinds(runs("oppo_off")) == kinds(stock)
