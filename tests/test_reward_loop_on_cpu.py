"""verl's reward loop with a real scorer behind the stream: a worker group, and verl's own reward server."""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "reward_scoring"))

import reward_models as models
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop import reward_loop as verls

from verl_oppo.scoring.reward_loop import RewardLoopManagerOppo, no_reward_server
from verl_oppo.scoring.reward_loop_worker import REWARD, RewardLoopWorkerOppo, trajectory_id
from verl_oppo.scoring.scorer import Scored

SCRIPT = Path(__file__).parent / "reward_scoring" / "reward_loop.py"
loop_test = pytest.mark.timeout(1200)


@pytest.fixture(scope="module", params=["fsdp", "vllm"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the script saw with a Ray cluster of its own; its folder is short, since Ray puts sockets into it."""
    folder = tmp_path_factory.mktemp(request.param)
    temp = tempfile.mkdtemp(prefix="rl", dir="/tmp")
    command = [sys.executable, str(SCRIPT), request.param, str(folder), temp]
    try:
        done = subprocess.run(command, timeout=1000, capture_output=True, text=True)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-6000:])
    return {"kind": request.param, **json.loads((folder / "seen.json").read_text())}


@loop_test
def test_only_the_kind_with_a_server_starts_one(seen):
    servers = [name for name in seen["named_actors"] if "server" in name or "reward_colocate" in name]
    if seen["kind"] == "vllm":
        assert servers and seen["server_processes"] > 0
    else:
        assert seen["named_actors"] == ["reward_loop_worker_0"]
        assert seen["server_processes"] == 0


@loop_test
def test_scores_are_those_of_the_model_and_bring_the_extra_info_that_verl_reads(seen):
    assert all(one["reward_extra_info"] == {} for one in seen["scored"])
    scores = [one["reward_score"] for one in seen["scored"]]
    np.testing.assert_allclose(scores, seen["expected"], rtol=1e-5, atol=1e-5)
    assert np.ptp(scores) > 0.1


@loop_test
def test_verls_own_request_gives_the_same_scores(seen):
    if seen["kind"] != "vllm":
        pytest.skip("a worker group has no server that verl could ask")
    assert all(one["reward_extra_info"] == {} for one in seen["verls_own"])
    np.testing.assert_allclose([one["reward_score"] for one in seen["verls_own"]], seen["expected"], 1e-5, 1e-5)


@loop_test
def test_what_was_streamed_is_found_cached_and_recorded_once(seen):
    assert sorted(seen["records"]) == [f"uid{index}_0" for index in range(3)]
    for record in seen["records"].values():
        left = record["response_tokens"] - record["cached_response_tokens"]
        # The last chunk, the last word and, in vLLM, a part of a block.
        assert 0 < left <= 4 * 17 + (32 if seen["kind"] == "vllm" else 0)
        assert record["seconds"] > 0
    assert max(record["cached_response_tokens"] for record in seen["records"].values()) > 64
    assert seen["no_records_left"]


@loop_test
def test_verls_batch_path_scores_too(seen):
    np.testing.assert_allclose(seen["batch"], seen["batch_expected"], rtol=1e-5, atol=1e-5)


@loop_test
def test_an_input_that_does_not_fit_is_refused_by_name_and_others_are_scored(seen):
    assert seen["too_long"].startswith("ValueError ") and "long_0" in seen["too_long"]
    assert seen["still_scored"]["reward_score"] == pytest.approx(seen["expected"][0], rel=1e-5, abs=1e-5)


@loop_test
def test_a_killed_scorer_ends_the_call_and_the_health_check_with_its_own_error(seen):
    assert "died" in seen["killed"].lower(), seen["killed"]
    assert "can no longer have scores" in seen["check"] and "died" in seen["check"].lower()


# A worker by itself ---------------------------------------------------------------------------------------------------


def sample(**fields: np.ndarray) -> DataProto:
    ids = torch.tensor([[5, 6, 7]])
    tensors = TensorDict({"responses": ids, "attention_mask": torch.ones(1, 9, dtype=torch.int64)}, batch_size=1)
    return DataProto(batch=tensors, non_tensor_batch={"raw_prompt": np.array([models.MESSAGES]), **fields})


class Stream:
    """A stream client whose scorer gives this answer, or raises it."""

    def __init__(self, answer: float | Exception) -> None:
        self.answer = answer
        self.calls: list[tuple] = []

    async def call_async(self, *args):
        self.calls.append(args)
        if isinstance(self.answer, Exception):
            raise self.answer
        (trajectory,) = args[2]
        return [Scored(trajectory.trajectory_id, np.array([self.answer], dtype=np.float32), 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worker")
    models.save_tokenizers(folder)
    return folder


def attached(folder: Path, answer: float | Exception) -> tuple[RewardLoopWorkerOppo, Stream]:
    worker, stream = RewardLoopWorkerOppo(models.compose(folder)), Stream(answer)
    asyncio.run(worker.oppo_attach(stream))
    return worker, stream


def test_a_trajectory_goes_to_the_stream_under_the_name_that_the_token_tee_gave_it(folder):
    worker, stream = attached(folder, 0.5)
    data = sample(uid=np.array(["u-1"]), session_id=np.array([3]))
    assert asyncio.run(worker.compute_score(data)) == {"reward_score": 0.5, "reward_extra_info": {}}
    (method, consumer, (trajectory,)) = stream.calls[0]
    assert (method, consumer, trajectory.trajectory_id) == ("score", REWARD, "u-1_3")
    text = asyncio.run(worker._preprocess_reward_inputs(data))
    assert trajectory.token_ids.tolist() == worker.reward_model_tokenizer(text)["input_ids"]


def test_samples_without_a_name_get_one_each(folder):
    names = {trajectory_id(sample()) for _ in range(3)}
    assert len(names) == 3


def test_a_refused_input_is_no_failure_of_the_scorer_and_anything_else_is(folder):
    for error, failure in ((ValueError("too long"), None), (TimeoutError("late"), "TimeoutError: late")):
        worker, _ = attached(folder, error)
        with pytest.raises(type(error), match=str(error)):
            asyncio.run(worker.compute_score(sample()))
        assert asyncio.run(worker.oppo_failure()) == failure
        assert asyncio.run(worker.oppo_take_records()) == {}


def test_without_a_server_and_before_it_is_attached_a_worker_says_so_at_once(folder):
    """verl's own would ask `http://None` sixteen times."""
    worker = RewardLoopWorkerOppo(models.compose(folder))
    with pytest.raises(RuntimeError, match="the stream service is not attached yet"):
        asyncio.run(worker.compute_score(sample()))


async def test_a_rule_or_a_custom_function_never_goes_to_the_stream(folder, tmp_path):
    rule = tmp_path / "rule.py"
    rule.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    return 7.0\n"
    )
    data = sample(
        data_source=np.array(["any"]),
        reward_model=np.array([{"ground_truth": "x"}], dtype=object),
        extra_info=np.array([{}], dtype=object),
    )
    data.batch["prompts"] = torch.tensor([[1, 2, 3, 4, 5, 6]])
    for enable in ("True", "False"):
        overrides = [f"reward.custom_reward_function.path={rule}", f"reward.reward_model.enable={enable}"]
        worker, stream = RewardLoopWorkerOppo(models.compose(folder, *overrides)), Stream(0.5)
        await worker.oppo_attach(stream)
        assert (await worker.compute_score(data))["reward_score"] == 7.0
        assert stream.calls == []


@pytest.mark.parametrize("own_devices", [True, False])
def test_without_streaming_a_server_on_its_own_devices_is_kept_awake(folder, monkeypatch, own_devices):
    """verl puts it to sleep after its start and wakes it only where it is colocated."""
    monkeypatch.setattr(verls.RewardLoopManager, "__init__", lambda *arguments: None)
    config = models.compose(folder, f"reward.reward_model.enable_resource_pool={own_devices}")
    assert config.reward.reward_model.rollout.free_cache_engine
    RewardLoopManagerOppo(config, kind="off")
    assert config.reward.reward_model.rollout.free_cache_engine != own_devices


def test_the_mask_over_verls_reward_server_is_lifted_whatever_happens():
    original = verls.RewardModelManager
    with pytest.raises(KeyError), no_reward_server():
        assert verls.RewardModelManager is not original
        raise KeyError
    assert verls.RewardModelManager is original
