"""Dry run of recipes: what a script would pass to the entry, composed and validated by verl and by our schema.

    python recipes/check.py [SCRIPT ...] [-- OVERRIDE ...]     # default: every script, in every trainer mode it has

Nothing is started; of MODEL_PATH only configuration and tokenizer are read, by verl for the critic. A key or value that
does not exist fails with its own message. Prints one line a script and mode, and with one script its resolved config.
`tests/test_recipes_on_cpu.py` calls `check`.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

FOLDER = Path(__file__).resolve().parent
MODES = ("oppo", "sync", "colocate_async")
ENTRY = ["-m", "verl_oppo.main_ppo"]


def scripts() -> list[Path]:
    return sorted(FOLDER.glob("run_*.sh"))


def modes(script: Path) -> tuple[str, ...]:
    """Trainer modes that a script has: all three, unless it takes an algorithm of ours."""
    return MODES[:1] if "trainer.v1.oppo.algorithm=" in script.read_text() else MODES


def overrides_of(script: Path, mode: str, extra: Sequence[str] = ()) -> list[str]:
    """The overrides that the script would start training with: it runs with a `python3` that prints its arguments."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "python3")
        python.write_text("#!/usr/bin/env bash\nprintf '%s\\0' \"$@\"\n")
        python.chmod(0o755)
        environment = {**os.environ, "TRAINER_MODE": mode, "PATH": f"{folder}:{os.environ['PATH']}"}
        command = ["bash", str(script), *extra]
        printed = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    arguments = printed.split("\0")[:-1]
    assert arguments[:2] == ENTRY, f"{script.name} starts {arguments[:2]}"
    return arguments[2:]


def check(overrides: Sequence[str]) -> DictConfig:
    """The resolved config of a run with these overrides.

    Raises:
        ValueError, hydra.errors.OverrideException, AssertionError: what is wrong with it, by us, Hydra or verl.
    """
    from hydra import compose, initialize_config_module
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from verl_oppo import main_ppo, task_runner

    with initialize_config_module("verl_oppo.config", version_base=None):
        config = compose("oppo_trainer", overrides=list(overrides))
    OmegaConf.resolve(config)
    if config.trainer.v1.trainer_mode == main_ppo.TRAINER_MODE:
        task_runner.prepare(config)
    else:
        validate_config(config, need_reference_policy(config), need_critic(config))
    return config


def main(arguments: list[str]) -> None:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    chosen = [Path(name) for name in arguments[:end]] or scripts()
    for script in chosen:
        for mode in modes(script):
            config = check(overrides_of(script, mode, arguments[end + 1 :]))
            if len(chosen) == 1:
                print(OmegaConf.to_yaml(config))
            print(f"{script.name} {mode}: ok")


if __name__ == "__main__":
    main(sys.argv[1:])
