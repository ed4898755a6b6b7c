"""What verl's FSDP engines do otherwise on a CPU.

`cpu.fsdp_engines_for_cpu` combines the mixin with verl's own engines. Line numbers are those of verl 0.9.1.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flash_attention_as_sdpa() -> Iterator[None]:
    """While a model is built, a request for flash attention (CUDA only) gets torch's scaled dot product attention.

    verl asks for flash attention by default (verl/workers/config/model.py:185) and, for critics, in any case
    (verl/utils/model.py:649, `load_valuehead_model`); transformers then raises an ImportError.
    """
    from transformers import PreTrainedModel

    resolve = PreTrainedModel.get_correct_attn_implementation

    def resolve_without_flash(
        self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        if requested_attention and requested_attention.startswith("flash_attention"):
            requested_attention = "sdpa"
        return resolve(self, requested_attention, is_init_check)

    PreTrainedModel.get_correct_attn_implementation = resolve_without_flash
    try:
        yield
    finally:
        PreTrainedModel.get_correct_attn_implementation = resolve


@contextmanager
def fsdp1_synchronises_cpu_modules() -> Iterator[None]:
    """While a module is wrapped, FSDP1 broadcasts the parameters of rank 0 over gloo although they are on the CPU.

    verl passes `sync_module_states=True` (verl/workers/engine/fsdp/transformer_impl.py:444), which
    torch/distributed/fsdp/_init_utils.py:1176 refuses for CPU modules with a ValueError; the broadcast itself works.
    """
    from torch.distributed.fsdp import _init_utils

    refuse = _init_utils._check_module_states_for_sync_module_states
    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None
    try:
        yield
    finally:
        _init_utils._check_module_states_for_sync_module_states = refuse


class CpuFSDPEngineMixin:
    """To stand before verl's `FSDPEngine`: no flash attention, and no offloading of parameters to where they are."""

    def _build_module(self) -> torch.nn.Module:
        with flash_attention_as_sdpa():
            return super()._build_module()

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Wrap the module without an offload policy.

        verl/workers/engine/fsdp/transformer_impl.py:462 gives a forward-only engine (the reference) a
        `CPUOffloadPolicy(pin_memory=True)`; pinning memory fails without an accelerator.
        """
        engine_config = self.engine_config
        self.engine_config = dataclasses.replace(engine_config, forward_only=False, offload_policy=False)
        try:
            with fsdp1_synchronises_cpu_modules():
                return super()._build_fsdp_module(module)
        finally:
            self.engine_config = engine_config
