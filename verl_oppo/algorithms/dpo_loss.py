"""The DPO loss (Rafailov et al. 2023, arXiv 2305.18290) as a loss function of verl's actor worker.

Set through `ActorRolloutRefWorker.set_loss_fn`, in place of verl's `ppo_loss`, and called by verl's engines once a
micro batch. It expects pairs of adjacent rows, chosen first, and a weight for each (`pairs.py`); it knows neither
scores nor prompts.
"""

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from verl_oppo.config.schema import OnlineDPOConfig

PAIR_SIZE = 2
PAIR_WEIGHT = "pair_weight"
"""Field of a batch: (rows,) float32, the weight of the row's pair in the loss."""


def preference_loss(margin: torch.Tensor, config: OnlineDPOConfig) -> torch.Tensor:
    """Loss of each pair.

    Args:
        margin: log-ratio of policy and reference on the chosen response minus that on the rejected one, of any shape.
            For `ipo` the log-ratios are means over tokens, else sums.
    """
    if config.loss_type == "ipo":
        return (margin - 1.0 / (2.0 * config.beta)) ** 2
    return -(1.0 - config.label_smoothing) * F.logsigmoid(config.beta * margin) - config.label_smoothing * F.logsigmoid(
        -config.beta * margin
    )


def sequence_sums(
    log_probs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, config: OnlineDPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each response and its log-ratio against the reference, (rows,) each; means over tokens for `ipo`.

    Args:
        log_probs, reference, mask: (rows, response_len).
    """
    tokens = mask.sum(dim=-1).clamp(min=1) if config.loss_type == "ipo" else 1
    return (log_probs * mask).sum(dim=-1) / tokens, ((log_probs - reference) * mask).sum(dim=-1) / tokens


def dpo_loss(
    config: OnlineDPOConfig, model_output: dict, data: TensorDict, dp_group: object = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Share of a micro batch in the mean loss of its minibatch, and of the metrics in theirs.

    verl's engines average gradients over the data-parallel ranks, so what is a share of a mean is multiplied by their
    number, as verl's own losses are.

    Args:
        model_output: `log_probs`, nested (rows, tokens), as verl's engines give it.
        data: nested `prompts`, `responses`, `response_mask`, `ref_log_prob`; `pair_weight`; `dp_size`.
    """
    log_probs = no_padding_2_padding(model_output["log_probs"], data)
    weight = data[PAIR_WEIGHT][::PAIR_SIZE] * data["dp_size"]
    padded = data.select("response_mask", "ref_log_prob").to_padded_tensor()
    mask = padded["response_mask"].to(log_probs.dtype)
    log_prob, log_ratio = sequence_sums(log_probs, padded["ref_log_prob"], mask, config)
    assert len(log_ratio) == PAIR_SIZE * len(weight), f"{len(log_ratio)} rows for {len(weight)} pairs"
    chosen, rejected = log_ratio[::PAIR_SIZE], log_ratio[1::PAIR_SIZE]
    loss = (weight * preference_loss(chosen - rejected, config)).sum()
    rewards_chosen, rewards_rejected = config.beta * chosen, config.beta * rejected
    shown = {
        "rewards/chosen": rewards_chosen,
        "rewards/rejected": rewards_rejected,
        "rewards/margins": rewards_chosen - rewards_rejected,
        "rewards/accuracies": (rewards_chosen > rewards_rejected).to(weight.dtype),
        "logps/chosen": log_prob[::PAIR_SIZE],
        "logps/rejected": log_prob[1::PAIR_SIZE],
    }
    metrics = {
        name: Metric(value=(weight * values.detach()).sum(), aggregation=AggregationType.SUM)
        for name, values in shown.items()
    }
    return loss, metrics
