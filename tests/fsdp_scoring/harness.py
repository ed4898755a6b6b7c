"""Tiny models, verl workers around them, and verl's plain path, for the cases."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RewardModelConfig,
    RolloutConfig,
    TrainingWorkerConfig,
)

from verl_oppo.scoring.scorer import Chunk, PrefillReply, Scored, ScoreReply, ScorerSettings, Trajectory
from verl_oppo.scoring.workers import (
    CriticWorkerOppo,
    RefWorkerOppo,
    RewardWorkerOppo,
    ScoringTrainingWorker,
    reward_worker_config,
)

VOCAB_SIZE, PAD_TOKEN_ID = 97, 0
LENGTHS = (3, 40, 66, 71)
FP32 = {"model_dtype": "fp32", "mixed_precision": {"param_dtype": "fp32"}}
BF16 = {"model_dtype": "bf16", "mixed_precision": {"param_dtype": "bf16"}}
SIZES = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    # Ten times the default: with nearly uniform attention a wrong prefix would hardly show.
    initializer_range=0.2,
    pad_token_id=PAD_TOKEN_ID,
    dtype=torch.float32,
)
Ids = np.ndarray


def save_models(folder: Path) -> None:
    torch.manual_seed(0)
    scalar = Qwen2Config(**SIZES, num_labels=1)
    moe = Qwen3MoeConfig(**SIZES, head_dim=8, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    Qwen2ForTokenClassification(scalar).save_pretrained(folder / "value")
    Qwen2ForSequenceClassification(scalar).save_pretrained(folder / "reward")
    Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_labels=2)).save_pretrained(folder / "two_labels")
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder / "language")
    Qwen3MoeForCausalLM(moe).save_pretrained(folder / "moe")
    save_headless(folder / "reward", folder / "headless")


def save_headless(source: Path, target: Path) -> None:
    """The reward model with its head by another name."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    weights = load_file(source / "model.safetensors")
    weights["v_head.weight"] = weights.pop("score.weight")
    save_file(weights, target / "model.safetensors")


def model_config(path: Path, **fields: Any) -> HFModelConfig:
    defaults = {"load_tokenizer": False, "use_remove_padding": False}
    return HFModelConfig(path=str(path), **defaults | fields)


def engine_config(**fields: Any) -> FSDPEngineConfig:
    return FSDPEngineConfig(**{"strategy": "fsdp2", "use_torch_compile": False, **FP32} | fields)


