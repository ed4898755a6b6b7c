"""The real runs that the e2e tests look at: what each is started with, and which one it needs first.

Read by the fixture `runs` (conftest.py), which runs two at a time: start-up is mostly imports, one process after the
other, so a second run beside the first costs little. No verl in this process.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from e2e_runs import Run, train

BATCH_SIZE = 16
MAX_RESPONSE = 160
NUM_STEPS, RESUMED_FROM, RESUMED_STEPS, VALIDATE_EVERY = 4, 2, 5, 2
REPLAYED_STEPS = 2
NUM_GROUPS, GROUP_SIZE, GROUP_STEPS = 8, 2, 4
DPO_PROMPTS, DPO_RESPONSES, DPO_STEPS = 6, 3, 3

RECORDED = ("trainer.save_freq=1", "trainer.checkpoint_callback_class=e2e_recorder.Recorder")
# Half of the demo's: a tail of three times the mean is enough to carry prompts, and takes half the time.
SHORT = f"data.max_response_length={MAX_RESPONSE}"
OPPO = (
    *RECORDED,
    SHORT,
    f"trainer.test_freq={VALIDATE_EVERY}",
    "data.val_max_samples=16",
    # Colocated, so that validation runs while reward model and critic share the actor's devices.
    "reward.reward_model.enable_resource_pool=false",
    "trainer.v1.oppo.inter_step.delta_init=6",
    "trainer.v1.oppo.intra_step.reward=fsdp",
    "trainer.v1.oppo.intra_step.critic=true",
    "trainer.v1.oppo.intra_step.reference=true",
    "trainer.v1.oppo.intra_step.chunk_size=16",
    "trainer.v1.oppo.intra_step.verify=2",
)
OFF = ("trainer.v1.oppo.inter_step.enable=false", "trainer.v1.oppo.intra_step.enable=false")
ACTOR = "actor_rollout_ref.actor"
SHUFFLED = (f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", f"{ACTOR}.shuffle=true")


@dataclass(frozen=True)
class Spec:
    """One run. `module`: the test module it is for; `after`: the run whose folder it needs finished."""

    name: str
    module: str
    start: Callable[[Path], Run]
    after: str | None = None


def first(folder: Path) -> Run:
    return train(folder / "oppo", [f"trainer.total_training_steps={NUM_STEPS}", *OPPO])


def resumed(folder: Path) -> Run:
    """The first run's checkpoint from its middle, when prompts were in flight, as after a crash."""
    shutil.copytree(folder / "oppo" / "checkpoints", folder / "resumed" / "checkpoints")
    checkpoint = folder / "resumed" / "checkpoints" / f"global_step_{RESUMED_FROM}"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    return train(folder / "resumed", [f"trainer.total_training_steps={RESUMED_STEPS}", *resume, *OPPO])


def groups(folder: Path) -> Run:
    return train(
        folder / "groups",
        [
            *RECORDED,
            SHORT,
            f"trainer.total_training_steps={GROUP_STEPS}",
            f"data.train_batch_size={NUM_GROUPS}",
            f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_GROUPS}",
            "algorithm.adv_estimator=grpo",
            "algorithm.filter_groups.enable=true",
            "trainer.v1.oppo.intra_step.reward=fsdp",
            "trainer.v1.oppo.intra_step.chunk_size=16",
            "trainer.v1.oppo.intra_step.verify=2",
            "trainer.v1.oppo.inter_step.delta_init=3",
        ],
    )


def online_dpo(folder: Path) -> Run:
    """Six pairs of 18 rows a step; with minibatches of four pairs, each step pads by two."""
    return train(
        folder / "online_dpo",
        [
            *RECORDED,
            SHORT,
            f"trainer.total_training_steps={DPO_STEPS}",
            f"data.train_batch_size={DPO_PROMPTS}",
            f"actor_rollout_ref.rollout.n={DPO_RESPONSES}",
            f"{ACTOR}.ppo_mini_batch_size=4",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
            # verl pads the scoring passes to minibatches of rows, 12 here, and cuts them into these.
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=12",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=12",
            "trainer.v1.oppo.algorithm=online_dpo",
            "trainer.v1.oppo.inter_step.delta_init=3",
            "trainer.v1.oppo.intra_step.reward=vllm",
            "trainer.v1.oppo.intra_step.reference=true",
            "trainer.v1.oppo.intra_step.verify=2",
        ],
    )


def replay_overrides(folder: Path) -> list[str]:
    """Rollouts cached by verl itself, and a colocated reward model, which verl scores with after sampling."""
    return [
        *RECORDED,
        SHORT,
        f"trainer.total_training_steps={REPLAYED_STEPS}",
        "data.shuffle=false",
        "reward.reward_model.enable_resource_pool=false",
        "skip.rollout_tq.enable=true",
        f"skip.rollout_tq.dump_dir={folder}/rollouts",
        f"skip.rollout_tq.steps=[{','.join(map(str, range(1, REPLAYED_STEPS + 1)))}]",
    ]


def stock(folder: Path) -> Run:
    """`python -m verl.trainer.main_ppo` on the resolved config: nothing of ours but the CPU platform."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf, open_dict

    import verl_oppo.main_ppo  # noqa: F401  Registers the resolver of the demo's assets.
    from verl_oppo.platform import cpu

    with initialize_config_module("verl_oppo.config", version_base=None):
        config = compose("oppo_cpu", [*replay_overrides(folder), "trainer.v1.trainer_mode=sync"])
    with open_dict(config):
        del config.trainer.v1["oppo"]
        del config["emulate"]
    OmegaConf.save(OmegaConf.create(OmegaConf.to_container(config, resolve=True)), folder / "stock.yaml")
    run = train(
        folder / "stock",
        [],
        module="verl.trainer.main_ppo",
        config=("--config-path", str(folder), "--config-name", "stock"),
        env=cpu.cpu_environment(),
    )
    for cache in (folder / "rollouts").glob("*/GBS16_*"):
        # verl names the cache after the data loader's fetch size, which is 1 in every mode but sync.
        shutil.copytree(cache, cache.with_name(cache.name.replace("GBS16_", "GBS1_")))
    return run


def ours_sync(folder: Path) -> Run:
    return train(folder / "sync", [*replay_overrides(folder), "trainer.v1.trainer_mode=sync"])


def oppo_off(folder: Path) -> Run:
    return train(folder / "off", [*replay_overrides(folder), *OFF])


def oppo_shuffled(folder: Path) -> Run:
    """Two shuffled minibatches a step."""
    return train(folder / "shuffled", [*replay_overrides(folder), *OFF, *SHUFFLED, "trainer.total_training_steps=1"])


# Independent runs first: a worker that waits for another run's folder does nothing else meanwhile.
SPECS = (
    Spec("first", "test_oppo_run", first),
    Spec("stock", "test_off_means_off", stock),
    Spec("groups", "test_groups_run", groups),
    Spec("online_dpo", "test_online_dpo_run", online_dpo),
    Spec("resumed", "test_oppo_run", resumed, after="first"),
    Spec("ours_sync", "test_off_means_off", ours_sync, after="stock"),
    Spec("oppo_off", "test_off_means_off", oppo_off, after="stock"),
    Spec("oppo_shuffled", "test_off_means_off", oppo_shuffled, after="stock"),
)
