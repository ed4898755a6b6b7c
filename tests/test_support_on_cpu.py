"""The support matrix on the composed configuration: every refusal names key, value and what is allowed."""

import logging

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync

from verl_oppo.rollout.agent_loop import AgentLoopManagerOppo
from verl_oppo.trainer.ppo_trainer import PPOTrainerOppo
from verl_oppo.trainer.support import AGENT_LOOP_MANAGER, computes_in_float32, load_oppo_config

pytestmark = pytest.mark.timeout(300)

OPPO = "trainer.v1.oppo"
ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.name=vllm"
INTER_OFF = f"{OPPO}.inter_step.enable=false"
INTRA_OFF = f"{OPPO}.intra_step.enable=false"


class AgentLoopManagerOfARecipe(AgentLoopManagerOppo):
    """What a recipe may bring along."""


MEGATRON_CRITIC = ["model_engine=megatron", f"{OPPO}.intra_step.critic=true"]

# Overrides; then what the message must hold: key, value received, what is allowed.
REFUSED = {
    "legacy trainer": (["trainer.use_v1=false"], "trainer.use_v1", "is False", "True"),
    "several weight syncs": ([f"+{OPPO}.parameter_sync_step=2"], f"{OPPO}.parameter_sync_step", "is 2", "allowed: 1"),
    "custom sampler": (
        [f"trainer.v1.sampler.custom_sampler.{key}" for key in ("path=pkg://my.sampler", "name=MySampler")],
        "trainer.v1.sampler.custom_sampler",
        "is pkg://my.sampler:MySampler",
        "none. Subclass verl_oppo.trainer.replay_buffer.OppoReplayBuffer and PPOTrainerOppo._build_replay_buffer",
    ),
    "another engine": ([f"{ROLLOUT}.name=trtllm"], f"{ROLLOUT}.name", "is 'trtllm'", "('vllm', 'sglang')"),
    "disaggregation": (
        [f"{ROLLOUT}.disaggregation.enabled=true"],
        f"{ROLLOUT}.disaggregation.enabled",
        "is True",
        "allowed with oppo: False",
    ),
    "fewer slots than workers": (
        [f"{OPPO}.inter_step.max_inflight_per_replica=7"],
        f"{OPPO}.inter_step.max_inflight_per_replica",
        "is 7",
        f"at least {ROLLOUT}.agent.num_workers (8)",
    ),
    "a manager that is not ours": (
        [f"+{ROLLOUT}.agent.agent_loop_manager_class=verl.trainer.ppo.v1.AgentLoopManagerTQ"],
        f"{ROLLOUT}.agent.agent_loop_manager_class",
        "is verl.trainer.ppo.v1.AgentLoopManagerTQ",
        f"null or a subclass of {AGENT_LOOP_MANAGER}",
    ),
    "deferral beyond verl's threshold": (
        [f"{OPPO}.inter_step.max_deferrals=8"],
        f"{OPPO}.inter_step.max_deferrals",
        "is 8",
        "at most 7, since verl drops finished groups that span more than "
        "trainer.v1.sampler.max_off_policy_threshold (8)",
    ),
    "a threshold below the default bound": (
        ["trainer.v1.sampler.max_off_policy_threshold=4"],
        f"{OPPO}.inter_step.max_deferrals",
        "is 4",
        "at most 3",
    ),
    "determinism with deferral": (
        [f"{ROLLOUT}.full_determinism=true", INTRA_OFF],
        f"{ROLLOUT}.full_determinism",
        "is True",
        f"only together with {OPPO}.inter_step.enable=False and {OPPO}.intra_step.enable=False",
    ),
    "determinism with streaming": (
        [f"{ROLLOUT}.full_determinism=true", INTER_OFF],
        f"{ROLLOUT}.full_determinism",
        "is True",
        f"only together with {OPPO}.inter_step.enable=False and {OPPO}.intra_step.enable=False",
    ),
    "importance sampling without log-probs": (
        ["algorithm.rollout_correction.rollout_is=token", f"{ROLLOUT}.calculate_log_probs=false"],
        f"{ROLLOUT}.calculate_log_probs",
        "is False",
        "rollout_is or rollout_rs: True",
    ),
    "rejection sampling without log-probs": (
        ["algorithm.rollout_correction.rollout_rs=token_k1", f"{ROLLOUT}.calculate_log_probs=false"],
        f"{ROLLOUT}.calculate_log_probs",
        "is False",
        "rollout_is or rollout_rs: True",
    ),
    "cached rollouts with deferral": (
        ["skip.rollout_tq.enable=true"],
        "skip.rollout_tq.enable",
        "is True",
        f"only for delta 0 ({OPPO}.inter_step.enable=False)",
    ),
    "delta beyond the deferral bound": (
        ["data.train_batch_size=2", f"{OPPO}.inter_step.max_deferrals=7"],
        f"{OPPO}.inter_step.delta_max",
        "is 16",
        "0 to 14 = data.train_batch_size (2) x max_deferrals (7)",
    ),
    "streaming to a critic on pipeline stages": (
        [*MEGATRON_CRITIC, "critic.megatron.pipeline_model_parallel_size=2"],
        "critic.megatron.pipeline_model_parallel_size",
        "is 2",
        f"with {OPPO}.intra_step.critic=True: 1, since a rank holds only some of the layers; without streaming",
    ),
    "streaming to a critic on virtual pipeline stages": (
        [*MEGATRON_CRITIC, "critic.megatron.virtual_pipeline_model_parallel_size=2"],
        "critic.megatron.virtual_pipeline_model_parallel_size",
        "is 2",
        f"with {OPPO}.intra_step.critic=True: None, since a rank holds several pieces of the layers",
    ),
    "streaming to a context-parallel critic": (
        [*MEGATRON_CRITIC, "critic.megatron.context_parallel_size=2"],
        "critic.megatron.context_parallel_size",
        "is 2",
        f"with {OPPO}.intra_step.critic=True: 1, since a rank sees only part of every sequence",
    ),
    "streaming to a sequence-parallel critic": (
        [*MEGATRON_CRITIC, "critic.megatron.tensor_model_parallel_size=2"],
        "critic.megatron.sequence_parallel",
        "is True",
        f"with {OPPO}.intra_step.critic=True: False, since a rank sees only part of every chunk",
    ),
    "streaming to a Megatron reference": (
        ["model_engine=megatron", f"{OPPO}.intra_step.reference=true", "actor_rollout_ref.actor.use_kl_loss=true"],
        f"{OPPO}.intra_step.reference",
        "is True",
        "False, since log-probs over a vocabulary that is split between ranks do not stream",
    ),
    "a bad value": (
        [f"{OPPO}.inter_step.delta_min=-1"],
        f"{OPPO}.inter_step.delta_min",
        "is -1",
        "a whole number of 0 or more",
    ),
    "an unknown key": (
        [f"+{OPPO}.inter_step.delta=3"],
        f"{OPPO}.inter_step.delta",
        "is not a key of OPPO",
        "delta_init",
    ),
}

