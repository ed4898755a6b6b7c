#!/usr/bin/env bash
# Online DPO on Stack-Exchange questions: two answers a prompt, the reward model prefers one. FSDP, 8 GPUs of 80 GB.
# Not run here: no GPU. The configuration is checked by tests/test_recipes_on_cpu.py; a small twin runs in tests/e2e.
#
# Data:    python recipes/prepare_data.py stack_exchange --out ~/data/stack_exchange
# Memory:  no critic: 16 bytes a parameter for the actor over 7 GPUs (17 GB each for 7B); the eighth GPU scores.
# Modes:   trainer mode oppo only, stock modes of verl have no online DPO. The synchronous baseline is
#          trainer.v1.oppo.inter_step.enable=False trainer.v1.oppo.intra_step.enable=False.
# Expect:  rewards/accuracies above 0.5 and rising, oppo/dpo/margin_stale_mean near margin_fresh_mean.
set -euo pipefail

TRAINER_MODE="${TRAINER_MODE:-oppo}" # oppo only
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"
REWARD_MODEL_PATH="${REWARD_MODEL_PATH:-Skywork/Skywork-Reward-V2-Qwen3-4B}" # with a scalar head
DATA_DIR="${DATA_DIR:-$HOME/data/stack_exchange}"

DATA=(
    data.train_files="$DATA_DIR/train.parquet"
    data.val_files="$DATA_DIR/test.parquet"
    data.train_batch_size=112
    data.max_prompt_length=1024
    data.max_response_length=2048
    data.filter_overlong_prompts=True
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=5e-7
    actor_rollout_ref.actor.ppo_mini_batch_size=112
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.rollout.n=2
)
REWARD=(
    reward.reward_model.enable=True
    reward.reward_model.model_path="$REWARD_MODEL_PATH"
    reward.reward_model.enable_resource_pool=True
    reward.reward_model.n_gpus_per_node=1
    reward.reward_model.nnodes=1
    reward.reward_model.rollout.name=vllm
    reward.reward_model.rollout.tensor_model_parallel_size=1
)
# The DPO loss has no importance weight; with these the metrics rollout_corr/* show how far carried tokens are off.
OFF_POLICY=(
    actor_rollout_ref.rollout.calculate_log_probs=True
    algorithm.rollout_correction.rollout_is=token
    algorithm.rollout_correction.rollout_is_threshold=2.0
)
OPPO=(
    trainer.v1.oppo.algorithm=online_dpo
    trainer.v1.oppo.online_dpo.beta=0.1
    trainer.v1.oppo.inter_step.delta_init=8
    trainer.v1.oppo.inter_step.delta_max=32
    trainer.v1.oppo.intra_step.reward=auto
    trainer.v1.oppo.intra_step.chunk_size=auto
)
TRAINER=(
    trainer.v1.trainer_mode="$TRAINER_MODE"
    trainer.n_gpus_per_node=7
    trainer.nnodes=1
    trainer.total_training_steps=600
    trainer.test_freq=50
    trainer.save_freq=100
    trainer.project_name=verl_oppo
    trainer.experiment_name="stack-exchange_7b_online-dpo_$TRAINER_MODE"
)

python3 -m verl_oppo.main_ppo \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${OFF_POLICY[@]}" "${OPPO[@]}" \
    "${TRAINER[@]}" "$@"
