"""Runs trainer mode `oppo` inside verl's own `run_ppo`.

Imported by the entry after the platform is chosen, since importing verl's trainer fixes verl's platform.
"""

import ray
from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from verl_oppo.trainer.support import apply_algorithm_preset, load_oppo_config


@ray.remote
class TaskRunnerOppo(TaskRunnerV1.__ray_actor_class__):
    """verl's task runner in a process where trainer mode `oppo` is registered."""

    def run(self, config: DictConfig) -> None:
        # Registers the mode in this actor, where verl looks it up: a running cluster shares nothing else with us.
        import verl_oppo.trainer.ppo_trainer  # noqa: F401

        super().run(config)


def prepare(config: DictConfig) -> None:
    """Apply the algorithm's preset in place and check the config, by our rules and verl's.

    Raises:
        ValueError: names the key, the value received and what is allowed.
    """
    auto_set_device(config)
    apply_algorithm_preset(config)
    load_oppo_config(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


def train(config: DictConfig) -> None:
    """Check the config and train with trainer mode `oppo`.

    Raises:
        ValueError: names the key, the value received and what is allowed.
    """
    prepare(config)
    run_ppo(config, task_runner_class=TaskRunnerOppo)
