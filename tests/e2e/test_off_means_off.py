"""Off means off: on the same replayed rollouts stock verl, our entry with `sync`, and `oppo` with delta 0 agree.

verl's `skip.rollout_tq` caches the rollouts of the stock run and replays them into the others. The reward model is
colocated, so every run scores the replayed responses itself: verl computes those rewards after sampling, and the cache
holds none.

Tolerance: the runs do the same float32 arithmetic on the same rows. Rows may reach a micro batch in another order (they
are sorted by length, ties by arrival), which changes the order of sums: 1e-4 relative for losses and gradient norms
after some updates, 1e-5 for what is computed row by row from equal weights.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from e2e_runs import Run, assert_finished, train
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict

import verl_oppo.main_ppo  # noqa: F401  Registers the resolver of the demo's assets.

NUM_STEPS = 2
BATCH_SIZE = 16
ROW_TOLERANCE = 1e-5
SUM_TOLERANCE = 1e-4
SUMS = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/entropy")

pytestmark = pytest.mark.timeout(3800)


def overrides(folder: Path) -> list[str]:
    return [
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.save_freq=1",
        "trainer.checkpoint_callback_class=e2e_recorder.Recorder",
        "data.shuffle=false",
        "reward.reward_model.enable_resource_pool=false",
        "skip.rollout_tq.enable=true",
        f"skip.rollout_tq.dump_dir={folder}/rollouts",
        f"skip.rollout_tq.steps=[{','.join(map(str, range(1, NUM_STEPS + 1)))}]",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("off")


@pytest.fixture(scope="module")
def stock(folder: Path) -> Run:
    """`python -m verl.trainer.main_ppo` on the resolved config: nothing of ours but the CPU platform."""
    with initialize_config_module("verl_oppo.config", version_base=None):
        config = compose("oppo_cpu", [*overrides(folder), "trainer.v1.trainer_mode=sync"])
    with open_dict(config):
        del config.trainer.v1["oppo"]
        config.pop("emulate", None)
    OmegaConf.save(OmegaConf.create(OmegaConf.to_container(config, resolve=True)), folder / "stock.yaml")
    run = train(
        folder / "stock",
        [],
        module="verl.trainer.main_ppo",
        config=("--config-path", str(folder), "--config-name", "stock"),
        env=cpu_environment(),
    )
    assert_finished(run)
    return run


def cpu_environment() -> dict[str, str]:
    from verl_oppo.platform import cpu

    return cpu.cpu_environment()


@pytest.fixture(scope="module")
def ours_sync(folder: Path, stock: Run) -> Run:
    run = train(folder / "sync", [*overrides(folder), "trainer.v1.trainer_mode=sync"])
    assert_finished(run)
    return run


OFF = ("trainer.v1.oppo.inter_step.enable=false", "trainer.v1.oppo.intra_step.enable=false")


def cache_for_oppo(folder: Path) -> None:
    """verl names the cache after the data loader's fetch size, which is 1 in every mode but sync."""
    for cache in (folder / "rollouts").glob("*/GBS16_*"):
        target = cache.with_name(cache.name.replace("GBS16_", "GBS1_"))
        if not target.exists():
            shutil.copytree(cache, target)


@pytest.fixture(scope="module")
def oppo_off(folder: Path, stock: Run) -> Run:
    cache_for_oppo(folder)
    run = train(folder / "oppo", [*overrides(folder), *OFF])
    assert_finished(run)
    return run


@pytest.fixture(scope="module")
def oppo_shuffled(folder: Path, stock: Run) -> Run:
    """The second case: two shuffled minibatches a step."""
    cache_for_oppo(folder)
    actor = "actor_rollout_ref.actor"
    shuffled = [f"{actor}.ppo_mini_batch_size=8", f"{actor}.ppo_micro_batch_size_per_gpu=8", f"{actor}.shuffle=true"]
    run = train(folder / "shuffled", [*overrides(folder), *OFF, *shuffled, "trainer.total_training_steps=1"])
    assert_finished(run)
    return run


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
def test_same_rewards_advantages_losses_and_gradients(name: str, stock: Run, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(name)
    assert "Injected" in run.log, "the rollouts were not replayed"
    for step in range(1, NUM_STEPS + 1):
        tolerance = ROW_TOLERANCE if step == 1 else SUM_TOLERANCE
        fields = ("rm_scores", "old_log_probs", "values", "advantages")
        assert_rows_equal(run, stock, step, fields, tolerance)
        for metric in SUMS:
            ours, theirs = run.metrics[step - 1][metric], stock.metrics[step - 1][metric]
            assert ours == pytest.approx(theirs, rel=SUM_TOLERANCE, abs=1e-6), (step, metric)


def test_rewards_are_not_all_alike(stock: Run) -> None:
    scores = {round(sum(row["rm_scores"]), 4) for row in canonical_rows(stock, 1)}
    assert len(scores) > BATCH_SIZE // 2, "a constant reward would make every comparison pass"


def test_what_shuffled_minibatches_cannot_change(stock: Run, oppo_shuffled: Run) -> None:
    """Before the first update nothing depends on the minibatches."""
    assert_rows_equal(oppo_shuffled, stock, 1, ("rm_scores", "old_log_probs", "values", "advantages"), ROW_TOLERANCE)
    assert oppo_shuffled.metrics[0]["actor/entropy"] == pytest.approx(stock.metrics[0]["actor/entropy"], rel=1e-5)


def test_a_part_that_is_off_has_no_actor(stock: Run, oppo_off: Run) -> None:
    """Beyond stock verl's named actors `oppo` with both overlaps off has none but the rollout controller's group."""

    def kinds(run: Run) -> set[str]:
        named = run.recorded(1)["actors"]
        return {
            kind for kind in ("reward", "vllm_server", "agent_loop", "stream") if any(kind in name for name in named)
        }

    assert kinds(oppo_off) == kinds(stock)
