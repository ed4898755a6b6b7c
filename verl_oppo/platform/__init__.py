"""Platforms on which verl can train beside the accelerators it knows: `cpu`.

Importing this package does nothing; `verl_oppo.platform.cpu` does the work where a run selects it.
"""
