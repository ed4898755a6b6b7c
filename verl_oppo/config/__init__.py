"""Configuration of OPPO: the yaml files that Hydra composes and the schema that validates ``trainer.v1.oppo``."""
