"""Tiny models, Megatron workers around them, transformers' plain path, and the cases that only Megatron has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from cases import setup
from harness import SIZES, VOCAB_SIZE, chunked, largest_difference, prefill, score, settings
from megatron.core import parallel_state, tensor_parallel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)
from verl.trainer.config import CheckpointConfig
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithValueHead

from verl_oppo.scoring.megatron_model import PagedGPT, build_model
from verl_oppo.scoring.megatron_weights import load_weights
from verl_oppo.scoring.megatron_workers import MegatronRewardConfig, RewardWorkerMegatron
from verl_oppo.scoring.paged_kv import Segment, padded_layout
from verl_oppo.scoring.scorer import Chunk, Trajectory
from verl_oppo.scoring.workers import CriticWorkerOppo

LENGTHS = (3, 40, 66, 71)
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LANGUAGE_MODELS = {
    "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2_untied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama_untied": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "tie_word_embeddings": False,
            "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 10000.0, "original_max_position_embeddings": 64},
        },
    ),
}
SCORING_MODELS = {
    "qwen2_value": (Qwen2ForTokenClassification, Qwen2Config, {"num_labels": 1}),
    "qwen2_reward": (Qwen2ForSequenceClassification, Qwen2Config, {"num_labels": 1}),
    "one_head_reward": (Qwen2ForSequenceClassification, Qwen2Config, {"num_labels": 1, "num_key_value_heads": 1}),
    "llama_reward": (LlamaForSequenceClassification, LlamaConfig, {"num_labels": 1}),
}
Ids = np.ndarray
Result = dict[str, Any]


def save_models(folder: Path) -> None:
    torch.manual_seed(0)
    for name, (model_class, config_class, fields) in (LANGUAGE_MODELS | SCORING_MODELS).items():
        model = model_class(config_class(**SIZES | fields))
        for parameter_name, parameter in model.named_parameters():
            # Both are constant at first: one in another's place would not show.
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.data += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(folder / name)


class Rank:
    """What the cases of one tensor-parallel size share. Ranks of one tensor-parallel group have the same sequences."""

    def __init__(self, folder: Path, tensor_parallel: int) -> None:
        self.folder, self.tensor_parallel = folder, tensor_parallel
        self.index = parallel_state.get_data_parallel_rank()
        self.world_size = parallel_state.get_data_parallel_world_size()
        self.sequences = self.random_sequences(seed=0)
        self._workers: dict[str, RewardWorkerMegatron] = {}

    def random_sequences(self, seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[Ids]:
        rng = np.random.default_rng([seed, self.index])
        return [rng.integers(1, VOCAB_SIZE, length + self.index) for length in lengths]

    def worker(self, name: str) -> RewardWorkerMegatron:
        if name not in self._workers:
            model = HFModelConfig(path=str(self.folder / name), load_tokenizer=False)
            self._workers[name] = RewardWorkerMegatron(MegatronRewardConfig(model, "float32", self.tensor_parallel))
            self._workers[name].reset()
        return self._workers[name]

    def expected(self, name: str, temperature: float) -> list[list[np.ndarray]]:
        return [values_of_transformers(self.folder / name, self.sequences)]


def values_of_transformers(path: Path, sequences: list[Ids]) -> list[np.ndarray]:
    """The head's output at each position, one sequence at a time, without any cache."""
    loader = AutoModelForSequenceClassification if path.name.endswith("reward") else AutoModelForTokenClassification
    model = loader.from_pretrained(path).eval()
    with torch.no_grad():
        hidden = [model.model(torch.from_numpy(ids)[None]).last_hidden_state for ids in sequences]
        return [model.score(states)[0, :, 0].numpy() for states in hidden]


