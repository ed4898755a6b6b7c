#!/usr/bin/env bash
# OpenCoder: PPO on coding tasks, rewarded by the share of their tests that pass. FSDP, one node of 8 GPUs of 40 GB.
# The reward (recipes/opencoder_reward.py) executes what the model writes: run it where that can do no harm.
# Not run here: no GPU. The configuration is checked by tests/test_recipes_on_cpu.py.
#
# Data:    python recipes/prepare_data.py opencoder --out ~/data/opencoder
# Memory:  actor and critic 16 bytes a parameter in fp32 with Adam, over 8 GPUs: 6 GB each for 3B.
# Overlap: inter-step; code has a long tail of lengths.
# Expect:  the paper reports 2.4x less time to the same reward than TRL for 3B; it has no figure against verl.
set -euo pipefail

TRAINER_MODE="${TRAINER_MODE:-oppo}" # oppo, sync or colocate_async
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
RECIPES="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
DATA_DIR="${DATA_DIR:-$HOME/data/opencoder}"

DATA=(
    data.train_files="$DATA_DIR/train.parquet"
    data.val_files="$DATA_DIR/test.parquet"
    data.train_batch_size=128
    data.max_prompt_length=1024
    data.max_response_length=2048
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
REWARD=(
    reward.custom_reward_function.path="$RECIPES/opencoder_reward.py"
    reward.custom_reward_function.name=compute_score
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
    trainer.experiment_name="opencoder_3b_ppo_$TRAINER_MODE"
)

python3 -m verl_oppo.main_ppo \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${CRITIC[@]}" "${REWARD[@]}" "${OFF_POLICY[@]}" "${OPPO[@]}" \
    "${TRAINER[@]}" "$@"
