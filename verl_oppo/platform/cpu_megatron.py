"""Shims for Megatron-Core on a machine without an accelerator, registered by `cpu`.

Little is needed where only a reward model runs on it: its local layers compute wherever their weights are. Line numbers
are those of megatron-core 0.16.1.
"""

from types import ModuleType
from typing import TYPE_CHECKING

from verl_oppo.platform.shims import shim

if TYPE_CHECKING:
    import torch


@shim("megatron.core.tensor_parallel.mappings")
def gathered_where_the_parts_are(module: ModuleType) -> None:
    """What a tensor-parallel group gathers lies on the device of the parts.

    Answers megatron/core/tensor_parallel/mappings.py:91 (`_gather_along_last_dim`), which asks CUDA for its current
    device. Without it attention fails where a tensor-parallel group has more ranks than the model has KV heads.
    """
    torch = module.torch

    def _gather_along_last_dim(input_: "torch.Tensor", group: "torch.distributed.ProcessGroup") -> "torch.Tensor":
        if group.size() == 1:
            return input_
        parts = [torch.empty_like(input_) for _ in range(group.size())]
        torch.distributed.all_gather(parts, input_.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    module._gather_along_last_dim = _gather_along_last_dim