def mapped(rank: Rank, name: str) -> Result:
    """Logits of the loaded model, this rank's part gathered, against transformers'."""
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(rank.folder / name).eval()
    model = build_model(reference.config, torch.float32, "cpu", scalar_head=False)
    load_weights(model, rank.folder / name, reference.config)
    assert (model.output_layer.weight is None) == reference.config.tie_word_embeddings
    rows = rank.sequences[1:]
    starts = np.cumsum([100, *(len(ids) for ids in rows)])
    segments = [
        Segment(ids, ids, np.arange(start, start + len(ids))) for ids, start in zip(rows, starts[:-1], strict=True)
    ]
    layout = padded_layout(segments, "cpu")
    part = PagedGPT(model)(layout, int(starts[-1])).contiguous()
    parts = [torch.empty_like(part) for _ in range(rank.tensor_parallel)]
    group = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_gather(parts, part, group=group)
    logits = layout.unpad(torch.cat(parts, dim=-1))[:, :VOCAB_SIZE]
    with torch.no_grad():
        expected = torch.cat([reference(torch.from_numpy(ids)[None]).logits[0] for ids in rows])
    assert expected.abs().max() > 1
    return {"difference": float(((logits - expected).abs() / expected.abs().clamp(min=1)).max())}


def last_of_a_reward(rank: Rank, name: str) -> Result:
    """All but the last two tokens streamed: the final call computes these, and the score is transformers' own."""
    worker = setup(rank, name)
    prefill(worker, chunked([ids[:-2] for ids in rank.sequences], 16))
    reply = score(worker, rank.sequences)
    assert reply.report.tokens_computed == 2 * len(rank.sequences)
    model = AutoModelForSequenceClassification.from_pretrained(rank.folder / name).eval()
    with torch.no_grad():
        expected = np.array([model(input_ids=torch.from_numpy(ids)[None]).logits.item() for ids in rank.sequences])
    scores = np.array([one.last for one in reply.scored])
    return {"difference": float(np.max(np.abs(scores - expected) / np.maximum(1, np.abs(expected))))}


def short(rank: Rank, name: str) -> Result:
    """Sequences of 1 and 2 tokens."""
    worker = setup(rank, name)
    sequences = [ids[:length] for ids, length in zip(rank.sequences, (1, 2, 1, 2), strict=True)]
    prefill(worker, chunked(sequences, 1))
    reply = score(worker, sequences)
    return {"difference": largest_difference(reply.scored, values_of_transformers(rank.folder / name, sequences))}


def split(rank: Rank, name: str) -> Result:
    """Each rank of a tensor-parallel group caches its own heads: together the bytes of one whole model."""
    worker = setup(rank, name)
    whole = 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * 8 * 4
    prefill(worker, chunked(rank.sequences, 16))
    stats = worker.oppo_stats()
    assert stats.cached_tokens == sum(map(len, rank.sequences))
    assert stats.bytes_per_token * rank.tensor_parallel == whole
    assert stats.cache_bytes_allocated <= stats.cache_bytes_limit
    worker.oppo_drop(["0", "unknown"])
    assert worker.oppo_stats().cached_tokens == sum(map(len, rank.sequences[1:]))
    worker.oppo_invalidate()
    assert worker.oppo_stats().cache_bytes_allocated == 0
    reply = score(worker, rank.sequences)
    assert {one.cached_tokens for one in reply.scored} == {0}
    return {"difference": largest_difference(reply.scored, rank.expected(name, 1.0)[0])}


def refused_input(rank: Rank) -> Result:
    """What one rank refuses ends the call on all; the next one is served."""
    worker = setup(rank, "qwen2_value")
    refuses = rank.index == rank.world_size - 1
    try:
        worker.oppo_prefill([Chunk("t7", 0, [1, VOCAB_SIZE if refuses else 2])])
        message = None
    except ValueError as error:
        message = str(error)
    assert worker.oppo_stats().cached_tokens == 0
    reply = worker.oppo_score([Trajectory("a", rank.sequences[1])])
    expected = rank.expected("qwen2_value", 1.0)[0][1:2]
    return {"message": message, "difference": largest_difference(reply.scored, expected)}


def alone(rank: Rank) -> Result:
    """A rank with work and one without any: nobody waits, since whole copies need no collective forwards."""
    worker = setup(rank, "qwen2_value")
    mine = rank.sequences if rank.index == 0 else []
    reply = worker.oppo_score([Trajectory(str(index), ids) for index, ids in enumerate(mine)])
    assert reply.report.forwards == bool(mine)
    return {"difference": largest_difference(reply.scored, rank.expected("qwen2_value", 1.0)[0][: len(mine)])}


