#!/usr/bin/env bash
# GSM8K: PPO on Megatron (model_engine=megatron), tensor parallel 2, one node of 8 GPUs of 80 GB.
# Not run here: no GPU. The configuration is checked by tests/test_recipes_on_cpu.py.
#
# Data:    python recipes/prepare_data.py gsm8k --out ~/data/gsm8k
# Memory:  bf16 weights and fp32 gradients (6 bytes a parameter) over 2 ranks, Adam's fp32 state (12 bytes) over all 8:
#          34 GB a GPU each for actor and critic of 7B. Set *.megatron.{param,optimizer}_offload=True if too much.
# Needs:   Megatron-Core and mbridge, as verl's own Megatron recipes.
# Overlap: inter-step.
set -euo pipefail

TRAINER_MODE="${TRAINER_MODE:-oppo}" # oppo, sync or colocate_async
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"
DATA_DIR="${DATA_DIR:-$HOME/data/gsm8k}"

DATA=(
    data.train_files="$DATA_DIR/train.parquet"
    data.val_files="$DATA_DIR/test.parquet"
    data.train_batch_size=128
    data.max_prompt_length=512
    data.max_response_length=1024
    data.filter_overlong_prompts=True
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=selective
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
)
CRITIC=(
    critic.model.path="$MODEL_PATH"
    critic.model.use_remove_padding=True
    critic.megatron.tensor_model_parallel_size=2
    critic.optim.lr=1e-5
)
# Carried tokens are of older weights: token-level truncated importance sampling, in every mode for comparison.
OFF_POLICY=(
    actor_rollout_ref.rollout.calculate_log_probs=True
    algorithm.rollout_correction.rollout_is=token
    algorithm.rollout_correction.rollout_is_threshold=2.0
)
OPPO=(
    trainer.v1.oppo.inter_step.delta_init=8
    trainer.v1.oppo.inter_step.delta_max=32
    trainer.v1.oppo.intra_step.critic=False
)
TRAINER=(
    model_engine=megatron
    trainer.v1.trainer_mode="$TRAINER_MODE"
    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.total_training_steps=200
    trainer.test_freq=20
    trainer.save_freq=100
    trainer.project_name=verl_oppo
    trainer.experiment_name="gsm8k_7b_ppo_megatron_$TRAINER_MODE"
)

python3 -m verl_oppo.main_ppo \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${CRITIC[@]}" "${OFF_POLICY[@]}" "${OPPO[@]}" \
    "${TRAINER[@]}" "$@"
