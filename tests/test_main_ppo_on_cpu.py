"""The entry: what it composes against verl's own, where each trainer mode goes, and what survives Ray's pickling."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from verl.trainer import main_ppo as verl_main_ppo

import verl_oppo
from verl_oppo import main_ppo

pytestmark = pytest.mark.timeout(400)

ROOT = Path(verl_oppo.__file__).resolve().parent.parent
STOCK_MODES = ("sync", "colocate_async", "separate_async")
OURS = "trainer.v1.oppo."
VLLM = "actor_rollout_ref.rollout.name=vllm"


def leaves(config: DictConfig | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value, unresolved, by its dotted key."""
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=False)
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= leaves(value, f"{prefix}{key}.")
        else:
            flat[prefix + str(key)] = value
    return flat


def run_python(*arguments: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---------------------------------- what is composed ----------------------------------


@pytest.mark.parametrize("engine", [[], ["model_engine=megatron"]], ids=["fsdp", "megatron"])
def test_only_the_trainer_mode_and_our_section_differ_from_verls_config(compose_config, engine):
    verls = leaves(compose_config(*engine, config_name="ppo_trainer"))
    ours = leaves(compose_config(*engine))
    assert verls.keys() <= ours.keys()
    assert {key for key in verls if verls[key] != ours[key]} == {"trainer.v1.trainer_mode"}
    assert all(key.startswith(OURS) for key in ours.keys() - verls.keys())
    assert ours["trainer.v1.trainer_mode"] == "oppo"


def test_the_embedded_default_differs_where_its_file_says(compose_config):
    verls = leaves(compose_config(config_name="ppo_trainer"))
    ours = leaves(compose_config(config_name="oppo_cpu"))
    filled_in = {key for key, value in verls.items() if value == {}}
    assert verls.keys() - filled_in <= ours.keys()
    written = yaml.safe_load((ROOT / "verl_oppo/config/oppo_cpu.yaml").read_text())
    differing = {key for key in ours if key not in verls or verls[key] != ours[key]}
    of_groups = {key for key in differing if key.startswith((OURS, "emulate."))}
    assert differing - of_groups <= leaves(written).keys()


@pytest.mark.parametrize("mode", ["oppo", *STOCK_MODES])
@pytest.mark.parametrize("config_name", ["oppo_trainer", "oppo_cpu"])
def test_every_trainer_mode_composes(compose_config, config_name, mode):
    config = compose_config(f"trainer.v1.trainer_mode={mode}", config_name=config_name)
    assert config.trainer.v1.trainer_mode == mode


@pytest.mark.parametrize("config_name", ["oppo_trainer", "oppo_cpu"])
def test_the_command_prints_the_resolved_config(tmp_path, config_name):
    """Hydra's own `--cfg job --resolve`; the second one makes the demo's assets if the cache lacks them."""
    printed = run_python(
        *("-m", "verl_oppo.main_ppo", f"--config-name={config_name}", "--cfg", "job", "--resolve"),
        *(VLLM, "trainer.v1.oppo.inter_step.delta_init=3"),
        cwd=tmp_path,
    )
    config = yaml.safe_load(printed)
    assert config["trainer"]["v1"]["oppo"]["inter_step"]["delta_init"] == 3
    assert config["trainer"]["device"] == ("cpu" if config_name == "oppo_cpu" else "cuda")
    assert "${" not in printed
    if config_name == "oppo_cpu":
        assert Path(config["actor_rollout_ref"]["model"]["path"]).is_dir()
        assert Path(config["data"]["train_files"]).is_file()
    assert list(tmp_path.iterdir()) == [], "nothing is written"


# ---------------------------------- where a mode goes ----------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What would have been run: verl's own main, or `run_ppo` with a task runner."""
    from verl_oppo import task_runner

    calls: list[tuple[str, Any]] = []

    def verls_main(config: DictConfig) -> None:
        calls.append(("verl's main", config))

    monkeypatch.setattr(verl_main_ppo.main, "__wrapped__", verls_main)
    monkeypatch.setattr(
        task_runner, "run_ppo", lambda config, task_runner_class: calls.append(("run_ppo", task_runner_class))
    )
    return calls


@pytest.mark.parametrize("mode", STOCK_MODES)
def test_stock_modes_go_to_verls_own_main(compose_config, calls, mode):
    config = compose_config(f"trainer.v1.trainer_mode={mode}", VLLM)
    main_ppo.run(config)
    assert calls == [("verl's main", config)]
    resolved = compose_config(f"trainer.v1.trainer_mode={mode}", VLLM, config_name="ppo_trainer")
    OmegaConf.resolve(resolved)
    passed = {key: value for key, value in leaves(calls[0][1]).items() if not key.startswith(OURS)}
    assert passed == leaves(resolved), "the config that verl's own command passes on"


def test_mode_oppo_goes_to_our_task_runner_in_verls_run_ppo(compose_config, calls, monkeypatch):
    from verl_oppo.platform import cpu
    from verl_oppo.task_runner import TaskRunnerOppo

    monkeypatch.setattr(cpu, "export_environment", lambda: {})
    main_ppo.run(compose_config(config_name="oppo_cpu"))
    assert calls == [("run_ppo", TaskRunnerOppo)]
    assert issubclass(TaskRunnerOppo.__ray_actor_class__, verl_main_ppo.TaskRunnerV1.__ray_actor_class__)


def test_a_bad_value_ends_before_ray_starts(compose_config, calls):
    with pytest.raises(ValueError, match=r"trainer\.v1\.oppo\.inter_step\.window is 1; allowed"):
        main_ppo.run(compose_config(VLLM, f"{OURS}inter_step.window=1"))
    assert calls == []


def test_the_cpu_platform_reaches_the_processes_of_a_running_cluster(compose_config, monkeypatch):
    """They do not inherit this process's environment."""
    from verl_oppo.platform import cpu

    monkeypatch.setattr(cpu, "export_environment", lambda: {"VERL_PLATFORM": "cpu", "KEPT": "ours"})
    config = compose_config(VLLM, "trainer.device=cpu", "+ray_kwargs.ray_init.runtime_env.env_vars.KEPT=theirs")
    main_ppo.prepare_platform(config)
    assert config.ray_kwargs.ray_init.runtime_env.env_vars == {"VERL_PLATFORM": "cpu", "KEPT": "theirs"}
    untouched = compose_config(VLLM)
    main_ppo.prepare_platform(untouched)
    assert untouched == compose_config(VLLM)


# ---------------------------------- in a fresh process ----------------------------------

FRESH = """
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, get_trainer_cls
import verl.trainer.main_ppo
before = "oppo" in TRAINER_REGISTRY
from verl_oppo.trainer.ppo_trainer import PPOTrainerOppo
print(before, get_trainer_cls("oppo") is PPOTrainerOppo, sorted(TRAINER_REGISTRY))

from ray import cloudpickle
from verl_oppo.rollout.agent_loop import AgentLoopWorkerOppo
from verl_oppo.task_runner import TaskRunnerOppo
actors = {actor.__ray_actor_class__.__name__: actor for actor in (AgentLoopWorkerOppo, TaskRunnerOppo)}
shipped = {name: actor.__ray_metadata__.modified_class for name, actor in actors.items()}
open("shipped", "wb").write(cloudpickle.dumps(shipped))
"""


@pytest.fixture(scope="module")
def fresh_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a process printed that knew nothing of us, and its folder: there it left the classes as Ray ships them."""
    folder = tmp_path_factory.mktemp("fresh")
    return run_python("-c", FRESH, cwd=folder), folder


def test_importing_the_trainer_registers_the_mode(fresh_process):
    printed, _ = fresh_process
    assert printed.splitlines()[-1] == "False True ['colocate_async', 'oppo', 'separate_async', 'sync']"


UNPICKLE = """
import inspect, json, pickle
shipped = pickle.load(open("shipped", "rb"))
report = {}
for name, cls in shipped.items():
    copies = {}
    for each in cls.__mro__:
        for function in vars(each).values():
            if inspect.isfunction(function) and "__class__" in function.__code__.co_freevars:
                cells = dict(zip(function.__code__.co_freevars, function.__closure__))
                copies[f"{each.__name__}.{function.__name__}"] = cells["__class__"].cell_contents in cls.__mro__
    report[name] = {"mro": [f"{each.__module__}.{each.__name__}" for each in cls.__mro__], "super() fits": copies}
print(json.dumps(report))
"""


def test_actor_classes_and_their_bases_survive_rays_pickling_as_one_copy(fresh_process):
    """`super()` in a method finds its class through a cell; with two copies of a base it would be the other one's."""
    _, folder = fresh_process
    report = json.loads(run_python("-c", UNPICKLE, cwd=folder).splitlines()[-1])
    expected = {
        "AgentLoopWorkerOppo": (
            "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopWorkerTQ",
            "AgentLoopWorkerTQ.__init__",
            "AgentLoopWorkerOppo._run_prompt",
        ),
        "TaskRunnerOppo": ("verl.trainer.main_ppo.TaskRunnerV1", "TaskRunnerOppo.run"),
    }
    assert report.keys() == expected.keys()
    for name, (base, *with_super) in expected.items():
        assert base in report[name]["mro"]
        assert set(with_super) <= report[name]["super() fits"].keys()
        assert all(report[name]["super() fits"].values()), report[name]["super() fits"]
