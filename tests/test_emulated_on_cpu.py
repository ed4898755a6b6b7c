"""Emulated accelerators: the hooks on verl, vLLM and our scorers, and what a run with and without them sees.

What needs the hooks in place runs in `emulation_probe.py`, in processes of its own.
"""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_oppo import main_ppo
from verl_oppo.platform import cpu, emulated_run, shims
from verl_oppo.platform.cost_model import CostModel
from verl_oppo.platform.device_clock import CLOSE_ENOUGH_S, DeviceClock
from verl_oppo.platform.emulated_run import MODULE, VARIABLE, EmulatedRun, emulation, emulation_metrics

PROBE = Path(__file__).with_name("emulation_probe.py")
ROOT = PROBE.parent.parent

DEADLINE = 600
"""Seconds for one process of the probe, the imports included."""

on_processes = pytest.mark.timeout(DEADLINE + 60)
on_cpu_only = pytest.mark.skipif(shims.accelerator_available(), reason="emulation is for machines without accelerator")

COST = CostModel(
    time_scale=2.0,
    device_share_factor=2.0,
    actor_devices_per_reward_device=7.0,
    decode_step_s=0.01,
    decode_sequence_s=0.001,
    decode_cached_token_s=0.00001,
    prefill_call_s=0.02,
    prefill_token_s=0.0001,
    train_token_s=0.0003,
    weight_sync_s=0.5,
)


def shipped_cost() -> CostModel:
    values = OmegaConf.load(ROOT / "verl_oppo" / "config" / "emulate" / "on.yaml")
    return CostModel.from_mapping({key: value for key, value in values.items() if key != "enable"})


# config and the entry -------------------------------------------------------------------------------------------------


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("verl_oppo.config", version_base=None):
        return compose("oppo_cpu", overrides=list(overrides))


@pytest.fixture
def untouched_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, emulated_run.MODULES_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_emulation_is_off_by_default_and_leaves_no_trace(untouched_environment: None) -> None:
    for config in (composed(), composed("~emulate")):
        with emulation(config):
            assert "emulate" not in config
            assert VARIABLE not in os.environ
            assert VARIABLE not in (config.ray_kwargs.ray_init.runtime_env.get("env_vars") or {})
            assert emulation_metrics() == {}
    assert MODULE not in sys.modules


def test_stale_variable_does_not_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, EmulatedRun(COST, 1.0, "/nowhere").to_json())
    with emulation(composed()):
        assert emulation_metrics() == {}


@pytest.fixture
def entry_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """The log of the entry's module, whatever another library's logging set-up in this process did to it."""
    entry = emulated_run.logger
    monkeypatch.setattr(entry, "disabled", False)
    monkeypatch.setattr(entry, "propagate", False)
    caplog.set_level(logging.WARNING, logger=entry.name)
    entry.addHandler(caplog.handler)
    yield caplog
    entry.removeHandler(caplog.handler)


