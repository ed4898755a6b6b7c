"""Cases about what is refused at start, and the reference inside verl's own worker. One rank is enough for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from harness import (
    SIZES,
    Rank,
    chunked,
    engine_config,
    largest_difference,
    model_config,
    plain_batch,
    settings,
    trainer_config,
)
from transformers import AutoConfig, Qwen2Config
from verl.workers.config import RewardModelConfig, RolloutConfig

from verl_oppo.scoring import support
from verl_oppo.scoring.scorer import Trajectory
from verl_oppo.scoring.workers import ActorRolloutRefWorkerOppo, RefWorkerOppo, reward_worker_config

Result = dict[str, Any]


def refused_setup(rank: Rank) -> Result:
    """What cannot be served is refused before anything runs."""
    model, engine = model_config(rank.folder / "value", load_tokenizer=False), engine_config()

    def supported(**fields: Any) -> None:
        of_engine = {name for name in fields if hasattr(engine, name) and name != "use_fused_kernels"}
        support.check_supported(
            dataclasses.replace(model, **{name: fields[name] for name in fields if name not in of_engine}),
            dataclasses.replace(engine, **{name: fields[name] for name in of_engine}),
            "the.key",
        )

    def attention(**fields: Any) -> None:
        support.check_attention(Qwen2Config(**SIZES | fields), "the.key")

    def scalar_head(folder: str) -> None:
        support.check_scalar_head(str(rank.folder / folder), AutoConfig.from_pretrained(rank.folder / folder))

    def context(length: int, **fields: Any) -> None:
        support.check_context(Qwen2Config(**SIZES | fields), settings(longest_trajectory=length, key="the.key"))

    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 512}
    support.check_supported(model, engine, "the.key")
    attention()
    scalar_head("value")
    scalar_head("reward")
    context(512)
    context(2048, rope_parameters=yarn)
    refused = {
        "sequence parallel": lambda: supported(ulysses_sequence_parallel_size=2),
        "strategy": lambda: supported(strategy="fsdp_turbo"),
        "fused kernels": lambda: supported(use_fused_kernels=True),
        "determinism": lambda: supported(full_determinism=True),
        "lora": lambda: supported(lora_rank=8),
        "sliding layers": lambda: attention(use_sliding_window=True, sliding_window=16, max_window_layers=1),
        "dynamic rope": lambda: attention(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "bidirectional": lambda: attention(is_causal=False),
        "attention": lambda: support.check_attention_implementation("flex_attention", "the.key"),
        "no room": lambda: support.cache_blocks(settings(cache_bytes=16384, key="the.key"), token_bytes=256),
        "two labels": lambda: scalar_head("two_labels"),
        "generative": lambda: scalar_head("language"),
        "no head": lambda: scalar_head("headless"),
        "context": lambda: context(513),
        "no model": lambda: reward_worker_config(RewardModelConfig(rollout=RolloutConfig(name="vllm"))),
    }
    return {"messages": {what: refusal(call) for what, call in refused.items()}}


def refusal(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def unready(rank: Rank) -> Result:
    """A worker without a scorer says what is missing."""
    worker = RefWorkerOppo.__new__(RefWorkerOppo)
    try:
        worker.oppo_stats()
    except RuntimeError as error:
        return {"message": str(error)}
    return {}


def reference_role(rank: Rank) -> Result:
    """The reference inside verl's `ActorRolloutRefWorker`, built from verl's own configuration."""
    worker = ActorRolloutRefWorkerOppo(trainer_config(rank.folder).actor_rollout_ref, role="ref")
    worker.init_model()
    worker.oppo_setup(settings(temperature=0.7))
    for call in chunked(rank.sequences, 16):
        worker.oppo_prefill(call)
    reply = worker.oppo_score([Trajectory(str(index), ids) for index, ids in enumerate(rank.sequences)])
    assert reply.report.tokens_computed == 0
    output = worker.compute_ref_log_prob(plain_batch(rank.sequences, temperature=0.7))
    worker.ref = None
    return {
        "difference": largest_difference(reply.scored, [row.numpy() for row in output["log_probs"].unbind()]),
        "message": refusal(lambda: worker.oppo_setup(settings())),
    }
