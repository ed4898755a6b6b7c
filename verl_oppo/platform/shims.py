"""The registry of the CPU shims and the one mechanism that applies them.

A shim answers one place in verl or vLLM that does not work without an accelerator. It names the module it changes;
that module is changed right after it is imported, or at once if it is imported already, so that no process pays for
importing modules it does not use. Called by `verl_oppo.platform.cpu`; knows nothing about what the shims do.
"""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import torch

_APPLIED_ATTRIBUTE = "__verl_oppo_cpu_shims__"


def accelerator_available() -> bool:
    """Whether this process sees a CUDA (or ROCm) device or an Ascend NPU."""
    npu = getattr(torch, "npu", None)
    return torch.cuda.is_available() or (npu is not None and npu.is_available())


def cpu_platform_selected() -> bool:
    """Whether verl runs on the CPU platform here: `VERL_PLATFORM=cpu`, and no accelerator in sight.

    The variable is required: an actor without a GPU on a GPU cluster sees no accelerator either.
    """
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu" and not accelerator_available()


@dataclass(frozen=True)
class Shim:
    """One change to one module of verl or vLLM. Applying it again to the same module changes nothing."""

    name: str
    module: str
    why: str
    change: Callable[[ModuleType], None]

    def __call__(self, module: ModuleType) -> None:
        applied = module.__dict__.setdefault(_APPLIED_ATTRIBUTE, set())
        if self.name not in applied:
            self.change(module)
            applied.add(self.name)

    @property
    def applied(self) -> bool:
        """Whether the module is imported in this process and carries the change."""
        return self.name in getattr(sys.modules.get(self.module), _APPLIED_ATTRIBUTE, ())


REGISTRY: dict[str, Shim] = {}


def shim(module: str) -> Callable[[Callable[[ModuleType], None]], Shim]:
    """Register the decorated function as the shim that changes `module`; its docstring is the reason."""

    def register(change: Callable[[ModuleType], None]) -> Shim:
        assert change.__doc__, f"the shim {change.__name__} must say which line it answers"
        registered = Shim(change.__name__, module, inspect.cleandoc(change.__doc__), change)
        REGISTRY[registered.name] = registered
        return registered

    return register


class PostImportFinder(MetaPathFinder):
    """Runs the shims of a module right after its import. Finds nothing itself: the other finders load the module."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        pending = [s for s in REGISTRY.values() if s.module == fullname]
        if not pending or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for each in pending:
                each(module)

        spec.loader.exec_module = exec_module
        return spec


def apply_registered_shims() -> None:
    """Apply every registered shim, now or when its module gets imported. Safe to call repeatedly."""
    if not any(isinstance(finder, PostImportFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, PostImportFinder())
    for each in REGISTRY.values():
        module = sys.modules.get(each.module)
        if module is None:
            continue
        assert not getattr(module.__spec__, "_initializing", False), (
            f"the shim {each.name} came while {each.module} was being imported"
        )
        each(module)