@on_cpu_only
def test_settings_reach_every_process_and_go_with_the_run(
    untouched_environment: None, monkeypatch: pytest.MonkeyPatch, entry_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(emulated_run.MODULES_VARIABLE, "some.module")
    config = composed("emulate=on", "emulate.time_scale=3", "reward.reward_model.enable=false")
    config.ray_kwargs.ray_init.runtime_env = {"env_vars": {"OTHER": "1", emulated_run.MODULES_VARIABLE: "some.module"}}
    with emulation(config):
        run = EmulatedRun.of_this_process()
        assert run.cost == replace(shipped_cost(), time_scale=3)
        assert run.reward_load == 1.0, "no reward model"
        assert Path(run.folder).is_dir()
        variables = config.ray_kwargs.ray_init.runtime_env.env_vars
        assert variables == {
            "OTHER": "1",
            VARIABLE: os.environ[VARIABLE],
            emulated_run.MODULES_VARIABLE: f"some.module,{MODULE}",
        }
        assert "emulate" not in config
        with DeviceClock(Path(run.folder) / "GPU0", 2.0).step("train", 0.0):
            pass
        metrics = emulation_metrics()
    assert metrics["oppo/emulated"] == 1.0
    assert (
        metrics["oppo/emulated/train/steps"] == metrics["oppo/emulated/steps"] == metrics["oppo/emulated/overruns"] == 1
    )
    assert metrics["oppo/emulated/busy_s/GPU0"] == pytest.approx(metrics["oppo/emulated/train/emulated_s"])
    assert not Path(run.folder).exists()
    assert VARIABLE not in os.environ
    assert os.environ[emulated_run.MODULES_VARIABLE] == "some.module"
    first, last = [record.getMessage() for record in entry_log.records if "EMULATED" in record.getMessage()]
    assert '"time_scale": 3' in first
    assert "1 of 1 model steps took longer in reality" in last


@on_cpu_only
def test_run_that_fails_still_says_that_it_was_emulated(
    untouched_environment: None, entry_log: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="boom"), emulation(composed("emulate=on")):
        raise RuntimeError("boom")
    assert "0 of 0 model steps" in entry_log.text


@on_cpu_only
@pytest.mark.parametrize("mode", ["oppo", "sync"])
def test_entry_emulates_every_trainer_mode(
    untouched_environment: None, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    seen: list[EmulatedRun | None] = []
    monkeypatch.setattr(main_ppo, "prepare_platform", lambda config: None)
    monkeypatch.setattr(main_ppo, "train_in_mode", lambda config: seen.append(EmulatedRun.of_this_process()))
    monkeypatch.setattr(OmegaConf, "resolve", lambda config: None)
    main_ppo.run(composed("emulate=on", f"trainer.v1.trainer_mode={mode}"))
    assert seen[0].cost == shipped_cost()


@on_cpu_only
@pytest.mark.parametrize(("own_pool", "load"), [(True, 7.0), (False, 1.0)])
def test_only_a_reward_model_with_devices_of_its_own_serves_all_actor_devices(
    untouched_environment: None, own_pool: bool, load: float
) -> None:
    config = composed(
        "emulate=on",
        "reward.reward_model.enable=true",
        f"reward.reward_model.enable_resource_pool={own_pool}",
        "reward.reward_model.n_gpus_per_node=1",
        "reward.reward_model.nnodes=1",
    )
    with emulation(config):
        assert EmulatedRun.of_this_process().reward_load == load


@on_cpu_only
def test_the_devices_of_a_tensor_parallel_reward_model_are_one_device_in_time(untouched_environment: None) -> None:
    config = composed(
        "emulate=on",
        "trainer.v1.oppo.intra_step.reward=megatron",
        "reward.reward_model.enable=true",
        "reward.reward_model.enable_resource_pool=true",
        "reward.reward_model.n_gpus_per_node=2",
        "reward.reward_model.nnodes=1",
        "reward.reward_model.rollout.tensor_model_parallel_size=2",
    )
    with emulation(config):
        assert EmulatedRun.of_this_process().reward_load == 7.0


def test_refused_on_a_machine_with_an_accelerator(untouched_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "accelerator_available", lambda: True)
    with pytest.raises(ValueError, match="^emulate is on; allowed: off on a machine with an accelerator"):
        with emulation(composed("emulate=on")):
            pass
    with emulation(composed("emulate=off")):
        pass
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.device=cuda"], "^emulate is on; allowed: off .*trainer.device is cuda"),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "tensor_model_parallel_size is 2; allowed"),
        (["+emulate.decode_s=1"], "^emulate.decode_s is not a key"),
        (["emulate.train_token_s=-1"], "^emulate.train_token_s is -1"),
        (["~emulate.weight_sync_s"], "^emulate.weight_sync_s is missing"),
    ],
)
def test_bad_settings_are_refused_before_the_run(
    untouched_environment: None, overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message), emulation(composed("emulate=on", *overrides)):
        pass
    assert VARIABLE not in os.environ


def test_a_bare_value_is_refused(untouched_environment: None) -> None:
    config = composed("~emulate")
    with open_dict(config):
        config.emulate = True
    with pytest.raises(ValueError, match="^emulate is True; allowed: off or on"), emulation(config):
        pass


# hooks on the real modules --------------------------------------------------------------------------------------------


