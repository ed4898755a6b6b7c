"""Algorithms beyond those of verl's own keys: each a preset of verl's config and a few hooks, in its own module.

`trainer.v1.oppo.algorithm` names one; `registry.py` is the table of the names.
"""