def worker_config(path: Path, model_type: str, **engine: Any) -> TrainingWorkerConfig:
    return TrainingWorkerConfig(
        model_type=model_type,
        model_config=model_config(path),
        engine_config=engine_config(**engine),
        optimizer_config=FSDPOptimizerConfig(lr=0.1, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )


def trainer_config(folder: Path) -> DictConfig:
    """verl's own configuration, with the tiny model as actor and reference."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={folder / 'language'}",
                "+actor_rollout_ref.model.load_tokenizer=False",
                "actor_rollout_ref.model.use_remove_padding=False",
                "actor_rollout_ref.actor.strategy=fsdp2",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.ref.strategy=fsdp2",
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.ref.use_torch_compile=False",
                "actor_rollout_ref.ref.fsdp_config.model_dtype=fp32",
                "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32",
                "actor_rollout_ref.rollout.name=vllm",
            ],
        )


class Rank:
    """What the cases of one rank share. Sequences differ from rank to rank; their number does not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.sequences = self.random_sequences(seed=0)
        self._workers: dict[str, ScoringTrainingWorker] = {}
        self._expected: dict[tuple[str, float], list[list[np.ndarray]]] = {}
        self._builders: dict[str, Callable[[], ScoringTrainingWorker]] = {
            "critic": lambda: self._build(CriticWorkerOppo, "value"),
            "critic_trained": lambda: self._build(CriticWorkerOppo, "value"),
            "critic_fsdp1": lambda: self._build(CriticWorkerOppo, "value", strategy="fsdp"),
            "critic_bf16": lambda: self._build(CriticWorkerOppo, "value", **BF16),
            "critic_offloaded": lambda: self._build(CriticWorkerOppo, "value", param_offload=True),
            "reference": lambda: self._build(RefWorkerOppo, "language", forward_only=True),
            "reference_fsdp1": lambda: self._build(RefWorkerOppo, "language", forward_only=True, strategy="fsdp"),
            "reference_moe": lambda: self._build(RefWorkerOppo, "moe", forward_only=True),
            "reward": self._build_reward,
        }

    def random_sequences(self, seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[Ids]:
        rng = np.random.default_rng([seed, self.index])
        # Not the padding id: transformers' sequence classification takes the last other token for the last one.
        return [rng.integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, length + self.index) for length in lengths]

    def worker(self, name: str) -> ScoringTrainingWorker:
        if name not in self._workers:
            worker = self._builders[name]()
            worker.reset()
            self._workers[name] = worker
        return self._workers[name]

    def expected(self, name: str, temperature: float) -> list[list[np.ndarray]]:
        """`plain_in_all_modes` of this rank's sequences, computed once: these workers' weights do not change."""
        if (name, temperature) not in self._expected:
            self._expected[name, temperature] = plain_in_all_modes(self.worker(name), self.sequences, temperature)
        return self._expected[name, temperature]

    def _build(self, cls: type[ScoringTrainingWorker], model: str, **engine: Any) -> ScoringTrainingWorker:
        model_type = "language_model" if cls is RefWorkerOppo else "value_model"
        return cls(worker_config(self.folder / model, model_type, **engine))

    def _build_reward(self) -> RewardWorkerOppo:
        reward_model = RewardModelConfig(
            enable=True,
            model_path=str(self.folder / "reward"),
            rollout=RolloutConfig(name="vllm", dtype="float32"),
        )
        return RewardWorkerOppo(reward_worker_config(reward_model, model={"load_tokenizer": False}))


def settings(**fields: Any) -> ScorerSettings:
    return ScorerSettings(**{"cache_bytes": 4 << 20, "longest_trajectory": 128, "block_size": 16} | fields)


def plain_batch(sequences: list[Ids], **fields: Any) -> tu.TensorDict:
    """A batch as verl's trainer hands it to an engine worker, without padding."""

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    tensors = {
        "input_ids": jagged([torch.from_numpy(ids) for ids in sequences]),
        "position_ids": jagged([torch.arange(len(ids)) for ids in sequences]),
        "loss_mask": jagged([torch.ones(len(ids)) for ids in sequences]),
    }
    defaults = {
        "temperature": 1.0,
        "compute_loss": False,
        "use_remove_padding": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "max_token_len_per_gpu": 96,
        "global_token_num": [len(ids) for ids in sequences],
    }
    return tu.get_tensordict(tensors, defaults | fields)


def plain(worker: ScoringTrainingWorker, sequences: list[Ids], **fields: Any) -> list[np.ndarray]:
    """Values or log-probs of all positions, by verl's own `infer_batch`."""
    output = worker.infer_batch(plain_batch(sequences, **fields))
    return [row.float().numpy() for row in output["values" if "values" in output.keys() else "log_probs"].unbind()]


def chunked(sequences: list[Ids], size: int, names: list[str] | None = None) -> list[list[Chunk]]:
    """One prefill call per chunk index, each with the chunks of all trajectories that are that long."""
    names = names or [str(index) for index in range(len(sequences))]
    return [
        [
            Chunk(name, offset, ids[offset : offset + size])
            for name, ids in zip(names, sequences, strict=True)
            if offset < len(ids)
        ]
        for offset in range(0, max(len(ids) for ids in sequences), size)
    ]


def prefill(worker: ScoringTrainingWorker, calls: list[list[Chunk]]) -> list[PrefillReply]:
    """One call after the other; a rank with fewer calls than another makes empty ones, as the pump does."""
    most = torch.tensor(len(calls))
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return [worker.oppo_prefill(call) for call in calls + [[]] * (int(most) - len(calls))]


def score(worker: ScoringTrainingWorker, sequences: list[Ids], names: list[str] | None = None) -> ScoreReply:
    names = names or [str(index) for index in range(len(sequences))]
    return worker.oppo_score([Trajectory(name, ids) for name, ids in zip(names, sequences, strict=True)])


def largest_difference(scored: list[Scored], expected: list[np.ndarray]) -> float:
    """|difference| / max(1, |expected|), the largest of all positions that the scorer gives."""
    largest = 0.0
    for one, plain_row in zip(scored, expected, strict=True):
        row = plain_row[: len(one.outputs)]
        if len(row):
            largest = max(largest, float(np.max(np.abs(one.outputs - row) / np.maximum(1, np.abs(row)))))
    return largest


def plain_in_all_modes(
    worker: ScoringTrainingWorker, sequences: list[Ids], temperature: float
) -> list[list[np.ndarray]]:
    """verl's plain path with and without remove_padding and dynamic batch sizes."""
    modes = [(remove_padding, dynamic) for remove_padding in (False, True) for dynamic in (False, True)]
    return [
        plain(worker, sequences, temperature=temperature, use_remove_padding=remove_padding, use_dynamic_bsz=dynamic)
        for remove_padding, dynamic in modes
    ]


def hf_scores(folder: Path, sequences: list[Ids]) -> list[float]:
    """Scores of the sequence classification model itself, one sequence at a time."""
    model = Qwen2ForSequenceClassification.from_pretrained(folder / "reward").eval()
    with torch.no_grad():
        return [model(input_ids=torch.from_numpy(ids)[None]).logits.item() for ids in sequences]
