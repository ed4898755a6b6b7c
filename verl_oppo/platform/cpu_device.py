"""verl's platform "cpu": what verl asks of `torch.cuda`, answered for a machine without an accelerator.

Called by verl through `verl.plugin.platform.get_platform()`; knows nothing of FSDP or vLLM.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_oppo.platform.shims import cpu_platform_selected


class CpuDeviceModule(ModuleType):
    """Stands where verl expects `torch.cuda` (`verl.utils.device.get_torch_device`).

    Attributes that it does not define come from `torch.cpu`. Memory is that of this process, in bytes, so verl's
    metrics `perf/max_memory_allocated_gb` and `perf/max_memory_reserved_gb` report resident host memory.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name)

    def memory_allocated(self, device: Any = None) -> int:
        return psutil.Process().memory_info().rss

    def max_memory_allocated(self, device: Any = None) -> int:
        # The kernel updates the peak with a delay, so it may lag behind the current size.
        return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self.memory_allocated())

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """The operating system keeps the peak; it cannot be reset."""

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """Host memory is not partitioned."""

    def empty_cache(self) -> None:
        """The host allocator has no cache of its own to empty."""

    def ipc_collect(self) -> None:
        """There are no device IPC handles to collect."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_device(self, device: Any) -> None:
        """There is one CPU device."""

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """verl on CPUs: gloo collectives, weights sent through shared memory, Ray's GPU resource as a logical count.

    Never picked by auto-detection: an actor without a GPU on a GPU cluster must not take itself for a CPU platform.
    """

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuDeviceModule("verl_oppo_cpu_device")

    def is_available(self) -> bool:
        return cpu_platform_selected()

    def current_device(self) -> torch.device:
        """A device, not an index: verl calls `.to(get_device_id())`, and index 0 means an accelerator to torch."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        self.device_module.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        torch.cpu.synchronize()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The host allocator has no such settings."""

    def empty_cache(self) -> None:
        self.device_module.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """There is no device profiler to start."""

    def profiler_stop(self) -> None:
        """There is no device profiler to stop."""

    def ray_resource_name(self) -> str:
        """A logical count (start Ray with `num_gpus`): verl's `ResourcePoolManager` counts only "GPU" and "NPU"."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        """False makes verl send weights through shared memory (`ServerAdapter.use_shm`)."""
        return False

    def cudart(self) -> None:
        return None
