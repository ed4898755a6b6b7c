"""A real GRPO run with `rollout.n = 2`, a reward model that takes chunks on FSDP, and DAPO's group filtering."""

from collections import Counter

import pytest
from e2e_runs import GetRun, Run
from e2e_specs import GROUP_SIZE, GROUP_STEPS, NUM_GROUPS

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def run(runs: GetRun) -> Run:
    return runs("groups")


def test_groups_are_trained_whole_and_once(run: Run) -> None:
    trained: list[str] = []
    for step in range(1, GROUP_STEPS + 1):
        groups = Counter(key.split("_")[0] for key in run.trained_rows(step))
        assert len(groups) == NUM_GROUPS and set(groups.values()) == {GROUP_SIZE}, (step, groups)
        trained += groups
    assert len(set(trained)) == NUM_GROUPS * GROUP_STEPS


def test_ledger_counts_groups(run: Run) -> None:
    for step, data in enumerate(run.metrics, start=1):
        ledger = {name: data[f"oppo/ledger/{name}"] for name in ("submitted", "trained", "evicted", "outstanding")}
        assert ledger["trained"] == NUM_GROUPS * step
        assert ledger["submitted"] == ledger["trained"] + ledger["evicted"] + ledger["outstanding"], ledger
    assert max(data["oppo/deferred/num"] for data in run.metrics) > 0


def test_streamed_rewards_are_the_plain_ones(run: Run) -> None:
    key = "oppo/verify/reward_difference"
    verified = [data[key] for data in run.metrics if key in data]
    assert len(verified) == GROUP_STEPS // 2 and max(verified) <= 1e-5
    assert max(data["oppo/overlap/cached_token_ratio"] for data in run.metrics) > 0.3
    assert "oppo/overlap/hidden_ratio" in run.metrics[-1]


def test_there_is_no_reward_server(run: Run) -> None:
    """verl launches one whenever the reward model is enabled; the FSDP worker group stands in its place."""
    servers = [name for name in run.recorded(1)["actors"] if "server" in name]
    assert servers and not any("reward" in name for name in servers), servers


def test_there_is_no_critic(run: Run) -> None:
    """verl says which engines it builds."""
    assert "actor and ref model engine initialized" in run.log
    assert "critic model engine initialized" not in run.log
