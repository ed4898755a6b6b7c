"""The rows of a step, read back from a real TransferQueue."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

from verl_oppo.rollout.agent_loop import TOKEN_VERSIONS_KEY
from verl_oppo.trainer.trained_rows import read_trained_rows

pytestmark = pytest.mark.timeout(300)

SCORES = {"a_0_0": 1.0, "a_1_0": 0.0, "b_0_0": 0.25, "padding": 9.0}
LENGTHS = (3, 2, 4, 1)
VERSIONS = ([[4, 1], [5, 2]], [[5, 2]], None, None)


@pytest.fixture(scope="module")
def batch(shared_ray: None) -> Iterator[KVBatchMeta]:
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))

    def nested(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    old = [torch.full((length,), -1.0) for length in LENGTHS]
    masks = [torch.ones(length, dtype=torch.int64) for length in LENGTHS]
    masks[0][1] = 0
    scores = [torch.tensor([0.0] * (n - 1) + [s]) for n, s in zip(LENGTHS, SCORES.values(), strict=True)]
    extras = [{} if versions is None else {TOKEN_VERSIONS_KEY: versions} for versions in VERSIONS]
    fields = {
        "rm_scores": nested(scores),
        "response_mask": nested(masks),
        "old_log_probs": nested(old),
        "rollout_log_probs": nested([row - 0.5 for row in old]),
        "extra_fields": NonTensorStack(*extras),
    }
    tags = [{"name": key, "is_padding": key == "padding"} for key in SCORES]
    yield tq.kv_batch_put(
        keys=list(SCORES), partition_id="train", fields=TensorDict(fields, batch_size=len(SCORES)), tags=tags
    )
    tq.close()


def test_rows_and_rewards_without_padding(batch):
    trained = read_trained_rows(batch, keeps_log_probs=True, version=7)
    assert trained.keys == ["a_0_0", "a_1_0", "b_0_0"] == [tag["name"] for tag in trained.tags]
    assert trained.rewards == [0.5, 0.25], "means over prompts"
    assert [list(map(list, row.versions)) for row in trained.rows] == [[[4, 1], [5, 2]], [[5, 2]], [[7, 4]]]
    assert [row.mask.tolist() for row in trained.rows] == [[True, False, True], [True] * 2, [True] * 4]
    assert trained.rows[1].is_ratio == pytest.approx(np.exp([0.5, 0.5]))
    assert trained.rows[1].probs_diff == pytest.approx(np.exp([-1.0, -1.0]) - np.exp([-1.5, -1.5]))


def test_without_the_rollouts_log_probs(batch):
    trained = read_trained_rows(batch, keeps_log_probs=False, version=7)
    assert {(row.is_ratio, row.probs_diff) for row in trained.rows} == {(None, None)}
