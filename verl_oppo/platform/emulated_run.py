"""A run with emulated accelerators, as the entry and the trainer see it: settings, start, end, metrics.

The entry wraps a run in `emulation`; the trainer's metrics get `emulation_metrics`. With `emulate=on` the settings go
to every process in one environment variable, and verl loads `emulated`, which does the rest; otherwise nothing of it
is imported. Imports neither verl nor vLLM.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_oppo.platform.cost_model import KEY, CostModel
from verl_oppo.platform.device_clock import KINDS, Totals, read_totals

logger = logging.getLogger(__name__)

VARIABLE = "VERL_OPPO_EMULATE"
"""Settings of an emulated run as JSON; absent in any other."""
MODULES_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
MODULE = "verl_oppo.platform.emulated"
METRIC = "oppo/emulated"


@dataclass(frozen=True)
class EmulatedRun:
    """What every process of an emulated run knows."""

    cost: CostModel
    reward_load: float
    """Tokens that a reward model in a resource pool of its own pays for, for each one it computes."""
    folder: str
    """Where the processes of a device see each other; one folder per device in it."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_this_process(cls) -> EmulatedRun | None:
        """The run that this process belongs to; None if it is not emulated."""
        if not (text := os.environ.get(VARIABLE)):
            return None
        values = json.loads(text)
        return cls(CostModel.from_mapping(values["cost"]), values["reward_load"], values["folder"])


@contextmanager
def emulation(config: DictConfig) -> Iterator[None]:
    """Emulates accelerators in the body, the run, if `config.emulate` is on; takes that node out of the config.

    To be entered after the platform has been prepared. Raises ValueError for what cannot be emulated.
    """
    cost = take_cost_model(config)
    if cost is None:
        os.environ.pop(VARIABLE, None)
        yield
        return
    folder = tempfile.mkdtemp(prefix="verl_oppo_emulated_")
    run = EmulatedRun(cost, _reward_load(config, cost), folder)
    environment = run_environment(run)
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    runtime_env = config.ray_kwargs.ray_init.runtime_env
    with open_dict(runtime_env):
        runtime_env.env_vars = {**(runtime_env.get("env_vars") or {}), **environment}
    logger.warning(
        "EMULATED accelerators: every model step sleeps until it has lasted what it costs by %s", run.to_json()
    )
    try:
        yield
    finally:
        logger.warning("EMULATED accelerators: %s", summary_words(emulation_metrics()))
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        shutil.rmtree(folder, ignore_errors=True)


def run_environment(run: EmulatedRun) -> dict[str, str]:
    """The variables that every process of the run needs, beside those of the CPU platform."""
    modules = [name for name in os.environ.get(MODULES_VARIABLE, "").split(",") if name and name != MODULE]
    return {VARIABLE: run.to_json(), MODULES_VARIABLE: ",".join([*modules, MODULE])}


def take_cost_model(config: DictConfig) -> CostModel | None:
    """Removes `config.emulate`, which verl does not know, and returns what it says; None where it is off or absent.

    Raises:
        ValueError: names the key, the value received and what is allowed.
    """
    if config.get(KEY) is None:
        return None
    with open_dict(config):
        node = config.pop(KEY)
    if not isinstance(node, DictConfig) or not isinstance(node.get("enable"), bool):
        raise ValueError(f"{KEY} is {node!r}; allowed: off or on (config group {KEY})")
    values = OmegaConf.to_container(node, resolve=True)
    if not values.pop("enable"):
        return None
    _check_platform(config)
    _check_parallelism(config)
    return CostModel.from_mapping(values)


def emulation_metrics() -> dict[str, float]:
    """Metrics of an emulated run for the step's dict, counted since the run began; empty in any other run.

    `oppo/emulated` is 1. `oppo/emulated/{steps,overruns,overrun_s}` are over all model steps: an overrun took longer
    in reality than on the emulated device, so its timing is this machine's. The same by kind (decode, prefill, train,
    sync) with `real_s` and `emulated_s`, and `oppo/emulated/busy_s/<device>`, where two models that run at the same
    time on a shared device count twice.
    """
    run = EmulatedRun.of_this_process()
    if run is None:
        return {}
    devices = read_totals(Path(run.folder))
    total, metrics = Totals(), {METRIC: 1.0}
    for kind in KINDS:
        of_kind = Totals()
        for by_kind in devices.values():
            of_kind.add(by_kind[kind])
        total.add(of_kind)
        metrics |= {f"{METRIC}/{kind}/{name}": value for name, value in dataclasses.asdict(of_kind).items()}
    metrics |= {f"{METRIC}/{name}": getattr(total, name) for name in ("steps", "overruns", "overrun_s")}
    for device, by_kind in devices.items():
        metrics[f"{METRIC}/busy_s/{device}"] = sum(totals.emulated_s for totals in by_kind.values())
    return metrics


def summary_words(metrics: dict[str, float]) -> str:
    """What an emulated run did, for its last log line."""
    steps, overruns = metrics[f"{METRIC}/steps"], metrics[f"{METRIC}/overruns"]
    kinds = ", ".join(
        f"{kind} {metrics[f'{METRIC}/{kind}/overruns']:.0f} of {metrics[f'{METRIC}/{kind}/steps']:.0f}"
        for kind in KINDS
    )
    return (
        f"the run's times and throughput are emulated, not this machine's; {overruns:.0f} of {steps:.0f} model steps "
        f"took longer in reality than emulated ({kinds}), by {metrics[f'{METRIC}/overrun_s']:.2f} s in all"
    )


def _check_platform(config: DictConfig) -> None:
    from verl_oppo.platform.shims import accelerator_available

    if accelerator_available() or config.trainer.device != "cpu":
        raise ValueError(
            f"{KEY} is on; allowed: off on a machine with an accelerator, whose time is measured and not emulated "
            f"(trainer.device is {config.trainer.device}, on needs cpu)"
        )


def _check_parallelism(config: DictConfig) -> None:
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if size > 1:
        raise ValueError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size is {size}; allowed with {KEY}=on: 1, the cost model "
            f"knows no other"
        )


def _reward_load(config: DictConfig, cost: CostModel) -> float:
    reward_model = config.reward.reward_model
    if not reward_model.enable or not reward_model.enable_resource_pool:
        return 1.0
    actor_devices = config.trainer.n_gpus_per_node * config.trainer.nnodes
    reward_devices = reward_model.n_gpus_per_node * reward_model.nnodes
    if config.trainer.v1.oppo.intra_step.reward == "megatron":
        # The devices of a tensor-parallel group are one device in time.
        reward_devices //= reward_model.rollout.tensor_model_parallel_size
    return cost.reward_load(actor_devices, reward_devices)
