"""The support matrix: what trainer mode `oppo` refuses at start, each with its reason.

Called by the entry before Ray starts and by `PPOTrainerOppo` again inside its actor. It reads verl's resolved config;
the values of `trainer.v1.oppo.*` themselves are checked in `config.schema`.
"""

import logging

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.import_utils import load_class_from_fqn

from verl_oppo.algorithms.registry import load_algorithm
from verl_oppo.config.schema import OppoConfig

logger = logging.getLogger(__name__)

AGENT_LOOP_MANAGER = "verl_oppo.rollout.agent_loop.AgentLoopManagerOppo"
ROLLOUT_ENGINES = ("vllm", "sglang")
FLOAT32 = ("fp32", "float32", "float")


def load_oppo_config(config: DictConfig) -> OppoConfig:
    """Build `OppoConfig` from `trainer.v1.oppo` and refuse what the design does not support.

    The preset of the algorithm has been applied (`apply_algorithm_preset`).

    Raises:
        ValueError: names the key, the value received and what is allowed.
    """
    oppo = read_oppo_section(config)
    oppo.check_batch(config.data.train_batch_size)
    _check_trainer(config)
    _check_rollout(config, oppo)
    _check_staleness(config, oppo)
    _check_streamed_engines(config, oppo)
    load_algorithm(oppo).check(config)
    return oppo


def apply_algorithm_preset(config: DictConfig) -> None:
    """Set in place what the algorithm named in `trainer.v1.oppo.algorithm` needs of verl's config.

    Raises:
        ValueError: names the key, the value received and what is allowed.
    """
    load_algorithm(read_oppo_section(config)).apply_preset(config)


def read_oppo_section(config: DictConfig) -> OppoConfig:
    """Build `OppoConfig` from `trainer.v1.oppo` alone.

    Raises:
        ValueError: names the key, the value received and what is allowed.
    """
    section = OmegaConf.to_container(config.trainer.v1.get("oppo", None) or OmegaConf.create({}), resolve=True)
    sync_step = section.pop("parameter_sync_step", 1)
    if sync_step != 1:
        raise ValueError(f"trainer.v1.oppo.parameter_sync_step is {sync_step}; allowed: 1, one weight sync a step")
    return OppoConfig.from_mapping(section)


def _check_trainer(config: DictConfig) -> None:
    if not config.trainer.use_v1:
        raise ValueError("trainer.use_v1 is False; allowed with trainer.v1.trainer_mode=oppo: True")
    sampler = config.trainer.v1.sampler.get("custom_sampler", None)
    if sampler is not None and sampler.get("path") and sampler.get("name"):
        raise ValueError(
            f"trainer.v1.sampler.custom_sampler is {sampler.path}:{sampler.name}; allowed with oppo: none. Subclass "
            "verl_oppo.trainer.replay_buffer.OppoReplayBuffer and PPOTrainerOppo._build_replay_buffer instead"
        )


