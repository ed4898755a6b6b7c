"""What an algorithm can change: verl's config before the run, and the trainer's actor update.

The entry applies the preset, the trainer calls the hooks. The base class is what verl's own keys describe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

logger = logging.getLogger(__name__)

PlainUpdate = Callable[["KVBatchMeta", dict], "KVBatchMeta"]
"""verl's own `_update_actor`: (batch, metrics) -> batch."""


class Algorithm:
    """PPO and whatever else verl's keys select: no preset, no hook.

    Invariant: `preset` alone makes a config of verl's that `check` accepts, whatever verl's defaults are; what the user
    has to choose (`rollout.n`) is refused with the reason instead.
    """

    preset: ClassVar[Mapping[str, Any]] = {}
    """Dotted key of verl's config to the value that the algorithm needs."""

    def apply_preset(self, config: DictConfig) -> None:
        """Set the preset's keys in place; a value that changes is logged."""
        for key, value in self.preset.items():
            if (before := OmegaConf.select(config, key)) != value:
                logger.warning("%s sets %s=%s (was %s)", type(self).__name__, key, value, before)
                OmegaConf.update(config, key, value)

    def check(self, config: DictConfig) -> None:
        """Raises ValueError for values of verl's keys that the algorithm cannot work with."""

    def connect(self, trainer: PPOTrainer) -> None:
        """Called once, when the worker groups hold their models."""

    def update_actor(self, trainer: PPOTrainer, batch: KVBatchMeta, metrics: dict, plain: PlainUpdate) -> KVBatchMeta:
        """One step's update of the actor, in place of verl's `_update_actor`; returns `batch`."""
        return plain(batch, metrics)
