#!/usr/bin/env bash
# Free-form generation on two nodes of four GPUs of 80 GB: PPO with a reward model on Stack-Exchange questions, FSDP.
# Start Ray on both nodes first (ray start --head, ray start --address=...), then this script on the first one.
# Not run here: no GPU. The configuration is checked by tests/test_recipes_on_cpu.py.
#
# Data:    python recipes/prepare_data.py stack_exchange --out DIR, DIR on a file system that both nodes see
# Memory:  3 GPUs of each node generate and train (16 bytes a parameter over 6 GPUs: 20 GB each for actor and critic of
#          7B), 1 of each scores.
# Expect:  the paper reports 4.5x less time a step than TRL on such nodes; it has no figure against verl.
set -euo pipefail

TRAINER_MODE="${TRAINER_MODE:-oppo}" # oppo, sync or colocate_async
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"
REWARD_MODEL_PATH="${REWARD_MODEL_PATH:-Skywork/Skywork-Reward-V2-Qwen3-4B}" # with a scalar head
DATA_DIR="${DATA_DIR:-$HOME/data/stack_exchange}"

# verl 0.9.1 trains with a classifier in a pool of its own in no stock mode (verl#7368): there it shares all GPUs.
case "$TRAINER_MODE" in
oppo) NUM_GPUS=3 REWARD_POOL=True ;;
*) NUM_GPUS=4 REWARD_POOL=False ;;
esac

DATA=(
    data.train_files="$DATA_DIR/train.parquet"
    data.val_files="$DATA_DIR/test.parquet"
    data.train_batch_size=96
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
    actor_rollout_ref.actor.ppo_mini_batch_size=96
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
    reward.reward_model.enable=True
    reward.reward_model.model_path="$REWARD_MODEL_PATH"
    reward.reward_model.enable_resource_pool="$REWARD_POOL"
    reward.reward_model.n_gpus_per_node=1
    reward.reward_model.nnodes=2
    reward.reward_model.rollout.name=vllm
    reward.reward_model.rollout.tensor_model_parallel_size=1
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
    trainer.v1.oppo.intra_step.reward=auto
    trainer.v1.oppo.intra_step.chunk_size=auto
)
TRAINER=(
    trainer.v1.trainer_mode="$TRAINER_MODE"
    trainer.n_gpus_per_node="$NUM_GPUS"
    trainer.nnodes=2
    trainer.total_training_steps=600
    trainer.test_freq=50
    trainer.save_freq=100
    trainer.project_name=verl_oppo
    trainer.experiment_name="stack-exchange_7b_ppo_2x4_$TRAINER_MODE"
)

python3 -m verl_oppo.main_ppo \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${CRITIC[@]}" "${REWARD[@]}" "${OFF_POLICY[@]}" "${OPPO[@]}" \
    "${TRAINER[@]}" "$@"
