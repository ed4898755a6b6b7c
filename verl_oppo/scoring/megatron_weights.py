"""Weights of a Hugging Face checkpoint for Megatron-Core's GPTModel, each tensor-parallel rank its own part.

Called by the Megatron workers. Qwen2 and Llama, tied or untied, grouped-query attention; where mbridge is installed,
one of the two bridges that verl loads Megatron models with (`verl.models.mcore.mbridge`), the decoder comes through it.
verl's other one, Megatron-Bridge, cannot be imported without TransformerEngine, so nothing here asks for it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import safe_open
from transformers import PretrainedConfig

from verl_oppo.scoring.megatron_model import head_size, padded_vocab_size

BRIDGE = "mbridge"
SCALAR_HEADS = {"output_layer.weight": "score.weight", "output_layer.bias": "score.bias"}
NORMS_OF_BRIDGE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""mbridge has TransformerEngine's names, whose linear layers hold the norm before them; the local ones do not."""


class Checkpoint:
    """Tensors of a checkpoint's safetensors or PyTorch files, by name, read when they are asked for."""

    def __init__(self, path: str | Path) -> None:
        """Raises ValueError if there are none."""
        self._path = Path(path)
        self._file_of: dict[str, Path] = {}
        self._pickled: dict[str, torch.Tensor] = {}
        for file in sorted(self._path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                self._file_of.update(dict.fromkeys(tensors.keys(), file))
        if not self._file_of:
            for file in sorted(self._path.glob("pytorch_model*.bin")):
                self._pickled.update(torch.load(file, mmap=True, weights_only=True, map_location="cpu"))
        if not self._file_of and not self._pickled:
            raise ValueError(f"{path} holds no weights, allowed are *.safetensors or pytorch_model*.bin")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or name in self._pickled

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._pickled:
            return self._pickled[name]
        with safe_open(self._file_of[name], framework="pt") as tensors:
            return tensors.get_tensor(name)


@torch.no_grad()
def load_weights(model: GPTModel, path: str | Path, hf_config: PretrainedConfig) -> None:
    """Fills the model in place. Raises ValueError if the checkpoint lacks a weight."""
    checkpoint = Checkpoint(path)
    parameters = dict(model.named_parameters())
    if importlib.util.find_spec(BRIDGE) is not None:
        _load_through_bridge(model, path, hf_config)
        parameters = {name: each for name, each in parameters.items() if name.startswith("output_layer.")}
    for name, parameter in parameters.items():
        try:
            shard = rank_shard(checkpoint, name, hf_config, parallel_state.get_tensor_model_parallel_rank())
        except KeyError as missing:
            raise ValueError(
                f"{path} has no weight {missing}, allowed is a checkpoint whose decoder is under 'model.'"
            ) from missing
        assert shard.shape == parameter.shape, f"{name} is {tuple(parameter.shape)}, not {tuple(shard.shape)}"
        parameter.copy_(shard)


def rank_shard(checkpoint: Checkpoint, name: str, hf_config: PretrainedConfig, rank: int) -> torch.Tensor:
    """This rank's part of Megatron-Core's parameter `name`. Raises KeyError with the name that is missing."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    if name in SCALAR_HEADS and SCALAR_HEADS["output_layer.weight"] in checkpoint:
        head = SCALAR_HEADS[name]
        return checkpoint[head] if head in checkpoint else torch.zeros(1)
    if name == "decoder.final_layernorm.weight":
        return checkpoint["model.norm.weight"]
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        rows = checkpoint["model.embed_tokens.weight" if name.startswith("embedding") else "lm_head.weight"]
        padding = padded_vocab_size(hf_config.vocab_size, size) - len(rows)
        return torch.nn.functional.pad(rows, (0, 0, 0, padding)).chunk(size)[rank]
    _, _, layer, name = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    if name in ("input_layernorm.weight", "pre_mlp_layernorm.weight"):
        return checkpoint[prefix + name.replace("pre_mlp_", "post_attention_")]
    if name.startswith("self_attention.linear_qkv."):
        return _grouped_qkv(checkpoint, prefix, name.rpartition(".")[2], hf_config).chunk(size)[rank]
    if name == "mlp.linear_fc1.weight":
        halves = (checkpoint[f"{prefix}mlp.{half}_proj.weight"] for half in ("gate", "up"))
        return torch.cat([half.chunk(size)[rank] for half in halves])
    row_parallel = {"self_attention.linear_proj.weight": "self_attn.o_proj", "mlp.linear_fc2.weight": "mlp.down_proj"}
    return checkpoint[f"{prefix}{row_parallel[name]}.weight"].chunk(size, dim=1)[rank]


def _grouped_qkv(checkpoint: Checkpoint, prefix: str, kind: str, hf_config: PretrainedConfig) -> torch.Tensor:
    """Queries, key and value of the first KV head, then of the second and so on, as Megatron-Core has them."""
    groups, size = hf_config.num_key_value_heads, head_size(hf_config)
    parts = [checkpoint[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"]
    grouped = [part.view(groups, part.shape[0] // (groups * size), size, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 2)


class BridgeNames:
    """The model as mbridge sees it: `state_dict` by the bridge's names, without the output layer.

    The head is left out since mbridge knows heads by the name `lm_head` only.
    """

    def __init__(self, model: GPTModel) -> None:
        self.decoder = SimpleNamespace(layers=model.decoder.layers)
        self._parameters = dict(self._renamed(model))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._parameters

    @staticmethod
    def _renamed(model: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            if name.startswith("output_layer."):
                continue
            for local, bridged in NORMS_OF_BRIDGE.items():
                name = name.removesuffix(local) + bridged if name.endswith(f".{local}") else name
            yield name, parameter


def _load_through_bridge(model: GPTModel, path: str | Path, hf_config: PretrainedConfig) -> None:
    from mbridge import AutoBridge

    size = parallel_state.get_tensor_model_parallel_world_size()
    bridge = AutoBridge.from_config(
        hf_config,
        dtype=model.config.params_dtype,
        make_vocab_size_divisible_by=size,
    )
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = padded_vocab_size(hf_config.vocab_size, size)
    bridge.load_weights([BridgeNames(model)], str(path))
