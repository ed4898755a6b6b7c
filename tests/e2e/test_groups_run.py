"""A real GRPO run with `rollout.n = 2`, a reward model that takes chunks on FSDP, and DAPO's group filtering."""

from collections import Counter

import pytest
from e2e_runs import Run, assert_finished, train

NUM_STEPS = 4
BATCH_SIZE = 8
GROUP_SIZE = 2

pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(
        tmp_path_factory.mktemp("groups") / "run",
        [
            f"trainer.total_training_steps={NUM_STEPS}",
            f"data.train_batch_size={BATCH_SIZE}",
            f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH_SIZE}",
            "algorithm.adv_estimator=grpo",
            "algorithm.filter_groups.enable=true",
            "trainer.v1.oppo.intra_step.reward=fsdp",
            "trainer.v1.oppo.intra_step.critic=false",
            "trainer.v1.oppo.intra_step.reference=false",
            "trainer.v1.oppo.intra_step.chunk_size=16",
            "trainer.v1.oppo.intra_step.verify=2",
            "trainer.v1.oppo.inter_step.delta_init=3",
            "trainer.save_freq=1",
            "trainer.checkpoint_callback_class=e2e_recorder.Recorder",
        ],
    )
    assert_finished(run)
    return run


def test_groups_are_trained_whole_and_once(run: Run) -> None:
    trained: list[str] = []
    for step in range(1, NUM_STEPS + 1):
        groups = Counter(key.split("_")[0] for key in run.trained_rows(step))
        assert len(groups) == BATCH_SIZE and set(groups.values()) == {GROUP_SIZE}, (step, groups)
        trained += groups
    assert len(set(trained)) == BATCH_SIZE * NUM_STEPS


def test_ledger_counts_groups(run: Run) -> None:
    for step, data in enumerate(run.metrics, start=1):
        ledger = {name: data[f"oppo/ledger/{name}"] for name in ("submitted", "trained", "evicted", "outstanding")}
        assert ledger["trained"] == BATCH_SIZE * step
        assert ledger["submitted"] == ledger["trained"] + ledger["evicted"] + ledger["outstanding"], ledger
    assert max(data["oppo/deferred/num"] for data in run.metrics) > 0


def test_streamed_rewards_are_the_plain_ones(run: Run) -> None:
    key = "oppo/verify/reward_difference"
    verified = [data[key] for data in run.metrics if key in data]
    assert len(verified) == NUM_STEPS // 2 and max(verified) <= 1e-5
    assert max(data["oppo/overlap/cached_token_ratio"] for data in run.metrics) > 0.3
    assert "oppo/overlap/hidden_ratio" in run.metrics[-1]


def test_there_is_no_reward_server(run: Run) -> None:
    """verl launches one whenever the reward model is enabled; the FSDP worker group stands in its place."""
    servers = [name for name in run.recorded(1)["actors"] if "server" in name]
    assert servers and not any("reward" in name for name in servers), servers
