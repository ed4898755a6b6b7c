"""Trainer mode `oppo` for verl's V1 trainer. Importing this package registers it with verl."""

from verl_oppo.trainer.ppo_trainer import PPOTrainerOppo

__all__ = ["PPOTrainerOppo"]
