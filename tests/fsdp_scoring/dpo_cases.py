"""The DPO loss in verl's own `train_mini_batch` against ten lines in float64, on the same pairs, one case a variant.

Every rank holds its part of the same pairs: laid out by `algorithms.pairs`, in two minibatches of several micro
batches. The optimizer stands still, so both minibatches have the gradient of the same model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from harness import PAD_TOKEN_ID, VOCAB_SIZE, Rank, worker_config
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.engine_workers import TrainingWorker

from verl_oppo.algorithms.dpo_loss import PAIR_SIZE, PAIR_WEIGHT, dpo_loss
from verl_oppo.algorithms.pairs import balance_pairs, pair_weights
from verl_oppo.config.schema import OnlineDPOConfig

NUM_PAIRS, MINI_BATCH_PAIRS = 8, 4
TIES = (2, 7)
PROMPT = 5
VARIANTS = {
    "sigmoid": OnlineDPOConfig(beta=0.1),
    "smoothed": OnlineDPOConfig(beta=0.1, label_smoothing=0.2),
    "ipo": OnlineDPOConfig(beta=2.0, loss_type="ipo"),
    "packed": OnlineDPOConfig(beta=0.1),
    "carried": OnlineDPOConfig(beta=0.1),
}
"""`packed`: dynamic micro batches without padding. `carried`: log-probs and weights of the rollout lie in the batch."""

_workers: dict[str, TrainingWorker] = {}


def dpo(rank: Rank, variant: str) -> dict[str, Any]:
    config = VARIANTS[variant]
    model, rows, references = reference_rows(rank)
    order = balance_pairs([(len(a), len(b)) for a, b in zip(rows[::2], rows[1::2], strict=True)], rank.world_size)
    weights, counts = pair_weights([index not in TIES for index in order], rank.world_size, MINI_BATCH_PAIRS)
    assert sum(counts) == NUM_PAIRS - len(TIES)
    part = slice(rank.index * NUM_PAIRS // rank.world_size, (rank.index + 1) * NUM_PAIRS // rank.world_size)
    mine = [PAIR_SIZE * index + member for index in order[part] for member in range(PAIR_SIZE)]
    batch = dpo_batch([rows[i] for i in mine], [references[i] for i in mine], weights[part], variant)
    worker = dpo_worker(rank)
    worker.set_loss_fn(partial(dpo_loss, config))
    with recorded_gradients(worker) as seen:
        metrics = tu.get(worker.train_mini_batch(batch), "metrics")

    per_rank, mini_per_rank = NUM_PAIRS // rank.world_size, MINI_BATCH_PAIRS // rank.world_size
    differences = {"loss": 0.0, "gradient": 0.0, "largest_gradient": 0.0}
    for mini, gradients in enumerate(seen):
        places = [r * per_rank + mini * mini_per_rank + i for r in range(rank.world_size) for i in range(mini_per_rank)]
        pairs = [order[place] for place in places if order[place] not in TIES]
        model.zero_grad()
        loss = reference_loss(model, [(rows[2 * i], rows[2 * i + 1]) for i in pairs], references, pairs, config)
        loss.backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert gradients.keys() == expected.keys()
        whole = torch.cat([gradient.flatten() for gradient in expected.values()])
        error = torch.cat([gradients[name].flatten() for name in expected]) - whole
        found = {"loss": abs(metrics["loss"][mini] - loss.item()), "gradient": float(error.abs().max())}
        found["largest_gradient"] = float(whole.abs().max())
        differences = {name: max(differences[name], found[name]) for name in differences}
    assert len(seen) == NUM_PAIRS // MINI_BATCH_PAIRS == len(metrics["loss"])
    margins = np.asarray(metrics["rewards/margins"]).tolist()
    expected = expected_margins(model, rows, references, order, counts, config, rank.world_size)
    return {**differences, "margins": margins, "expected_margins": expected}


def reference_loss(model, pairs, references, indices, config):
    """The DPO loss, its conservative variant and IPO as their papers have them: mean over pairs, in float64."""
    losses = []
    for (chosen, rejected), index in zip(pairs, indices, strict=True):
        ratios = [log_ratio(model, ids, references[2 * index + k]) for k, ids in enumerate((chosen, rejected))]
        if config.loss_type == "ipo":
            lengths = [len(ids) - PROMPT for ids in (chosen, rejected)]
            losses.append((ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * config.beta)) ** 2)
            continue
        p = torch.sigmoid(config.beta * (ratios[0] - ratios[1]))
        losses.append(-(1 - config.label_smoothing) * torch.log(p) - config.label_smoothing * torch.log(1 - p))
    return torch.stack(losses).mean()


def log_ratio(model, ids: np.ndarray, reference: torch.Tensor) -> torch.Tensor:
    return (response_log_probs(model, ids) - reference.double()).sum()


def response_log_probs(model, ids: np.ndarray) -> torch.Tensor:
    tokens = torch.from_numpy(ids)
    log_probs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
    return log_probs[PROMPT - 1 : -1].gather(-1, tokens[PROMPT:, None])[:, 0]


def expected_margins(model, rows, references, order, counts, config, world_size) -> list[float]:
    """`rewards/margins` of each minibatch."""
    margins = [[] for _ in counts]
    per_rank, mini_per_rank = NUM_PAIRS // world_size, MINI_BATCH_PAIRS // world_size
    with torch.no_grad():
        for place, index in enumerate(order):
            if index not in TIES:
                ratios = [float(log_ratio(model, rows[2 * index + k], references[2 * index + k])) for k in (0, 1)]
                if config.loss_type == "ipo":
                    ratios = [ratio / (len(rows[2 * index + k]) - PROMPT) for k, ratio in enumerate(ratios)]
                margins[place % per_rank // mini_per_rank].append(config.beta * (ratios[0] - ratios[1]))
    return [float(np.mean(values)) for values in margins]


@cache
def reference_rows(rank: Rank) -> tuple[Qwen2ForCausalLM, list[np.ndarray], list[torch.Tensor]]:
    """The model in float64, rows of all pairs and their reference log-probs, the same on every rank."""
    model = Qwen2ForCausalLM.from_pretrained(rank.folder / "language").double().eval()
    rng = np.random.default_rng(7)
    rows = [rng.integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, PROMPT + rng.integers(3, 20)) for _ in range(2 * NUM_PAIRS)]
    with torch.no_grad():
        exact = [response_log_probs(model, ids) for ids in rows]
    # A policy that has moved away from its reference, by about one nat a response.
    noise = [torch.from_numpy(rng.normal(0, 0.3, len(log_probs))) for log_probs in exact]
    return model, rows, [(log_probs + shift).float() for log_probs, shift in zip(exact, noise, strict=True)]


def dpo_worker(rank: Rank) -> TrainingWorker:
    if "actor" not in _workers:
        standing_still = FSDPOptimizerConfig(lr=0.0, clip_grad=1e9, total_training_steps=100)
        config = worker_config(rank.folder / "language", "language_model")
        _workers["actor"] = TrainingWorker(replace(config, optimizer_config=standing_still))
        _workers["actor"].reset()
    return _workers["actor"]


def dpo_batch(rows, references, weights, variant: str) -> tu.TensorDict:
    """A batch as `OnlineDPO.update_actor` has it sent to a rank."""

    def jagged(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    responses = [torch.from_numpy(ids[PROMPT:]) for ids in rows]
    tensors = {
        "input_ids": jagged([torch.from_numpy(ids) for ids in rows]),
        "position_ids": jagged([torch.arange(len(ids)) for ids in rows]),
        "prompts": jagged([torch.from_numpy(ids[:PROMPT]) for ids in rows]),
        "responses": jagged(responses),
        "response_mask": jagged([torch.ones_like(ids) for ids in responses]),
        "loss_mask": jagged([torch.ones_like(ids) for ids in responses]),
        "ref_log_prob": jagged(references),
        PAIR_WEIGHT: torch.tensor(weights, dtype=torch.float32).repeat_interleave(PAIR_SIZE),
    }
    if variant == "carried":
        tensors["rollout_log_probs"] = jagged([reference - 1.0 for reference in references])
        tensors["old_log_probs"] = jagged([reference + 1.0 for reference in references])
        tensors["rollout_is_weights"] = jagged([torch.full_like(reference, 0.5) for reference in references])
    settings = {
        "temperature": 1.0,
        "calculate_entropy": False,
        "use_remove_padding": variant == "packed",
        "use_dynamic_bsz": variant == "packed",
        "max_token_len_per_gpu": 64,
        "micro_batch_size_per_gpu": 1,
        "force_group_size": PAIR_SIZE,
        "mini_batch_size": PAIR_SIZE * MINI_BATCH_PAIRS,
        "epochs": 1,
        "dataloader_kwargs": {"shuffle": False},
    }
    return tu.get_tensordict(tensors, settings)


@contextmanager
def recorded_gradients(worker: TrainingWorker) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The whole gradient of each minibatch as the optimizer sees it; verl drops it after the step."""
    seen: list[dict[str, torch.Tensor]] = []
    step = worker.engine.optimizer_step

    def recording_step() -> float:
        gradients = {name: parameter.grad for name, parameter in worker.engine.module.named_parameters()}
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
        seen.append({name: gradient.double() for name, gradient in whole.items()})
        return step()

    worker.engine.optimizer_step = recording_step
    try:
        yield seen
    finally:
        worker.engine.optimizer_step = step
