"""The CPU platform: the real verl 0.9 trains on a machine without an accelerator.

Loaded by `import verl` in every process of a run through `VERL_USE_EXTERNAL_MODULES=verl_oppo.platform.cpu`, with
`VERL_PLATFORM=cpu` (`export_environment` sets both). Importing it registers the platform "cpu" with verl and, where
that platform is selected and no accelerator is in sight, applies the shims: those below change verl, those of
`cpu_vllm` vLLM, that of `cpu_megatron` Megatron-Core. On CUDA it only adds a platform that nobody asks for. Line
numbers are those of verl 0.9.1.

A run also needs settings that are verl's own: no sleep mode, float32, no torch.compile (see `config/oppo_cpu.yaml`).
"""

import os
from types import ModuleType

from verl_oppo.platform import cpu_device, cpu_megatron, cpu_vllm  # noqa: F401  (register the platform, and the shims)
from verl_oppo.platform.cpu_fsdp import CpuFSDPEngineMixin
from verl_oppo.platform.cpu_weight_sync import CopyingReceiverMixin, WatchingSenderMixin
from verl_oppo.platform.shims import (
    REGISTRY,
    accelerator_available,
    apply_registered_shims,
    cpu_platform_selected,
    shim,
)

MODULE = "verl_oppo.platform.cpu"

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # GiB, whole numbers only: vLLM takes a share of the machine's memory otherwise.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM binds its worker to cores of its own otherwise, which the trainer then shares with it.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Each process of the run takes all cores otherwise.
    "OMP_NUM_THREADS": "1",
    # Models and tokenizers are local paths; a look-up without network costs minutes of retries.
    "HF_HUB_OFFLINE": "1",
}


@shim("verl.utils.distributed")
def process_group_names_the_cpu_once(module: ModuleType) -> None:
    """Ray workers initialise torch.distributed with the backend "cpu:gloo".

    Answers verl/utils/distributed.py:89 (`initialize_global_process_group_ray`), which joins "cpu:gloo" with the
    device's own backend. Without it torch refuses "cpu:gloo,cpu:gloo".
    """
    initialize = module.initialize_global_process_group_ray

    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        initialize(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    module.initialize_global_process_group_ray = initialize_global_process_group_ray


@shim("verl.utils.fsdp_utils")
def fsdp_parameters_are_where_they_are_used(module: ModuleType) -> None:
    """Moving a module's parameters to the device does nothing.

    Answers verl/utils/fsdp_utils.py:229 (`load_fsdp_model_to_gpu`). Without it FSDP1 fails in the first weight sync:
    verl joins device name and index to "cpu:cpu", which torch refuses.
    """
    module.load_fsdp_model_to_gpu = lambda model: None


@shim("verl.workers.engine.fsdp.transformer_impl")
def fsdp_engines_for_cpu(module: ModuleType) -> None:
    """verl's FSDP engines are registered for the device "cpu", with `CpuFSDPEngineMixin` before them.

    Answers verl/workers/engine/fsdp/transformer_impl.py:1143 and :1594, which register them for cuda and npu only.
    Without it verl knows no engine for "cpu", the critic asks for flash attention and the reference pins memory.
    """
    engines = {"language_model": module.FSDPEngineWithLMHead, "value_model": module.FSDPEngineWithValueHead}
    for model_type, engine in engines.items():
        cpu_engine = type(f"Cpu{engine.__name__}", (CpuFSDPEngineMixin, engine), {"__module__": __name__})
        module.EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(cpu_engine)


@shim("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
def weight_transfer_copies_and_reports(module: ModuleType) -> None:
    """The receiver of weights copies them out of the shared segment, and neither side waits for a failed other side.

    Answers verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py:319 (`.to(device)` copies nothing on a CPU),
    :352 (closing the segment while views live) and :155 (`socket.recv()` without end). Without it a weight sync fails
    with `BufferError: cannot close exported pointers exist`, which hides every other error, and then hangs.
    """
    sender, receiver = module.BucketedWeightSender, module.BucketedWeightReceiver
    module.BucketedWeightSender = type(sender.__name__, (WatchingSenderMixin, sender), {"__module__": __name__})
    module.BucketedWeightReceiver = type(receiver.__name__, (CopyingReceiverMixin, receiver), {"__module__": __name__})


@shim("verl.workers.rollout.base")
def vllm_adapter_watches_the_receiver(module: ModuleType) -> None:
    """The vLLM rollout adapter tells the weight sender how the receiver's call ended.

    Answers verl/workers/rollout/vllm_rollout/vllm_rollout.py:218 (`update_weights`), which awaits the receiver only
    after the sender is through. Without it a receiver that fails before its first message leaves the sender waiting
    until its deadline, and the receiver's error is lost.
    """
    module._ROLLOUT_REGISTRY[("vllm", "async")] = "verl_oppo.platform.cpu_rollout.CpuServerAdapter"


def install() -> bool:
    """Apply all shims where the CPU platform is selected; says whether it is. Safe to call repeatedly."""
    if not cpu_platform_selected():
        return False
    apply_registered_shims()
    return True


def registered_shims() -> list[tuple[str, str]]:
    """Name and reason of every shim, applied or not."""
    return [(each.name, each.why) for each in REGISTRY.values()]


def installed_shims() -> list[tuple[str, str]]:
    """Name and reason of the shims in force in this process; a shim is not before the module it changes is imported."""
    return [(each.name, each.why) for each in REGISTRY.values() if each.applied]


def cpu_environment() -> dict[str, str]:
    """The variables that every process of a CPU run needs, values already set in this process kept.

    Empty where there is an accelerator. Give them to Ray workers as `ray_init.runtime_env.env_vars`: workers of a
    cluster that runs already do not inherit the driver's environment.
    """
    if accelerator_available():
        return {}
    modules = [name for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name]
    if MODULE not in modules:
        modules.append(MODULE)
    kept = {name: os.environ.get(name, default) for name, default in ENVIRONMENT.items()}
    return {"VERL_USE_EXTERNAL_MODULES": ",".join(modules), **kept}


def export_environment() -> dict[str, str]:
    """Set `cpu_environment()` in this process; for the driver, before it imports verl's trainer. Returns it."""
    environment = cpu_environment()
    os.environ.update(environment)
    install()
    return environment


install()