def _check_rollout(config: DictConfig, oppo: OppoConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name not in ROLLOUT_ENGINES:
        raise ValueError(f"actor_rollout_ref.rollout.name is {rollout.name!r}; allowed with oppo: {ROLLOUT_ENGINES}")
    if rollout.get("disaggregation", None) is not None and rollout.disaggregation.enabled:
        raise ValueError(
            "actor_rollout_ref.rollout.disaggregation.enabled is True; allowed with oppo: False, since prefill/decode "
            "disaggregation bypasses verl's replica registry"
        )
    num_workers = rollout.agent.num_workers
    if oppo.inter_step.max_inflight_per_replica < num_workers:
        raise ValueError(
            "trainer.v1.oppo.inter_step.max_inflight_per_replica is "
            f"{oppo.inter_step.max_inflight_per_replica}; allowed: at least actor_rollout_ref.rollout.agent.num_workers"
            f" ({num_workers}), since each agent loop worker needs one request"
        )
    manager = rollout.agent.get("agent_loop_manager_class", None)
    if manager and not issubclass(
        load_class_from_fqn(manager, "AgentLoopManager"), load_class_from_fqn(AGENT_LOOP_MANAGER, "AgentLoopManager")
    ):
        raise ValueError(
            f"actor_rollout_ref.rollout.agent.agent_loop_manager_class is {manager}; allowed with oppo: null or a "
            f"subclass of {AGENT_LOOP_MANAGER}"
        )


def _check_staleness(config: DictConfig, oppo: OppoConfig) -> None:
    rollout, inter_step = config.actor_rollout_ref.rollout, oppo.inter_step.effective
    sampler = config.trainer.v1.sampler
    threshold, strategy = sampler.max_off_policy_threshold, sampler.max_off_policy_strategy
    if threshold is not None and strategy == "drop" and inter_step.max_deferrals + 1 > threshold:
        raise ValueError(
            f"trainer.v1.oppo.inter_step.max_deferrals is {inter_step.max_deferrals}; allowed: at most "
            f"{threshold - 1}, since verl drops finished groups that span more than "
            f"trainer.v1.sampler.max_off_policy_threshold ({threshold}) model versions"
        )
    if rollout.full_determinism and (inter_step.delta_max > 0 or oppo.intra_step.enable):
        raise ValueError(
            "actor_rollout_ref.rollout.full_determinism is True; allowed with oppo only together with "
            "trainer.v1.oppo.inter_step.enable=False and trainer.v1.oppo.intra_step.enable=False: which prompts finish "
            "first and what is cached are not reproducible bit by bit"
        )
    correction = config.algorithm.get("rollout_correction", None)
    wants_correction = correction is not None and (correction.get("rollout_is") or correction.get("rollout_rs"))
    if wants_correction and not rollout.calculate_log_probs:
        raise ValueError(
            "actor_rollout_ref.rollout.calculate_log_probs is False; allowed with algorithm.rollout_correction."
            "rollout_is or rollout_rs: True, without the rollout's log-probs verl skips the correction silently"
        )
    if config.skip.rollout_tq.enable and inter_step.delta_max > 0:
        raise ValueError(
            "skip.rollout_tq.enable is True; allowed with oppo only for delta 0 "
            "(trainer.v1.oppo.inter_step.enable=False): verl replays whole batches of train_batch_size prompts"
        )


def _check_streamed_engines(config: DictConfig, oppo: OppoConfig) -> None:
    """Refuses streaming into a Megatron engine that cannot take it; without streaming the same engine trains."""
    intra_step = oppo.intra_step
    if not intra_step.enable:
        return
    if intra_step.critic and need_critic(config) and config.critic.strategy == "megatron":
        # Not at the top: the driver imports this module, and needs verl's engines for nothing else.
        from verl_oppo.scoring import support

        obstacle = support.megatron_obstacle(config.critic.megatron)
        if obstacle is not None:
            name, value, allowed = obstacle
            raise ValueError(
                f"critic.megatron.{name} is {value}; allowed with trainer.v1.oppo.intra_step.critic=True: {allowed}"
            )
    if intra_step.reference and need_reference_policy(config):
        strategy = config.actor_rollout_ref.actor.strategy
        if strategy == "megatron":
            raise ValueError(
                "trainer.v1.oppo.intra_step.reference is True with actor_rollout_ref.actor.strategy megatron; allowed: "
                "False, since log-probs over a vocabulary that is split between ranks do not stream, or fsdp, fsdp2"
            )


def computes_in_float32(config: DictConfig, name: str) -> bool:
    """Whether the engine of a streamed scorer (reward, critic, reference) computes its forwards in float32."""
    if name == "reward":
        return config.reward.reward_model.rollout.dtype in FLOAT32
    engine_owner = config.critic if name == "critic" else config.actor_rollout_ref.actor
    if engine_owner.strategy == "megatron":
        return False  # verl's Megatron engine computes in bfloat16 or float16
    engine = config.critic.fsdp if name == "critic" else config.actor_rollout_ref.ref.fsdp_config
    precision = engine.get("mixed_precision", None) or {}
    return precision.get("param_dtype", "bf16") in FLOAT32
