"""Every arm under every preset composes with verl's config and our schema, and states the knobs that it is for."""

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import verl_oppo.main_ppo  # noqa: F401  Registers the resolvers of the demo's assets.
from verl_oppo.benchmark import convergence
from verl_oppo.benchmark.arms import COLOCATED, FOLDER, LAYOUTS, Preset, presets, read_arguments, replay_arguments
from verl_oppo.benchmark.samplers import poll_interval_of
from verl_oppo.config.schema import OppoConfig


def composed(preset: Preset, arm: str, *more: str):
    arguments = [*preset.arguments(arm), *more]
    named = [argument for argument in arguments if argument.startswith("--config-name=")]
    assert len(named) == 1
    with initialize_config_module("verl_oppo.config", version_base=None):
        return compose(named[0].partition("=")[2], [one for one in arguments if not one.startswith("--")])


CASES = [("cpu", arm) for arm in LAYOUTS]
CASES += [(preset, arm) for preset in presets() if preset != "cpu" for arm in ("sync_fast_poll", "oppo")]


@pytest.mark.parametrize(("preset", "arm"), CASES)
def test_an_arm_composes(preset, arm, tmp_path):
    preset = Preset.load(preset)
    config = composed(preset, arm, *replay_arguments(tmp_path / "it's work.parquet", seed=3))
    mode = config.trainer.v1.trainer_mode
    assert mode == ("oppo" if arm.startswith(("oppo", "inter", "intra")) else arm.removesuffix("_fast_poll"))
    assert config.trainer.total_training_steps == preset.steps
    assert config.data.train_batch_size == preset.batch_size
    assert config.reward.reward_model.enable_resource_pool == (LAYOUTS[arm] != COLOCATED)
    assert config.data.train_files == str(tmp_path / "it's work.parquet")
    oppo = OppoConfig.from_mapping(OmegaConf.to_container(config.trainer.v1.oppo, resolve=True))
    oppo.check_batch(config.data.train_batch_size)
    assert oppo.inter_step.effective.delta_max <= preset.surplus_prompts
    surplus = config.trainer.v1.colocate_async.num_warmup_batches * preset.batch_size
    assert preset.name == "convergence" or surplus == oppo.inter_step.delta_init
    assert config.trainer.v1.sampler.max_off_policy_threshold == oppo.inter_step.max_deferrals + 1
    if arm.endswith("fast_poll"):
        assert poll_interval_of(config.trainer.v1.sampler.sampler_kwargs) == 0.05


@pytest.mark.parametrize("name", [name for name in presets() if name != convergence.PRESET])
def test_the_longest_response_of_a_preset_fits_its_config(name):
    preset = Preset.load(name)
    config = composed(preset, "oppo")
    assert all(preset.lengths(work).maximum <= config.data.max_response_length for work in preset.work)


def test_cpu_raw_is_cpu_without_emulation():
    cpu, raw = composed(Preset.load("cpu"), "oppo"), composed(Preset.load("cpu_raw"), "oppo")
    assert cpu.emulate.enable and not raw.emulate.enable
    plain = [OmegaConf.to_container(config, resolve=False) for config in (cpu, raw)]
    assert plain[0].pop("emulate") != plain[1].pop("emulate")
    assert plain[0] == plain[1]


def test_the_presets_of_emulation_agree_with_the_cost_model():
    emulated = composed(Preset.load("cpu"), "oppo").emulate
    assert Preset.load("cpu").reward_load == emulated.actor_devices_per_reward_device


def test_convergence_arms_differ_in_seed_and_learning_rate_only(tmp_path):
    preset = Preset.load(convergence.PRESET)
    specs = convergence.plan(preset, tmp_path, convergence.ARMS, seeds=[1, 2], overrides=[])
    assert [(spec.arm, spec.repeat) for spec in specs] == [
        (arm, seed) for seed in (1, 2) for arm in ("sync_fast_poll", "oppo", "oppo_lr0")
    ]
    oppo, null = (set(spec.arguments) for spec in specs[1:3])
    assert null - oppo == set(convergence.NULL_ARGUMENTS) and oppo <= null
    [null] = convergence.plan(preset, tmp_path, ["oppo_lr0"], [1], ["actor_rollout_ref.actor.optim.lr=1e-3"])
    assert null.arguments[-2:] == convergence.NULL_ARGUMENTS, "whatever rate the others get"
    assert convergence.plan(preset, tmp_path, ["oppo_lr0", "sync_fast_poll"], [2], []) == [specs[5], specs[3]]
    with pytest.raises(ValueError, match="arm is 'intra'; allowed with --convergence: sync_fast_poll, oppo, oppo_lr0"):
        convergence.plan(preset, tmp_path, ["oppo", "intra"], [1], [])


def test_included_files_and_comments(tmp_path):
    (tmp_path / "a.txt").write_text("# why\n\na=1\n  -r b.txt\n")
    (tmp_path / "b.txt").write_text("b=2\n")
    assert read_arguments(tmp_path / "a.txt") == ["a=1", "b=2"]
    with pytest.raises(ValueError, match="does not exist"):
        read_arguments(tmp_path / "c.txt")


def test_every_file_of_an_arm_is_listed():
    assert {path.stem for path in (FOLDER / "arms").glob("*.txt")} == set(LAYOUTS)


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="preset is 'tpu'"):
        Preset.load("tpu")
    with pytest.raises(ValueError, match="arm is 'fast'"):
        Preset.load("cpu").arguments("fast")
    with pytest.raises(ValueError, match="fewer than"):
        Preset.load("cpu").with_steps(3)
    with pytest.raises(ValueError, match="poll_interval"):
        poll_interval_of({"poll_interval": 0})
