"""Trainer mode `oppo` for verl's V1 trainer. Importing `ppo_trainer` registers it with verl."""