def probe(mode: str, folder: Path, **variables: str) -> dict[str, Any]:
    inherited = {name: value for name, value in os.environ.items() if name not in cpu.cpu_environment()}
    environment = {**inherited, **cpu.ENVIRONMENT, emulated_run.MODULES_VARIABLE: cpu.MODULE}
    environment |= {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"), **variables}
    process = subprocess.Popen(
        [sys.executable, str(PROBE), mode, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=DEADLINE)
    finally:
        # vLLM's processes too, where the probe could not end them.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


def emulated_variables(folder: Path, cost: CostModel = COST) -> dict[str, str]:
    (folder / "devices").mkdir()
    run = EmulatedRun(cost, 7.0, str(folder / "devices"))
    return {VARIABLE: run.to_json(), emulated_run.MODULES_VARIABLE: f"{cpu.MODULE},{MODULE}"}


@pytest.fixture(scope="module")
def on_engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("engines")
    # The process group exists already: nobody connects to the address.
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return probe("engines", folder, **ranks, **emulated_variables(folder))


@on_cpu_only
@on_processes
@pytest.mark.parametrize(("name", "load"), [("critic", 1.0), ("reward", 7.0), ("megatron", 7.0)])
def test_forwards_of_real_engines_and_scorers_last_what_they_cost(
    on_engines: dict[str, Any], name: str, load: float
) -> None:
    found, tokens = on_engines[name], sum(on_engines["lengths"])
    micro_batches = len(on_engines["lengths"]) / 2
    prefilled, scored = found["computed"]
    assert prefilled == 3 * len(on_engines["lengths"])
    assert scored == tokens - prefilled, "the streamed tokens are cached"
    assert found["setup"] == pytest.approx(COST.forward_s(0)), "a dummy row"
    if name != "megatron":
        assert found["plain"] == pytest.approx(2 * (0.02 * micro_batches + 0.0001 * load * tokens))
    for part, forwards, computed in zip(("prefill", "score"), found["forwards"], found["computed"], strict=True):
        assert forwards >= 1
        assert found[part] == pytest.approx(2 * (0.02 * forwards + 0.0001 * load * computed)), part


@on_cpu_only
@on_processes
def test_training_of_a_real_engine_lasts_what_it_costs(on_engines: dict[str, Any]) -> None:
    assert on_engines["critic"]["train"] == pytest.approx(COST.train_s(sum(on_engines["lengths"])))
    assert on_engines["finite"]


@on_cpu_only
@on_processes
def test_logged_metrics_say_that_they_are_emulated(on_engines: dict[str, Any]) -> None:
    metrics = on_engines["metrics"]
    assert metrics["oppo/emulated"] == 1
    assert metrics["oppo/emulated/train/steps"] == 1
    assert metrics["oppo/emulated/overruns"] == 0, "no time passes but by sleeping"
    assert metrics["oppo/emulated/busy_s/GPU3"] > 0
    assert on_engines["logged"] == {"step": 3, "data": {"timing_s/step": 1.5} | metrics}


@on_processes
def test_hooks_are_not_there_when_emulation_is_off(tmp_path: Path) -> None:
    assert probe("idle", tmp_path) == {
        "loaded": False,
        "hooked": [],
        "metrics": {},
        "logged": {"step": 3, "data": {"timing_s/step": 1.5}},
    }


@on_cpu_only
@on_processes
def test_real_vllm_engine_decodes_prefills_and_syncs_in_emulated_time(tmp_path: Path) -> None:
    variables = emulated_variables(tmp_path, replace(COST, time_scale=1.0))
    found = probe("inference", tmp_path, VERL_CPU_VISIBLE_DEVICES="5", **variables)
    assert found["generated"] == [12, 12, 12]
    assert found["same"], "the weights that were synced are those the engine had"
    assert list(found["devices"]) == ["GPU5"]
    decode, prefill, sync = (found["devices"]["GPU5"][kind] for kind in ("decode", "prefill", "sync"))
    # Twice three prompts of 5, 9 and 14 tokens; the first of 12 tokens comes out of the prefill.
    assert decode["steps"] >= 2 * 11
    assert prefill["steps"] >= 2
    sequences, cached = 2 * 3 * 11, 2 * sum(length * 11 + sum(range(11)) for length in (5, 9, 14))
    steps = decode["steps"] + prefill["steps"]
    cost_s = 0.01 * steps + 0.001 * sequences + 0.00001 * cached + 0.0001 * 2 * (5 + 9 + 14)
    assert decode["emulated_s"] + prefill["emulated_s"] >= cost_s - CLOSE_ENOUGH_S * steps
    assert sync["steps"] == 1
    assert sync["emulated_s"] >= 0.5 - CLOSE_ENOUGH_S
