"""GRPO's groups under deferral, on a real TransferQueue and rollout controller: one member of each group is deferred
twice, then one finishes and another fails. What is trained, kept and evicted, and that advantages are verl's own."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl_oppo.rollout.controller import RolloutControllerGroup
from verl_oppo.trainer.ppo_trainer import PPOTrainerOppo
from verl_oppo.trainer.replay_buffer import OppoReplayBuffer
from verl_oppo.trainer.support import load_oppo_config

pytestmark = pytest.mark.timeout(300)

GROUP_SIZE = 3


@pytest.fixture(scope="module")
def transfer_queue(shared_ray: None) -> Iterator[None]:
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()


def score(key: str) -> float:
    return (sum(map(ord, key)) % 7) / 2


def finish_members(uid: str, sessions: range | list[int]) -> None:
    """Rows of finished members, as verl's agent loop worker writes them; the prompt stays as it is."""
    keys = [f"{uid}_{session}_0" for session in sessions]
    lengths = [2 + session for session in sessions]

    def rows(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    fields = TensorDict(
        {
            "responses": rows([torch.arange(length) + ord(uid[0]) for length in lengths]),
            "response_mask": rows([torch.ones(length, dtype=torch.int64) for length in lengths]),
            "rm_scores": rows([torch.tensor([0.0] * (n - 1) + [score(k)]) for k, n in zip(keys, lengths, strict=True)]),
            "rollout_log_probs": rows([torch.full((length,), -1.0) for length in lengths]),
            "old_log_probs": rows([torch.full((length,), -1.1) for length in lengths]),
        },
        batch_size=len(keys),
    )
    fields["uid"] = [uid] * len(keys)
    tags = [{"status": "success", "seq_len": length, "response_len": length} for length in lengths]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)


class GroupRun:
    """The trainer's side of a run with groups of three, two groups a step."""

    def __init__(self, controller: RolloutControllerGroup) -> None:
        self.controller, self.step = controller, 1
        self.buffer = OppoReplayBuffer(
            controller=controller,
            check_health=lambda: None,
            trainer_mode="oppo",
            trainer_config=OmegaConf.create({}),
            sampler_kwargs=OmegaConf.create({}),
            refill_fn=self.refill,
            max_off_policy_threshold=8,
            max_off_policy_strategy="drop",
            filter_groups_metric=None,
        )

    def submit(self, uids: str) -> None:
        self.controller.call("admit", list(uids), step=self.step)
        tag = {"is_prompt": True, "status": "running", "global_steps": self.step}
        tq.kv_batch_put(keys=list(uids), partition_id="train", tags=[tag] * len(uids))

    def refill(self, num_prompts: int) -> int:
        assert num_prompts == 1
        self.submit("r")
        self.finish("r")
        return 1

    def finish(self, uid: str, sessions: range | list[int] = range(GROUP_SIZE)) -> None:
        """The group's last members finish, and with them the group."""
        finish_members(uid, sessions)
        self.settle(uid, "finished")

    def settle(self, uid: str, status: str) -> None:
        tq.kv_put(key=uid, partition_id="train", tag={"status": status})
        ray.get(self.controller.handle.completed.remote(uid))

    def sample(self) -> KVBatchMeta:
        batch, _ = self.buffer.sample(self.step, "train", 2)
        self.step += 1
        return batch


def uids_of(batch: KVBatchMeta) -> set[str]:
    return {key.split("_")[0] for key in batch.keys}


def read(keys: list[str], field: str) -> list[list[float]]:
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=[field])
    return [row.tolist() for row in data[field].unbind()]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_group_relative_estimators_need_no_other_key(compose_config, estimator):
    overrides = (f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=4")
    config = compose_config(*overrides, config_name="oppo_cpu")
    load_oppo_config(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert not need_critic(config)


def test_a_group_is_trained_whole_and_once_after_its_last_member(transfer_queue, controller, compose_config):
    run = GroupRun(controller)
    run.submit("abcd")
    for uid in "ab":
        finish_members(uid, [0, 1])
        ray.get(controller.handle.carried.remote(uid, 2, 5))
    kept = {field: read(["a_0_0", "a_1_0"], field) for field in ("responses", "rm_scores")}
    trained = []
    for others in ("cd", "ef"):
        if others == "ef":
            run.submit(others)
        for uid in others:
            run.finish(uid)
        trained.append(run.sample())
        assert uids_of(trained[-1]) == set(others)
        assert controller.call("state").num_deferred == 2, "groups count, not their members"
    assert controller.call("deferrals", ["a", "b"]) == [2, 2]
    assert {field: read(["a_0_0", "a_1_0"], field) for field in kept} == kept, "finished members keep tokens and scores"

    run.finish("a", [2])
    ray.get(controller.handle.failed.remote("b", "ValueError: no such tool"))
    run.settle("b", "failure")
    trained.append(run.sample())
    assert uids_of(trained[-1]) == {"a", "r"}, "a failed member fails its group, which is replaced"
    assert controller.call("state").evicted_by_reason == {"failed": 1}
    left = (tq.kv_list("train") or {})["train"]
    assert not any(key.startswith("b") for key in left)
    assert {field: read(["a_0_0", "a_1_0"], field) for field in kept} == kept

    keys = [key for batch in trained for key in batch.keys]
    assert len(set(keys)) == len(keys) == 6 * GROUP_SIZE
    for batch in trained:
        check_advantages(batch, compose_config)
    tq.kv_clear(keys=list(left), partition_id="train")


def check_advantages(batch: KVBatchMeta, compose_config) -> None:
    """Those of verl's trainer on the sampled batch are verl's own on its groups, and normalised over n members."""
    grpo = ("algorithm.adv_estimator=grpo", f"actor_rollout_ref.rollout.n={GROUP_SIZE}")
    config = compose_config(*grpo, config_name="oppo_cpu")
    assert not need_critic(config)
    PPOTrainerOppo._compute_advantage(SimpleNamespace(config=config), batch, {})
    advantages = read(batch.keys, "advantages")
    uids = [key.split("_")[0] for key in batch.keys]
    assert {uids.count(uid) for uid in uids} == {GROUP_SIZE}
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rm_scores", "response_mask"])
    padded = data.to_padded_tensor()
    verls, _ = compute_grpo_outcome_advantage(padded["rm_scores"], padded["response_mask"], index=np.array(uids))
    for index, (uid, row) in enumerate(zip(uids, advantages, strict=True)):
        assert row == verls[index, : len(row)].tolist()
        scores = [score(key) for key in batch.keys if key.startswith(f"{uid}_")]
        own = (score(batch.keys[index]) - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-6)
        assert row == pytest.approx([own] * len(row), abs=1e-5)
