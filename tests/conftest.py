"""What all tests share: verl on our CPU platform, offline, single-threaded, no time limits in property tests, one Ray,
end-to-end runs last."""

import copy
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_oppo.rollout.controller import RolloutControllerGroup

# Before any test imports torch or transformers, which read them once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before any test imports verl, which fixes its platform on first use.
os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_oppo.platform.cpu")

# A busy machine makes any example slow; that is no finding.
settings.register_profile("verl_oppo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("verl_oppo")

ROOT = Path(__file__).resolve().parent.parent
# All processes that a test starts find the package, and start faster (tests/startup).
PYTHON_PATH = [str(ROOT), str(ROOT / "tests" / "startup")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*PYTHON_PATH, os.environ.get("PYTHONPATH")]))
E2E = ROOT / "tests" / "e2e"
SHARED_RAY = "shared_ray"
modules_on_shared_ray: set[Path] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the modules on the shared Ray behind the others, and tests/e2e, which it marks, behind everything."""
    for item in items:
        if E2E in item.path.parents:
            item.add_marker(pytest.mark.e2e)
        elif SHARED_RAY in item.fixturenames:
            modules_on_shared_ray.add(item.path)
    items.sort(key=lambda item: (item.get_closest_marker("e2e") is not None, item.path in modules_on_shared_ray))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the shared Ray after the last module on it: others start their own, and training needs the memory."""
    if item.path in modules_on_shared_ray and (nextitem is None or nextitem.path not in modules_on_shared_ray):
        import ray

        ray.shutdown()


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """A local Ray for all modules that ask for it; it counts cores that need not exist."""
    import ray

    # Ray's sockets need a short path.
    folder = tempfile.mkdtemp(prefix="r_", dir="/tmp")
    ray.init(address="local", num_cpus=32, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def controller_group(shared_ray: None) -> "RolloutControllerGroup":
    """A rollout controller in a process of its own: batches of 2 prompts, each deferred twice at most."""
    from verl_oppo.rollout.controller import RolloutControllerGroup

    return RolloutControllerGroup(batch_size=2, max_deferrals=2, device_name="cpu")


@pytest.fixture
def controller(controller_group: "RolloutControllerGroup") -> "RolloutControllerGroup":
    """The shared controller with an empty ledger."""
    from verl_oppo.control.admission import AdmissionController

    controller_group.call("load_state_dict", AdmissionController(batch_size=2, max_deferrals=2).state_dict())
    return controller_group


@pytest.fixture(scope="session")
def compose_config() -> "Callable[..., DictConfig]":
    """Composes a configuration of the package, or verl's `ppo_trainer`, as the command line does with these overrides.

    What the groups among the overrides compose is kept, since composing takes a second.
    """
    from hydra import compose, initialize_config_module
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser

    import verl_oppo.main_ppo  # noqa: F401  (registers the resolver of the demo's assets)

    @functools.cache
    def compose_groups(config_name: str, *groups: str) -> "DictConfig":
        package = "verl.trainer.config" if config_name == "ppo_trainer" else "verl_oppo.config"
        with initialize_config_module(package, version_base=None):
            return compose(config_name, overrides=list(groups))

    def compose_one(*overrides: str, config_name: str = "oppo_trainer") -> "DictConfig":
        groups = [override for override in overrides if "." not in override.partition("=")[0]]
        values = [override for override in overrides if override not in groups]
        config = copy.deepcopy(compose_groups(config_name, *groups))
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), config)
        return config

    return compose_one
