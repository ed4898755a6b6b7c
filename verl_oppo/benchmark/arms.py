"""Arms and presets: files of command line arguments, read and put together.

An arm is what is compared (a trainer mode and its knobs), a preset what is the same for all arms: `arms/<arm>.txt`,
`presets/<preset>/{base,colocated,own_pool}.txt` and `preset.json`. Called by the benchmark's runs. Knows no process.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_oppo.benchmark.work import LengthList

FOLDER = Path(__file__).parent
AGENT_LOOP_CONFIG = FOLDER / "agent_loop.yaml"
AGENT_LOOP = "replay_lengths"
COLOCATED, OWN_POOL = "colocated", "own_pool"
LAYOUTS = {
    "sync": COLOCATED,
    "sync_fast_poll": COLOCATED,
    "colocate_async": COLOCATED,
    "colocate_async_fast_poll": COLOCATED,
    "inter": COLOCATED,
    "oppo_off": COLOCATED,
    "inter_own_pool": OWN_POOL,
    "intra": OWN_POOL,
    "oppo": OWN_POOL,
    "oppo_fixed": OWN_POOL,
}
"""Where each arm's reward model is. Without streaming verl 0.9.1 trains with a colocated one only (verl#7368)."""
STEP_WAITS_FOR_ALL = frozenset({"sync", "sync_fast_poll", "intra", "oppo_off"})
"""Arms whose step ends its generation with the longest of its own B responses, none carried."""


def read_arguments(path: Path) -> list[str]:
    """The arguments in a file: one a line, comments and empty lines left out, `-r FILE` replaced by that file's.

    Raises:
        ValueError: the file or an included one does not exist.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; allowed: a file of arguments, one a line")
    arguments = []
    for line in path.read_text().splitlines():
        line = line.strip()
        if line.startswith("-r "):
            arguments += read_arguments(path.parent / line[3:].strip())
        elif line and not line.startswith("#"):
            arguments.append(line)
    return arguments


def arm_names(listed: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in listed.split(",") if name.strip()]


def presets() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("presets/*/preset.json"))


@dataclass(frozen=True)
class Preset:
    """What is the same for all arms.

    Invariant: `warmup_steps` + `cooldown_steps` < `steps`, so that every run has a measured step.
    """

    name: str
    steps: int
    """Training steps of a run."""
    warmup_steps: int
    """First steps that are left out."""
    cooldown_steps: int
    """Last steps that are left out: OPPO admits less when nothing comes after."""
    batch_size: int
    """Prompts a step."""
    surplus_prompts: int
    """Most prompts that any arm has in flight beyond a step's."""
    devices_per_actor_device: dict[str, float]
    """By layout: devices of the modelled deployment for each one that this run's actor stands for."""
    reward_load: float
    """Tokens that a reward device of its own pays for, for each one of this run (`CostModel.reward_load`)."""
    work: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps + self.cooldown_steps < self.steps:
            raise ValueError(
                f"preset {self.name}: {self.warmup_steps} warm-up and {self.cooldown_steps} cool-down steps; allowed: "
                f"fewer than the {self.steps} steps of a run"
            )

    @classmethod
    def load(cls, name: str) -> Preset:
        """Raises ValueError if there is none of this name."""
        path = FOLDER / "presets" / name / "preset.json"
        if not path.is_file():
            raise ValueError(f"preset is {name!r}; allowed: {', '.join(presets())}")
        return cls(name=name, **json.loads(path.read_text()))

    def with_steps(self, steps: int | None) -> Preset:
        """The same with another number of steps a run; None changes nothing."""
        return self if steps is None else dataclasses.replace(self, steps=steps)

    @property
    def num_prompts(self) -> int:
        """Prompts that no arm runs out of."""
        return self.steps * self.batch_size + self.surplus_prompts

    @property
    def measured_steps(self) -> range:
        return range(self.warmup_steps + 1, self.steps - self.cooldown_steps + 1)

    def lengths(self, kind: str) -> LengthList:
        if kind not in self.work:
            raise ValueError(f"work is {kind!r}; allowed: {', '.join(self.work)}")
        return LengthList(kind=kind, **self.work[kind])

    def arguments(self, arm: str) -> list[str]:
        """Arguments of an arm under this preset; what comes later wins.

        Raises:
            ValueError: there is no such arm.
        """
        if arm not in LAYOUTS:
            raise ValueError(f"arm is {arm!r}; allowed: {', '.join(LAYOUTS)}")
        folder = FOLDER / "presets" / self.name
        return [
            *read_arguments(folder / "base.txt"),
            f"trainer.total_training_steps={self.steps}",
            *read_arguments(folder / f"{LAYOUTS[arm]}.txt"),
            *read_arguments(FOLDER / "arms" / f"{arm}.txt"),
        ]


def replay_arguments(work_file: Path, seed: int) -> list[str]:
    """Arguments with which a run replays the response lengths of a work file."""
    agent = "actor_rollout_ref.rollout.agent"
    return [
        f"data.train_files={hydra_string(work_file)}",
        f"data.seed={seed}",
        f"{agent}.default_agent_loop={AGENT_LOOP}",
        f"{agent}.agent_loop_config_path={hydra_string(AGENT_LOOP_CONFIG)}",
    ]


def hydra_string(path: Path) -> str:
    """The path as a quoted string of Hydra's override grammar."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"
