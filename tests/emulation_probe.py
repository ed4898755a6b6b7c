"""Runs in a process of its own for tests/test_emulated_on_cpu.py: the hooks of an emulated run on the real modules.

Usage: python emulation_probe.py {engines|inference|idle} FOLDER; prints one JSON object as its last line.
"""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from threading import Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("fsdp_scoring")))


class FakeTime:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def engines(folder: Path) -> dict[str, Any]:
    """Steps of real FSDP workers with scorers, in fake time: what lasted is what they cost."""
    # First, as in a Ray worker that unpickles a class: importing it imports verl, and so the hooks.
    import torch

    from verl_oppo.scoring import workers  # isort: skip
    import harness
    import numpy as np

    from verl_oppo.platform import emulated
    from verl_oppo.platform.device_clock import DeviceClock

    fake = FakeTime()
    emulated.DeviceClock = lambda device, factor: DeviceClock(device, factor, lambda: fake.now, fake.sleep)
    torch.distributed.init_process_group("cpu:gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    harness.save_models(folder)
    rank = harness.Rank(folder)
    lengths = [len(ids) for ids in rank.sequences]
    found: dict[str, Any] = {"lengths": lengths, "train_class": workers.TrainingWorker.__module__}

    def lasted(call: Any) -> float:
        before = fake.now
        call()
        return fake.now - before

    def train(worker: Any) -> None:
        worker.set_loss_fn(lambda model_output, data, dp_group: (model_output["values"].values().square().mean(), {}))
        worker.train_mini_batch(harness.plain_batch(rank.sequences, mini_batch_size=len(lengths), epochs=1))

    for name in ("critic", "reward", "megatron"):
        worker = megatron_worker(folder / "reward") if name == "megatron" else rank.worker(name)
        setup = lasted(lambda worker=worker: worker.oppo_setup(harness.settings()))
        chunks = harness.chunked([ids[:3] for ids in rank.sequences], 8)
        found[name] = {
            "setup": setup,
            "plain": 0 if name == "megatron" else lasted(lambda worker=worker: harness.plain(worker, rank.sequences)),
            "prefill": lasted(lambda worker=worker, chunks=chunks: worker.oppo_prefill(chunks[0])),
            "score": lasted(lambda worker=worker: harness.score(worker, rank.sequences)),
        }
        reports = worker.oppo_stats()
        found[name]["forwards"] = [reports.prefill.forwards, reports.score.forwards]
        found[name]["computed"] = [reports.prefill.tokens_computed, reports.score.tokens_computed]
    found["critic"]["train"] = lasted(lambda: train(rank.worker("critic")))
    found["finite"] = bool(all(np.isfinite(row).all() for row in harness.plain(rank.worker("critic"), rank.sequences)))
    found["metrics"] = emulated.emulation_metrics()
    found["logged"] = logged(folder)
    torch.distributed.destroy_process_group()
    return found


def megatron_worker(path: Path) -> Any:
    """A reward model on Megatron-Core, alone in its tensor-parallel group."""
    from verl.workers.config import HFModelConfig

    from verl_oppo.scoring.megatron_workers import MegatronRewardConfig, RewardWorkerMegatron

    model = HFModelConfig(path=str(path), load_tokenizer=False)
    worker = RewardWorkerMegatron(MegatronRewardConfig(model, "float32", tensor_parallel=1))
    worker.reset()
    return worker


def logged(folder: Path) -> dict[str, Any]:
    """What verl's file logger writes of one metric."""
    from verl.utils.tracking import Tracking

    tracking = Tracking("project", "experiment", ["file"])
    tracking.log(data={"timing_s/step": 1.5}, step=3)
    tracking.finish()
    return json.loads((folder / "metrics.jsonl").read_text())


def inference(folder: Path) -> dict[str, Any]:
    """A real vLLM engine with verl's worker extension: generation, then a weight sync, in real time."""
    import torch
    import verl  # noqa: F401  (loads the platform)
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
    from vllm import LLM, SamplingParams

    from verl_oppo.platform.device_clock import KINDS, read_totals
    from verl_oppo.platform.emulated_run import EmulatedRun

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=97, num_key_value_heads=1, **sizes)).save_pretrained(folder / "model")
    engine = LLM(
        str(folder / "model"),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        enable_prefix_caching=False,
        worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
    )
    prompts = [{"prompt_token_ids": [1 + index] * length} for index, length in enumerate((5, 9, 14))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    outputs = engine.generate(prompts, params, use_tqdm=False)

    (handle,) = engine.collective_rpc("_get_zmq_handle")
    weights = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    sender = transfer.BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    thread = Thread(target=lambda: asyncio.run(sender.async_send_weights(iter(weights.items()))))
    thread.start()
    engine.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
    thread.join(timeout=60)
    again = engine.generate(prompts, params, use_tqdm=False)
    run = EmulatedRun.of_this_process()
    devices = read_totals(Path(run.folder))
    return {
        "devices": {
            device: {kind: dataclasses.asdict(by_kind[kind]) for kind in KINDS} for device, by_kind in devices.items()
        },
        "generated": [len(output.outputs[0].token_ids) for output in outputs],
        "same": [list(o.outputs[0].token_ids) for o in outputs] == [list(o.outputs[0].token_ids) for o in again],
    }


def idle(folder: Path) -> dict[str, Any]:
    """The same modules in a run that is not emulated."""
    import verl  # noqa: F401  (loads the platform)
    from verl.single_controller.base import Worker
    from verl.utils.tracking import Tracking
    from verl.workers.engine.base import BaseEngine
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine_workers import TrainingWorker

    from verl_oppo.platform.emulated_run import emulation_metrics
    from verl_oppo.scoring.fsdp import FSDPScorer
    from verl_oppo.scoring.megatron import MegatronScorer

    hooked = (Tracking.log, BaseEngine.train_batch, FSDPEngineWithLMHead.forward_step, TrainingWorker.__init__)
    return {
        "loaded": "verl_oppo.platform.emulated" in sys.modules,
        "hooked": [
            each.__qualname__
            for each in (*hooked, Worker.__init__, FSDPScorer._forward, MegatronScorer._forward)
            if Path(each.__code__.co_filename).name == "emulated.py"
        ],
        "metrics": emulation_metrics(),
        "logged": logged(folder),
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