SUPPORTED = {
    "defaults": [],
    "streaming to a Megatron critic": MEGATRON_CRITIC,
    "streaming to a tensor-parallel Megatron critic": [
        *MEGATRON_CRITIC,
        "critic.megatron.tensor_model_parallel_size=2",
        "critic.megatron.sequence_parallel=false",
    ],
    "pipeline stages without streaming": ["model_engine=megatron", "critic.megatron.pipeline_model_parallel_size=2"],
    "pipeline stages with streaming switched off": [
        *MEGATRON_CRITIC,
        INTRA_OFF,
        "critic.megatron.pipeline_model_parallel_size=2",
    ],
    "another algorithm": ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8"],
    "fsdp2": ["actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp2"],
    "megatron": ["model_engine=megatron"],
    "replicas, tensor parallel": ["trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=2"],
    "packing": [
        "actor_rollout_ref.model.use_remove_padding=true",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "trainer.balance_batch=true",
    ],
    "KL in reward": ["algorithm.use_kl_in_reward=true"],
    "KL in loss": ["actor_rollout_ref.actor.use_kl_loss=true"],
    "temperature": [f"{ROLLOUT}.temperature=0.7"],
    "critic warm-up": ["trainer.critic_warmup=10"],
    "DAPO": ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward"],
    "multi-turn": [f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.agent.default_agent_loop=tool_agent"],
    "custom reward": ["reward.custom_reward_function.path=pkg://my.reward"],
    "LoRA": ["actor_rollout_ref.model.lora_rank=32"],
    "SGLang": [f"{ROLLOUT}.name=sglang"],
    "a recipe's manager": [f"+{ROLLOUT}.agent.agent_loop_manager_class={__name__}.AgentLoopManagerOfARecipe"],
    "our manager by name": [f"+{ROLLOUT}.agent.agent_loop_manager_class={AGENT_LOOP_MANAGER}"],
    "as many deferrals as fit": [f"{OPPO}.inter_step.max_deferrals=7"],
    "no threshold": [
        "trainer.v1.sampler.max_off_policy_threshold=null",
        f"{OPPO}.inter_step.max_deferrals=20",
    ],
    "waiting instead of dropping": [
        "trainer.v1.sampler.max_off_policy_strategy=wait",
        f"{OPPO}.inter_step.max_deferrals=20",
    ],
    "determinism with all off": [f"{ROLLOUT}.full_determinism=true", INTER_OFF, INTRA_OFF],
    "correction with log-probs": [
        "algorithm.rollout_correction.rollout_is=token",
        f"{ROLLOUT}.calculate_log_probs=true",
    ],
    "cached rollouts without deferral": ["skip.rollout_tq.enable=true", INTER_OFF],
    "a small batch without deferral": ["data.train_batch_size=2", INTER_OFF],
    "one weight sync": [f"+{OPPO}.parameter_sync_step=1"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_with_the_reason(compose_config, case):
    overrides, key, value, allowed = REFUSED[case]
    config = compose_config(VLLM, *overrides)
    with pytest.raises(ValueError) as refused:
        load_oppo_config(config)
    message = str(refused.value)
    assert message.startswith(f"{key} {value}")
    assert "allowed" in message
    assert allowed in message


@pytest.mark.parametrize("case", SUPPORTED)
def test_what_is_supported_passes(compose_config, case):
    config = compose_config(VLLM, *SUPPORTED[case])
    oppo = load_oppo_config(config)
    assert oppo.inter_step.effective.delta_max == (0 if INTER_OFF in SUPPORTED[case] else 16)


def test_the_demos_config_passes(compose_config):
    assert load_oppo_config(compose_config(config_name="oppo_cpu")).inter_step.enable


def test_a_config_without_the_section_has_the_defaults(compose_config):
    assert load_oppo_config(compose_config(VLLM, f"~{OPPO}")) == load_oppo_config(compose_config(VLLM))


@pytest.mark.parametrize(("num_rows", "warns"), [(20, False), (19, True)])
def test_more_prompts_in_flight_than_the_data_set_holds_is_a_warning(
    compose_config, monkeypatch, caplog, num_rows, warns
):
    config = compose_config(VLLM, "data.train_batch_size=4")
    trainer = object.__new__(PPOTrainerOppo)
    trainer.config, trainer.oppo = config, load_oppo_config(config)
    # verl's own part reads files and needs a tokenizer.
    monkeypatch.setattr(
        PPOTrainerColocateAsync, "_init_dataloader", lambda self: setattr(self, "train_dataset", range(num_rows))
    )
    with caplog.at_level(logging.WARNING, logger="verl_oppo"):
        trainer._init_dataloader()
    assert ("the same prompt can be in flight twice" in caplog.text) == warns
    if warns:
        assert "is 20 prompts, the data set has 19" in caplog.text


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("reward", ["reward.reward_model.rollout.dtype=float32"], True),
        ("reward", ["reward.reward_model.rollout.dtype=bfloat16"], False),
        ("critic", ["+critic.fsdp.mixed_precision.param_dtype=fp32"], True),
        ("critic", [], False),
        ("reference", ["+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32"], True),
        ("reference", [], False),
        ("critic", ["model_engine=megatron"], False),
        ("reference", ["model_engine=megatron"], False),
    ],
)
def test_the_precision_of_a_scorer_is_its_engines(compose_config, name, overrides, expected):
    config = compose_config(VLLM, *overrides)
    OmegaConf.resolve(config.reward)
    assert computes_in_float32(config, name) == expected
