"""Every recipe composes and validates in every trainer mode it has, a typo fails, data and rewards are right."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hydra.errors import ConfigCompositionException

from verl_oppo.main_ppo import demo_asset

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"

pytestmark = pytest.mark.timeout(300)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recipes = load("check")
SCRIPTS = recipes.scripts()
CASES = [pytest.param(script, mode, id=f"{script.stem}-{mode}") for script in SCRIPTS for mode in recipes.modes(script)]


@pytest.fixture(autouse=True)
def local_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl reads the critic's config and tokenizer when it validates: those of the demo, instead of a download."""
    monkeypatch.setenv("MODEL_PATH", demo_asset("actor"))


def test_every_setting_has_its_script():
    names = " ".join(script.stem for script in SCRIPTS)
    for setting in ("stack-exchange_ppo", "gsm8k_ppo", "opencoder_ppo", "megatron", "2x4gpu", "grpo", "online-dpo"):
        assert setting in names


@pytest.mark.parametrize(("script", "mode"), CASES)
def test_a_recipe_composes_and_validates_and_guards_stale_tokens(script, mode):
    config = recipes.check(recipes.overrides_of(script, mode))
    assert config.trainer.v1.trainer_mode == mode
    assert config.actor_rollout_ref.rollout.calculate_log_probs
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", 2.0)
    num_actor_gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size % num_actor_gpus == 0, "no padding in every step"
    assert ("megatron" in script.stem) == (config.actor_rollout_ref.actor.strategy == "megatron")
    reward_model = config.reward.reward_model
    per_node = config.trainer.n_gpus_per_node + reward_model.enable_resource_pool * reward_model.n_gpus_per_node
    assert per_node * config.trainer.nnodes == 8
    assert not reward_model.enable_resource_pool or reward_model.nnodes == config.trainer.nnodes


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("trainer.v1.oppo.inter_step.delta_maxx=3", ConfigCompositionException),
        ("actor_rollout_ref.actor.ppo_mini_batchsize=3", ConfigCompositionException),
        ("trainer.v1.oppo.inter_step.delta_init=99", ValueError),
        ("actor_rollout_ref.rollout.calculate_log_probs=False", ValueError),
    ],
)
def test_a_typo_or_a_bad_value_fails(override, error):
    with pytest.raises(error):
        recipes.check(recipes.overrides_of(SCRIPTS[0], "oppo", [override]))


def test_what_comes_last_on_the_command_line_wins():
    config = recipes.check(recipes.overrides_of(SCRIPTS[0], "oppo", ["trainer.total_training_steps=7"]))
    assert config.trainer.total_training_steps == 7


# ---------------------------------- data ----------------------------------

RECORDS = {
    "gsm8k": {"question": "How many?", "answer": "Count them.\n#### 1,234"},
    "stack_exchange": {"question": " How do I quit? ", "response_j": "Like this", "response_k": "No"},
    "opencoder": {"instruction": "Add.", "entry_point": "add", "testcase": ["assert add(1, 2) == 3"]},
}


def loader(record: dict, num: int) -> Callable[..., list[dict]]:
    """Stands for `datasets.load_dataset`: `num` questions, each in two records."""
    field = next(iter(record))

    def load_dataset(split: str, streaming: bool, path: str, **kwargs: str) -> list[dict]:
        return [record | {field: f"{record[field]} {split} {index // 2}"} for index in range(2 * num)]

    return load_dataset


@pytest.mark.parametrize("name", RECORDS)
def test_prepared_rows_are_verls_one_for_each_question(name, monkeypatch):
    data = load("prepare_data")
    monkeypatch.setattr(data, "NUM_TEST", 2)
    rows = data.split_rows(data.SOURCES[name], loader(RECORDS[name], num=5), limit=4)
    assert len(rows["train"]) == (4 if name == "gsm8k" else 3)
    assert len(rows["test"]) == (4 if name == "gsm8k" else 2)
    prompts = [row["prompt"][0]["content"] for part in rows.values() for row in part]
    assert len(set(prompts)) == len(prompts)
    assert {row["extra_info"]["split"] for row in rows["test"]} == {"test"}
    assert all(row.keys() >= {"data_source", "prompt", "reward_model", "extra_info"} for row in rows["train"])


def test_verls_rule_for_gsm8k_takes_the_prepared_answer():
    from verl.utils.reward_score import default_compute_score

    row = load("prepare_data").gsm8k_row(RECORDS["gsm8k"])
    truth = row["reward_model"]["ground_truth"]
    assert truth == "1234"
    assert default_compute_score(row["data_source"], "so it is #### 1234", truth) == 1.0
    assert default_compute_score(row["data_source"], "so it is #### 1235", truth) == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```", 1.0),
        ("```\ndef add(a, b):\n    return 3\n```", 0.5),
        ("```python\ndef add(a, b) return\n```", 0.0),
        ("```python\nprint('passed: 2')\nimport sys; sys.exit(0)\n```", 0.0),
        ("```python\nadd = lambda a, b: [0] * (1 << 40)\n```", 0.0),
        ("def add(a, b): return a + b", 0.0),
    ],
)
def test_the_opencoder_reward_is_the_share_of_passed_assertions(response, score):
    record = RECORDS["opencoder"] | {"testcase": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
    truth = load("prepare_data").opencoder_row(record)["reward_model"]["ground_truth"]
    assert json.loads(truth) == record["testcase"]
    assert load("opencoder_reward").compute_score("opencoder", response, truth) == score
