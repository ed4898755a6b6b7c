#!/usr/bin/env bash
# GSM8K: GRPO with verl's rule-based reward, 8 answers a prompt. FSDP, one node of 8 GPUs of 80 GB.
# Not run here: no GPU. The configuration is checked by tests/test_recipes_on_cpu.py; a small twin runs in tests/e2e.
#
# Data:    python recipes/prepare_data.py gsm8k --out ~/data/gsm8k
# Memory:  no critic: 16 bytes a parameter for the actor over 8 GPUs (15 GB each for 7B).
# Overlap: inter-step. Delta counts groups: a group is deferred whole, its finished answers are not generated again, and
#          it is as long as its longest answer (README, "Beyond PPO").
# Others:  algorithm.adv_estimator=rloo or reinforce_plus_plus; DAPO's filtering: algorithm.filter_groups.enable=True.
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
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
)
ALGORITHM=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=8
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
)
TRAINER=(
    trainer.v1.trainer_mode="$TRAINER_MODE"
    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.total_training_steps=200
    trainer.test_freq=20
    trainer.save_freq=100
    trainer.project_name=verl_oppo
    trainer.experiment_name="gsm8k_7b_grpo_$TRAINER_MODE"
)

python3 -m verl_oppo.main_ppo \
    "${DATA[@]}" "${ACTOR[@]}" "${ALGORITHM[@]}" "${ROLLOUT[@]}" "${OFF_POLICY[@]}" "${OPPO[@]}" \
    "${TRAINER[@]}" "$@"
