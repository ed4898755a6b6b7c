#!/usr/bin/env bash
# GSM8K: PPO with verl's rule-based reward. FSDP, one node of 8 GPUs of 80 GB.
# Not run here: no GPU. The configuration is checked by tests/test_recipes_on_cpu.py.
#
# Data:    python recipes/prepare_data.py gsm8k --out ~/data/gsm8k
# Memory:  actor and critic 16 bytes a parameter in fp32 with Adam, over 8 GPUs: 15 GB each for 7B.
# Overlap: inter-step; a rule has nothing to stream to. trainer.v1.oppo.intra_step.critic=True streams to the critic, if
#          timing_s/values is a visible share of the step and memory is free.
# Expect:  the paper reports 2.8x less time to the same reward than TRL; it has no figure against verl.
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
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
)
CRITIC=(
    critic.strategy=fsdp2
    critic.model.path="$MODEL_PATH"
    critic.model.use_remove_padding=True
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
    trainer.v1.trainer_mode="$TRAINER_MODE"
    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.total_training_steps=200
    trainer.test_freq=20
    trainer.save_freq=100
    trainer.project_name=verl_oppo
    trainer.experiment_name="gsm8k_7b_ppo_$TRAINER_MODE"
)

python3 -m verl_oppo.main_ppo \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${CRITIC[@]}" "${OFF_POLICY[@]}" "${OPPO[@]}" \
    "${TRAINER[@]}" "$@"
