"""The embedded default's toy assets: tokenizers, task and rule, data in verl's format, models, cache folder."""

import itertools
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import (
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils import hf_tokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_oppo.demo import assets as assets_module
from verl_oppo.demo.assets import DemoAssets, DemoSettings, ensure_assets
from verl_oppo.demo.models import ModelSettings
from verl_oppo.demo.reward_model import judged_text
from verl_oppo.demo.task import (
    DATA_SOURCE,
    MAX_SIZE,
    TOPICS,
    Request,
    TaskSettings,
    compute_score,
    running_scores,
    sample_request,
    sample_response,
)
from verl_oppo.demo.tokenizer import build_actor_tokenizer, build_other_tokenizer, word_ids
from verl_oppo.demo.training import TrainSettings
from verl_oppo.demo.warm_start import prompt_ids

MAX_RESPONSE_LENGTH = 448
UNTRAINED = DemoSettings(
    num_train_prompts=32,
    num_val_prompts=8,
    warm_start=TrainSettings(num_steps=2, learning_rate=1e-3, tokens_per_step=512),
    reward_model=TrainSettings(num_steps=2, learning_rate=1e-3, tokens_per_step=512),
)
REQUEST = Request(topic="fruit", size=3, audience="anna", phrase=0)
ACTOR_TOKENIZER = build_actor_tokenizer()
TOKENIZERS = {"actor": ACTOR_TOKENIZER, "other": build_other_tokenizer()}


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> DemoAssets:
    """Assets made as the default's are, with two training steps."""
    return ensure_assets(UNTRAINED, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def trained() -> DemoAssets:
    """The default assets, in the user's cache as the demo leaves them there."""
    return ensure_assets()


# ---------------------------------- tokenizers ----------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_any_token_ids_survive_decode_and_encode(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    plain = [token for token in ids if token not in tokenizer.all_special_ids]
    assert tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=True), add_special_tokens=False) == plain


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_saved_tokenizer_is_loaded_unchanged_beside_a_qwen2_config(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), hf_tokenizer(str(tmp_path))):
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
        text = judged_text(tokenizer, REQUEST, "2 apple 1 nail")
        assert judged_text(loaded, REQUEST, "2 apple 1 nail") == text
        assert loaded.encode(text) == tokenizer.encode(text)


def test_every_word_is_one_token_and_the_generation_prompt_precedes_the_response() -> None:
    words = sample_response(random.Random(0), REQUEST, 0.5)
    prompt = prompt_ids(ACTOR_TOKENIZER, REQUEST)
    messages = [{"role": "user", "content": REQUEST.text}, {"role": "assistant", "content": " ".join(words)}]
    conversation = ACTOR_TOKENIZER.apply_chat_template(messages, return_dict=False)
    assert conversation[:-1] == prompt + word_ids(ACTOR_TOKENIZER, words) + [ACTOR_TOKENIZER.eos_token_id]


def test_verl_builds_later_turns_as_the_template_renders_them() -> None:
    builder = create_continuous_token_builder(ACTOR_TOKENIZER, hf_model_type="qwen2")
    first = [{"role": "user", "content": REQUEST.text}]
    answer = [*word_ids(ACTOR_TOKENIZER, ["1", "apple"]), ACTOR_TOKENIZER.eos_token_id]
    answered = [*first, {"role": "assistant", "content": "1 apple"}]
    again = [*answered, {"role": "user", "content": "write 4 words about tools for boris"}]
    ids = builder.merge_assistant_tokens(builder.build_initial_tokens(first), answer).token_ids
    ids = builder.merge_context_tokens(answered, again, ids).token_ids
    assert ids == ACTOR_TOKENIZER.apply_chat_template(again, add_generation_prompt=True, return_dict=False)


def test_the_other_tokenizer_shares_neither_ids_nor_counts_nor_template() -> None:
    other = TOKENIZERS["other"]
    texts = [judged_text(tokenizer, REQUEST, "12 apple 11 fig") for tokenizer in (ACTOR_TOKENIZER, other)]
    assert texts[0] != texts[1]
    assert len(ACTOR_TOKENIZER.encode(" 12 apple 11 fig")) != len(other.encode(" 12 apple 11 fig"))
    assert all(
        ACTOR_TOKENIZER.get_vocab()[token] != index
        for token, index in other.get_vocab().items()
        if token in ACTOR_TOKENIZER.get_vocab() and token.strip() in TOPICS
    )


# ---------------------------------- task and rule ----------------------------------


def score(response: str, ground_truth: str = "fruit") -> float:
    return compute_score(DATA_SOURCE, response, ground_truth)


