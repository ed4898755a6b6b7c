"""Entry: `python -m verl_oppo.main_ppo <any override of verl.trainer.main_ppo>`.

Trainer mode `oppo` runs through `verl_oppo.task_runner`; every other mode goes to verl's own `main` unchanged. Nothing
of verl is imported before the platform is chosen, because verl fixes its platform on first use.
"""

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_oppo.platform.emulated_run import emulation

TRAINER_MODE = "oppo"
CPU_DEVICE = "cpu"


def demo_asset(name: str) -> str:
    """Path of an asset of the embedded default, made on first use (the resolver behind `config/oppo_cpu.yaml`)."""
    from verl_oppo.demo.assets import ensure_assets

    return str(getattr(ensure_assets(), name))


def demo_reward_pool(trainer_mode: str) -> bool:
    """Whether the demo's reward model has devices of its own: stock verl 0.9.1 fails with that (verl#7368)."""
    return trainer_mode == TRAINER_MODE


OmegaConf.register_new_resolver("oppo_demo_asset", demo_asset, replace=True)
OmegaConf.register_new_resolver("oppo_demo_reward_pool", demo_reward_pool, replace=True)


def prepare_platform(config: DictConfig) -> None:
    """With `trainer.device=cpu`, load the CPU platform here and in every process of the run."""
    if config.trainer.device != CPU_DEVICE:
        return
    from verl_oppo.platform import cpu

    environment = cpu.export_environment()
    runtime_env = config.ray_kwargs.ray_init.runtime_env
    with open_dict(runtime_env):
        # A cluster that runs already does not inherit this process's environment.
        runtime_env.env_vars = {**environment, **(runtime_env.get("env_vars") or {})}


def run(config: DictConfig) -> None:
    """Train with the resolved config, with emulated accelerators if `emulate` is on."""
    OmegaConf.resolve(config)
    prepare_platform(config)
    with emulation(config):
        train_in_mode(config)


def train_in_mode(config: DictConfig) -> None:
    """Train in the trainer mode that the config names.

    Raises:
        ValueError: an algorithm of ours with a trainer mode of verl's, which would train PPO.
    """
    if config.trainer.v1.trainer_mode == TRAINER_MODE:
        from verl_oppo.task_runner import train

        train(config)
    else:
        if algorithm := config.trainer.v1.oppo.algorithm:
            mode = config.trainer.v1.trainer_mode
            raise ValueError(f"trainer.v1.oppo.algorithm is {algorithm!r}; allowed with trainer_mode={mode}: null")
        from verl.trainer.main_ppo import main as verl_main

        verl_main.__wrapped__(config)


@hydra.main(config_path="config", config_name="oppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Hydra entry point."""
    run(config)


if __name__ == "__main__":
    main()
