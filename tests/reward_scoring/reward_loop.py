"""verl's reward loop on a real scorer under Ray, with chunks streamed to it; leaves what was seen as JSON.

    python tests/reward_scoring/reward_loop.py fsdp|vllm FOLDER

`fsdp`: a worker group, `vllm`: verl's reward server, each on logical devices. Started by `test_reward_loop_on_cpu.py`.
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from verl_oppo.platform import cpu

environment = cpu.export_environment()

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from reward_models import (  # noqa: E402
    MESSAGES,
    actor_prompt,
    compose,
    hf_score,
    responses,
    save_reward_model,
    save_tokenizers,
)
from tensordict import TensorDict  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.single_controller.ray import RayResourcePool  # noqa: E402
from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402

from verl_oppo.scoring.reward_input import RewardInput  # noqa: E402
from verl_oppo.scoring.reward_loop import RewardLoopManagerOppo, build_reward_worker_group  # noqa: E402
from verl_oppo.scoring.reward_loop_worker import REWARD  # noqa: E402
from verl_oppo.scoring.scorer import Chunk  # noqa: E402
from verl_oppo.stream.consumer import ConsumerSettings  # noqa: E402
from verl_oppo.stream.service import StreamClient  # noqa: E402
from verl_oppo.stream.target import WorkerGroupTarget  # noqa: E402

LENGTHS = (40, 97, 150)
CHUNK = 16


def register_replica() -> None:
    """As `rollout.vllm_server` does, for the reward server."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    from verl_oppo.scoring.vllm_reward_server import vLLMRewardServer

    class Replica(vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(vLLMRewardServer)

    RolloutReplicaRegistry.register("vllm", lambda: Replica)


def sample(prompt: np.ndarray, response: np.ndarray, uid: str | None) -> DataProto:
    """One trajectory as verl's agent loop hands it to a reward loop worker, or, without `uid`, as its trainer does."""
    ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
    tensors = {
        "prompts": torch.from_numpy(prompt)[None],
        "responses": torch.from_numpy(response)[None],
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }
    fields: dict[str, Any] = {"raw_prompt": np.array([MESSAGES])}
    if uid is not None:
        fields |= {"uid": np.array([uid]), "session_id": np.array([0])}
    return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=fields)


def stream(client: StreamClient, prompt: np.ndarray, response: np.ndarray, uid: str) -> None:
    """All but the last words of a response, in chunks, each prefilled before the next one."""
    client.call("register_prompt", uid, MESSAGES)
    ids = np.concatenate([prompt, response])
    bounds = [0, *range(len(prompt) + CHUNK, len(ids), CHUNK)]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        client.call("push", [Chunk(f"{uid}_0", start, ids[start:stop])])
        while client.call("stats", reset=False)[REWARD].tokens_waiting:
            time.sleep(0.01)
        client.call("close", [REWARD], 60.0)
        client.call("open", [REWARD])


def named_actors() -> list[str]:
    return sorted(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True))


def processes() -> int:
    """Processes of this run that are busy with a reward server, by the titles that Ray and vLLM give them.

    Not by whole command lines: a process that Ray is just starting has the run's environment in its own.
    """
    titles = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            titles.append(" ".join(process.cmdline()[:1]))
    return sum(title.startswith(("ray::", "VLLM::")) and ("VLLM" in title or "Server" in title) for title in titles)


def run(kind: str, folder: Path, config: DictConfig) -> dict[str, Any]:
    model = save_reward_model(folder / "reward")
    reward_input = RewardInput.from_paths(str(folder / "actor"), str(folder / "reward"))
    prompt = actor_prompt(reward_input.actor_tokenizer)
    response_ids = responses(reward_input.actor_tokenizer, LENGTHS)
    texts = [reward_input.text(MESSAGES, ids) for ids in response_ids]
    seen: dict[str, Any] = {"expected": [hf_score(model, reward_input.token_ids(text)) for text in texts]}

    pool = RayResourcePool([1], use_gpu=True, max_colocate_count=3)
    manager = RewardLoopManagerOppo(config=config, rm_resource_pool=pool, kind=kind)
    (worker,) = manager.reward_loop_worker_handles
    seen["named_actors"] = named_actors()
    seen["server_processes"] = processes()
    if kind == "vllm":
        # Not attached yet: verl's own request to the server, over HTTP.
        seen["verls_own"] = [
            ray.get(worker.compute_score.remote(sample(prompt, ids, "own")), timeout=120) for ids in response_ids
        ]
        target = manager.vllm_target()
    else:
        group = build_reward_worker_group(config, pool)
        target = WorkerGroupTarget(group.workers)
    client = StreamClient.start()
    client.call("add_consumer", REWARD, target, ConsumerSettings(), manager.translator())
    client.call("open", [REWARD])
    manager.attach(client)

    for index, ids in enumerate(response_ids):
        stream(client, prompt, ids, f"uid{index}")
    scored = [worker.compute_score.remote(sample(prompt, ids, f"uid{i}")) for i, ids in enumerate(response_ids)]
    seen["scored"] = ray.get(scored, timeout=120)
    seen["records"] = {name: vars(record) for name, record in manager.take_records().items()}
    seen["no_records_left"] = manager.take_records() == {}
    equally_long = [response_ids[1], response_ids[1][::-1].copy()]
    batch = DataProto.concat([sample(prompt, ids, None) for ids in equally_long])
    seen["batch"] = manager.compute_rm_score(batch).batch["rm_scores"].sum(dim=1).tolist()
    seen["batch_expected"] = [
        hf_score(model, reward_input.token_ids(reward_input.text(MESSAGES, ids))) for ids in equally_long
    ]
    too_long = np.resize(response_ids[0][:-1], 3000)
    seen["too_long"] = error_of(worker, sample(prompt, too_long, "long"))
    seen["still_scored"] = ray.get(worker.compute_score.remote(sample(prompt, response_ids[0], "again")), timeout=120)
    manager.check()

    scorer = manager.reward_server_manager.server_handles[0] if kind == "vllm" else group.workers[0]
    ray.kill(scorer)
    started = time.monotonic()
    seen["killed"] = error_of(worker, sample(prompt, response_ids[0], "killed"))
    seen["killed_s"] = time.monotonic() - started
    manager.check()
    time.sleep(2)
    try:
        manager.check()
    except RuntimeError as error:
        seen["check"] = str(error)
    return seen


def error_of(worker: ray.actor.ActorHandle, data: DataProto) -> str:
    try:
        ray.get(worker.compute_score.remote(data), timeout=120)
    except ray.exceptions.GetTimeoutError:
        return "hung"
    except Exception as error:
        return f"{'ValueError ' if isinstance(error, ValueError) else ''}{error}"
    return "no error"


def main(kind: str, folder: Path, temp: str) -> None:
    save_tokenizers(folder)
    save_reward_model(folder / "reward")
    config = compose(
        folder,
        "reward.reward_model.enable_resource_pool=True",
        "reward.reward_model.n_gpus_per_node=1",
        "reward.reward_model.nnodes=1",
    )
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=1,
        include_dashboard=False,
        _temp_dir=temp,
        runtime_env={"env_vars": environment},
    )
    try:
        if kind == "vllm":
            register_replica()
        seen = run(kind, folder, config)
    finally:
        ray.shutdown()
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