def test_the_score_is_the_share_on_the_topic_whatever_the_length() -> None:
    assert score("4 apple 3 fig 2 plum 1 pear") == 1.0
    assert score("4 apple 3 wolf 2 nail 1 pear") == 0.5
    assert score("1 apple") == score(" ".join(f"{number} apple" for number in range(150, 0, -1))) == 1.0
    assert score("") == score("3") == 0.0


def test_a_number_after_a_number_and_a_foreign_token_count_as_words_off_the_topic() -> None:
    assert score("3 apple 2 fig 1") == 1.0
    assert score("3 apple 2 1") == 0.5
    assert score("3 apple 2 user") == score("apple user") == 0.5


@given(
    st.lists(st.sampled_from(["1", "2", "77", *TOPICS["fruit"], *TOPICS["tools"], "user", "fruit"]), max_size=60),
    st.sampled_from(list(TOPICS)),
)
def test_the_score_is_bounded_and_running_scores_are_those_of_prefixes(words: list[str], topic: str) -> None:
    prefixes = [score(" ".join(words[: count + 1]), topic) for count in range(len(words))]
    assert running_scores(words, topic) == prefixes
    assert all(0.0 <= value <= 1.0 for value in prefixes)


@pytest.mark.parametrize("ground_truth", ["", "cars", "fruit 3"])
def test_a_row_of_another_task_is_refused(ground_truth: str) -> None:
    with pytest.raises(ValueError, match="ground_truth"):
        score("1 apple", ground_truth)
    with pytest.raises(ValueError, match="openai/gsm8k"):
        compute_score("openai/gsm8k", "1 apple", "fruit")


@pytest.mark.parametrize("path", ["pkg://verl_oppo.demo.task", str(Path(assets_module.__file__).with_name("task.py"))])
def test_verl_loads_the_rule_as_its_custom_reward_function(path: str) -> None:
    config = OmegaConf.create({"reward": {"custom_reward_function": {"path": path, "name": "compute_score"}}})
    reward_fn = get_custom_reward_fn(config)
    assert reward_fn(DATA_SOURCE, "2 apple 1 fig", "fruit", extra_info={}) == score("2 apple 1 fig")


def test_requested_lengths_have_a_long_tail_within_a_batch() -> None:
    rng = random.Random(0)
    batches = [[sample_request(rng, TaskSettings()).size for _ in range(16)] for _ in range(200)]
    assert statistics.median(max(batch) / min(batch) for batch in batches) >= 10
    assert 42 <= statistics.median(itertools.chain(*batches)) <= 54


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: TaskSettings(median_size=0.5), "median_size"),
        (lambda: TaskSettings(sigma_size=-1), "sigma_size"),
        (lambda: TaskSettings(max_size=MAX_SIZE + 1), "max_size"),
        (lambda: TaskSettings(warm_on_topic_rate=1.5), "warm_on_topic_rate"),
        (lambda: ModelSettings(num_layers=0), "num_layers"),
        (lambda: ModelSettings(hidden_size=48), "hidden_size"),
        (lambda: ModelSettings(hidden_size=64, num_kv_heads=3), "num_kv_heads"),
        (lambda: ModelSettings(max_positions=8), "max_positions"),
        (lambda: TrainSettings(num_steps=0, learning_rate=0.1), "num_steps"),
        (lambda: TrainSettings(num_steps=1, learning_rate=0), "learning_rate"),
        (lambda: TrainSettings(num_steps=1, learning_rate=0.1, tokens_per_step=8), "tokens_per_step"),
        (lambda: DemoSettings(num_train_prompts=0), "num_train_prompts"),
        (lambda: DemoSettings(num_val_prompts=0), "num_val_prompts"),
    ],
)
def test_a_bad_setting_is_refused_by_name(make, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        make()


# ---------------------------------- assets ----------------------------------


def test_prompts_are_distinct_short_and_loaded_by_verl(untrained: DemoAssets) -> None:
    rows = [
        row
        for file in (untrained.train_file, untrained.val_file)
        for row in pyarrow.parquet.read_table(file).to_pylist()
    ]
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows) == 40
    tokenizer = hf_tokenizer(str(untrained.actor))
    config = OmegaConf.create(
        {"max_prompt_length": 32, "cache_dir": str(untrained.root / "verl"), "return_raw_chat": True}
    )
    dataset = RLHFDataset(str(untrained.train_file), tokenizer, config)
    assert len(dataset) == UNTRAINED.num_train_prompts
    item = dataset[0]
    assert item["index"] == 0 and item["data_source"] == DATA_SOURCE and item["raw_prompt"][0]["role"] == "user"
    assert 0 <= compute_score(item["data_source"], "1 apple", item["reward_model"]["ground_truth"]) <= 1


