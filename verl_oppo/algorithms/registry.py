"""Names of the algorithms, for the value of `trainer.v1.oppo.algorithm`.

The schema checks a name here without importing verl; the entry and the trainer load the class. A further algorithm is
one module with a subclass of `Algorithm` and one line in `ALGORITHMS`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_oppo.algorithms.algorithm import Algorithm
    from verl_oppo.config.schema import OppoConfig

ALGORITHMS = {"online_dpo": "verl_oppo.algorithms.online_dpo:OnlineDPO"}
"""Name to `module:class`."""


def check_name(name: str) -> None:
    """Raises ValueError, with the names there are, for a name that is none of them."""
    if name not in ALGORITHMS:
        raise ValueError(f"trainer.v1.oppo.algorithm is {name!r}; allowed: null or one of {', '.join(ALGORITHMS)}")


def load_algorithm(oppo: OppoConfig) -> Algorithm:
    """The algorithm that the config names; `Algorithm` itself, which changes nothing, where it names none.

    Raises:
        ValueError: an unknown name.
    """
    if oppo.algorithm is None:
        from verl_oppo.algorithms.algorithm import Algorithm

        return Algorithm()
    check_name(oppo.algorithm)
    module, _, name = ALGORITHMS[oppo.algorithm].partition(":")
    return getattr(importlib.import_module(module), name)(oppo)