def registered(rank: Rank) -> Result:
    """What verl's dispatch is told: the data-parallel rank, and whose answers count."""
    worker = rank.worker("qwen2_value")
    return {
        "data_rank": worker._query_dispatch_info("train"),
        "collects": worker.query_collect_info("train"),
        "rank": torch.distributed.get_rank(),
    }


@EngineRegistry.register(model_type="value_model", backend="megatron", device="cpu")
class LocalSpecEngine(MegatronEngineWithValueHead):
    """verl's Megatron engine, all but the bridge that builds its model, which needs TransformerEngine."""

    def initialize(self) -> None:
        hf_config = self.model_config.hf_config
        model = build_model(hf_config, torch.float32, "cpu").requires_grad_(True)
        load_weights(model, self.model_config.local_path, hf_config)
        self.module = [model]
        self.optimizer = None


def critic_worker(rank: Rank, name: str) -> CriticWorkerOppo:
    config = TrainingWorkerConfig(
        model_type="value_model",
        model_config=HFModelConfig(path=str(rank.folder / name), load_tokenizer=False),
        engine_config=McoreEngineConfig(tensor_model_parallel_size=rank.tensor_parallel, sequence_parallel=False),
        optimizer_config=McoreOptimizerConfig(lr=0.1),
        checkpoint_config=CheckpointConfig(),
    )
    # It seeds CUDA's generators.
    with patch("verl.workers.engine.megatron.transformer_impl.set_random_seed"):
        worker = CriticWorkerOppo(config)
    worker.reset()
    worker.oppo_setup(settings())
    return worker


def plain_values(worker: CriticWorkerOppo, ids: Ids) -> torch.Tensor:
    """Values [tokens] by Megatron-Core's own forward, with its own attention."""
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    tokens = torch.from_numpy(ids)[None]
    later = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)[None, None]
    with patch("torch.cuda.current_device", lambda: torch.device("cpu")):
        return worker.engine.module[0](tokens, torch.arange(len(ids))[None], later)[0, :, 0]


def critic(rank: Rank, name: str) -> Result:
    """The worker whose model learns is the one that takes chunks: streamed values before and after an update."""
    worker = critic_worker(rank, name)
    names = dict(worker.engine.module[0].named_parameters())
    before = rank.expected(name, 1.0)[0]
    differences = []
    for expected in (before, None):
        worker.oppo_stream_open()
        prefill(worker, chunked([ids[:-2] for ids in rank.sequences], 16))
        worker.oppo_stream_close()
        if expected is None:
            worker.forget_cache()
            update(worker, rank.sequences[2])
            with torch.no_grad():
                expected = [plain_values(worker, ids).numpy() for ids in rank.sequences]
            assert any(np.abs(new - old).max() > 1e-2 for new, old in zip(expected, before, strict=True))
        reply = score(worker, rank.sequences)
        differences.append(largest_difference(reply.scored, expected))
    worker.oppo_setup(settings())
    reply = score(worker, rank.sequences)
    differences.append(largest_difference(reply.scored, expected))
    assert dict(worker.engine.module[0].named_parameters()).keys() == names.keys()
    return {"difference": max(differences)}


def update(worker: CriticWorkerOppo, ids: Ids) -> None:
    """A step of gradient descent through Megatron-Core's own forward."""
    model = worker.engine.module[0]
    plain_values(worker, ids).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None


def refused_critics(rank: Rank) -> Result:
    """What the worker's scorer refuses when it is built."""
    worker = critic_worker(rank, "qwen2_value")
    engine, model, messages = worker.engine, worker.engine.module[0], {}
    for name, value in {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}.items():
        engine.engine_config = SimpleNamespace(tensor_model_parallel_size=1, get={name: value}.get)
        messages[name] = refusal_of(worker)
    engine.engine_config = worker.engine_config
    for name, value in {"window_size": (8, 0), "num_moe_experts": 4}.items():
        setattr(model.config, name, value)
        messages[name] = refusal_of(worker)
        setattr(model.config, name, None)
    return {"messages": messages}


def refusal_of(worker: CriticWorkerOppo) -> str:
    try:
        worker.oppo_setup(settings())
    except ValueError as error:
        return str(error)
    return "not refused"