def test_models_have_the_tokenizers_vocabulary_and_the_critic_the_actors_backbone(untrained: DemoAssets) -> None:
    actor = Qwen2ForCausalLM.from_pretrained(untrained.actor)
    critic = Qwen2ForTokenClassification.from_pretrained(untrained.critic)
    reward_model = Qwen2ForSequenceClassification.from_pretrained(untrained.reward_model)
    for model, folder in ((actor, untrained.actor), (critic, untrained.critic), (reward_model, untrained.reward_model)):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == len(tokenizer)
        assert model.config.eos_token_id == tokenizer.eos_token_id
        assert model.config.pad_token_id == tokenizer.pad_token_id
    for name, weight in actor.model.state_dict().items():
        assert torch.equal(weight, critic.model.state_dict()[name])
    assert critic.config.num_labels == reward_model.config.num_labels == 1
    assert not any(weight.any() for weight in critic.score.parameters())


@torch.no_grad()
def test_the_default_actor_counts_down_to_its_end(trained: DemoAssets) -> None:
    """So PPO finds nothing to learn in the length, whatever the requested one."""
    actor = Qwen2ForCausalLM.from_pretrained(trained.actor)
    for size in (1, 9, 40, MAX_SIZE):
        request = replace(REQUEST, size=size)
        words = sample_response(random.Random(size), request, 0.4)
        prompt = prompt_ids(ACTOR_TOKENIZER, request)
        ids = prompt + word_ids(ACTOR_TOKENIZER, words)
        numbers = torch.tensor([*word_ids(ACTOR_TOKENIZER, words[::2]), ACTOR_TOKENIZER.eos_token_id])
        probabilities = actor(input_ids=torch.tensor([ids])).logits[0].softmax(-1)[len(prompt) - 1 :: 2]
        assert probabilities.gather(1, numbers[:, None]).log().sum().exp() > 0.5, size


@torch.no_grad()
def test_the_default_reward_model_scores_as_the_rule_does_at_every_length(trained: DemoAssets) -> None:
    reward_model = Qwen2ForSequenceClassification.from_pretrained(trained.reward_model)
    rng = random.Random(0)
    errors = []
    for size in (4, 16, 64, MAX_SIZE):
        for _ in range(8):
            request = sample_request(rng, TaskSettings())
            words = sample_response(rng, replace(request, size=size), on_topic_rate=rng.random())
            ids = ACTOR_TOKENIZER.encode(judged_text(ACTOR_TOKENIZER, request, " ".join(words)))
            errors.append(
                float(reward_model(input_ids=torch.tensor([ids])).logits) - score(" ".join(words), request.topic)
            )
    assert statistics.mean(map(abs, errors)) < 0.08
    assert abs(statistics.mean(errors)) < 0.04


def test_equal_settings_give_equal_assets_and_a_second_call_makes_nothing(
    untrained: DemoAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    again = ensure_assets(UNTRAINED, tmp_path)
    for name in ("actor", "critic", "reward_model"):
        first, second = (getattr(made, name) / "model.safetensors" for made in (untrained, again))
        assert first.read_bytes() == second.read_bytes()
    assert untrained.train_file.read_bytes() == again.train_file.read_bytes()
    for name in ("_make_actor", "_make_critic", "_make_reward_model", "write_data"):
        monkeypatch.setattr(assets_module, name, None)
    assert ensure_assets(UNTRAINED, tmp_path) == again
    assert ensure_assets(UNTRAINED, tmp_path).root.parent == tmp_path


def test_other_settings_get_another_folder() -> None:
    changed = [replace(UNTRAINED, seed=1), replace(UNTRAINED, model=ModelSettings(num_layers=3)), UNTRAINED]
    assert len({settings.fingerprint for settings in changed}) == 3
    assert replace(UNTRAINED, seed=0).fingerprint == UNTRAINED.fingerprint


def test_a_maker_that_fails_or_comes_second_leaves_no_half_made_asset(tmp_path: Path) -> None:
    target = tmp_path / "root" / "actor"

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    def make_while_another_finishes(folder: Path) -> None:
        (folder / "mine").touch()
        target.mkdir()
        (target / "theirs").touch()

    with pytest.raises(OSError, match="disk full"):
        assets_module._ensure(target, fail)
    assert list(target.parent.iterdir()) == []
    assert assets_module._ensure(target, make_while_another_finishes) == target
    assert [path.name for path in target.parent.rglob("*")] == ["actor", "theirs"]


def test_the_command_prints_the_paths(
    untrained: DemoAssets, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(assets_module, "DemoSettings", lambda seed: replace(UNTRAINED, seed=seed))
    monkeypatch.setattr("sys.argv", ["assets", "--cache-dir", str(untrained.root.parent)])
    monkeypatch.setattr(assets_module.DemoSettings, "seed", 0, raising=False)
    assets_module.main()
    assert json.loads(capsys.readouterr().out)["actor"] == str(untrained.actor)
