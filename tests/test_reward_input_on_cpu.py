"""The reward model's input: verl's own text, and what of it the translator may stream before it is final."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

sys.path.insert(0, str(Path(__file__).parent / "reward_scoring"))

from split_words import SAMPLE, TOKENIZERS, byte_level_bpe, unhurried, words

from verl_oppo.demo.tokenizer import CHATML_TEMPLATE
from verl_oppo.scoring.growing_text import extended
from verl_oppo.scoring.reward_input import RewardInput, RewardInputTranslator
from verl_oppo.scoring.scorer import Chunk

MESSAGES = [{"role": "user", "content": "What is new?"}]
# Moves what stands before </think>, as the templates of reasoning models do.
REASONING_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% set thought = message['content'].split('</think>')[0].split('<think>')[-1].strip('\\n') "
    "if '</think>' in message['content'] else '' %}"
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' + message['content'].split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
PAIRS = [("demo", "demo_other"), ("bpe", "bpe"), ("bpe", "sentence_piece"), ("sentence_piece", "bpe"), ("demo", "bpe")]
# What the held-back end decides: words of these tokenizers are split apart, so a word that is over stays as it is.
EXACT_PAIRS = [("demo", "demo_other"), ("demo", "demo"), ("bpe", "bpe"), ("sentence_piece", "bpe")]


def translator(actor: PreTrainedTokenizerFast, reward: PreTrainedTokenizerFast) -> RewardInputTranslator:
    made = RewardInputTranslator("", "")
    made._input = RewardInput(actor, reward)
    return made


def actor_prompt(actor: PreTrainedTokenizerFast) -> list[int]:
    return actor.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)


def cut(ids: np.ndarray, bounds: list[int], name: str = "uid_0") -> list[Chunk]:
    edges = sorted({0, len(ids), *[bound % (len(ids) + 1) for bound in bounds]})
    return [Chunk(name, start, ids[start:stop]) for start, stop in zip(edges, edges[1:], strict=False)]


def received(chunks: list[Chunk], final: np.ndarray | None = None) -> np.ndarray:
    """The reward model's ids after these chunks; fails on a gap, and once they are no prefix of the final input."""
    known = np.empty(0, dtype=np.int64)
    for chunk in chunks:
        known = extended(known, chunk)
        assert known is not None, f"a gap before {chunk.offset}"
        assert final is None or known.tolist() == final[: len(known)].tolist()
    return known


def in_pieces(tokenizer: PreTrainedTokenizerFast, text: str, bounds: list[int]) -> list[int]:
    """Token ids that a policy may sample for a text: not those that the tokenizer would choose."""
    edges = sorted({0, len(text), *[bound % (len(text) + 1) for bound in bounds]})
    parts = [text[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]
    return [index for part in parts for index in tokenizer(part, add_special_tokens=False)["input_ids"]]


# The text -------------------------------------------------------------------------------------------------------------


@unhurried
@given(ids=st.lists(st.integers(0, 10**6), max_size=30), padding=st.integers(0, 4), pair=st.sampled_from(PAIRS))
def test_the_text_is_verls(ids, padding, pair):
    actor, reward = TOKENIZERS[pair[0]], TOKENIZERS[pair[1]]
    response = [index % len(actor) for index in ids]
    data = DataProto(
        batch=TensorDict(
            {
                "responses": torch.tensor([response + [0] * padding]),
                "attention_mask": torch.tensor([[1] * 7 + [1] * len(response) + [0] * padding]),
            },
            batch_size=1,
        ),
        non_tensor_batch={"raw_prompt": np.array([MESSAGES])},
    )
    verls = SimpleNamespace(input_tokenizer=actor, reward_model_tokenizer=reward)
    expected = asyncio.run(RewardLoopWorker._preprocess_reward_inputs(verls, data))
    assert RewardInput(actor, reward).text(MESSAGES, np.array(response, dtype=np.int64)) == expected


def test_the_leading_bos_is_taken_off_the_text():
    reward_input = RewardInput(TOKENIZERS["demo"], TOKENIZERS["demo_other"])
    assert TOKENIZERS["demo_other"].bos_token == "<s>"
    assert reward_input.text(MESSAGES, [5, 6]).startswith(" judge the following")


def test_the_response_span_covers_the_response_and_nothing_else():
    reward_input = RewardInput(TOKENIZERS["bpe"], TOKENIZERS["bpe"])
    response = TOKENIZERS["bpe"](" the tokens of a chunk")["input_ids"]
    ids = reward_input.token_ids(reward_input.text(MESSAGES, response))
    start, end = reward_input.response_span(MESSAGES, ids)
    assert ids[start:end].tolist() == response
    assert TOKENIZERS["bpe"].decode(ids[end:]) == "<|im_end|>\n"


# The translator -------------------------------------------------------------------------------------------------------


@unhurried
@given(
    text=words,
    pieces=st.lists(st.integers(0, 10**4), max_size=10),
    bounds=st.lists(st.integers(0, 10**4), max_size=10),
    pair=st.sampled_from(EXACT_PAIRS),
    order=st.randoms(use_true_random=False),
)
def test_what_is_streamed_is_a_prefix_of_the_final_input(text, pieces, bounds, pair, order):
    """At any time; words cut in two, chunks doubled and out of order included."""
    actor, reward = TOKENIZERS[pair[0]], TOKENIZERS[pair[1]]
    made = translator(actor, reward)
    made.register_prompt("uid", MESSAGES)
    prompt = actor_prompt(actor)
    response = [*in_pieces(actor, text, pieces), actor.eos_token_id]
    chunks = cut(np.array([*prompt, *response]), bounds)
    sent = chunks + order.choices(chunks, k=len(chunks))
    if order.random() < 0.5:
        order.shuffle(sent)
    final = made._input.token_ids(made._input.text(MESSAGES, response))
    received([one for chunk in sent for one in made.translate(chunk)], final)


@pytest.mark.parametrize("pair", PAIRS)
def test_little_more_than_the_last_chunk_is_left_at_the_end(pair):
    actor, reward = TOKENIZERS[pair[0]], TOKENIZERS[pair[1]]
    made = translator(actor, reward)
    made.register_prompt("uid", MESSAGES)
    prompt = actor_prompt(actor)
    text = " violin flute drum wolf" * 50 if pair[0] == "demo" else SAMPLE[:1500]
    response = actor(text, add_special_tokens=False)["input_ids"][:200]
    ids = np.array([*prompt, *response])
    chunks = [Chunk("uid_0", 0, ids[: len(prompt) + 10])]
    chunks += [Chunk("uid_0", start, ids[start : start + 10]) for start in range(len(prompt) + 10, len(ids), 10)]
    streamed = received([one for chunk in chunks for one in made.translate(chunk)])
    final = made._input.token_ids(made._input.text(MESSAGES, response))
    start, end = made._input.response_span(MESSAGES, final)
    assert streamed.tolist() == final[: len(streamed)].tolist()
    assert end - len(streamed) <= 16
    assert end - start > 100


def test_space_at_the_end_is_held_back_since_templates_trim_a_response():
    actor = TOKENIZERS["bpe"]
    made = translator(actor, actor)
    made.register_prompt("uid", MESSAGES)
    response = actor("The model\n  \n \t ", add_special_tokens=False)["input_ids"]
    streamed = made.translate(Chunk("uid_0", 0, np.array([*actor_prompt(actor), *response])))
    final = made._input.token_ids(made._input.text(MESSAGES, response))
    assert "The model<|im_end|>" in made._input.text(MESSAGES, response)
    assert len(received(streamed, final)) > len(actor_prompt(actor))


def test_nothing_is_streamed_for_an_unknown_prompt_and_all_of_it_once_the_prompt_is_known():
    actor = TOKENIZERS["bpe"]
    made = translator(actor, actor)
    ids = np.array([*actor_prompt(actor), *actor(SAMPLE[:300])["input_ids"]])
    assert made.translate(Chunk("uid_0", 0, ids[:60])) == []
    made.register_prompt("uid", MESSAGES)
    (chunk,) = made.translate(Chunk("uid_0", 60, ids[60:100]))
    assert chunk.offset == 0
    assert len(chunk.token_ids) > 80


def test_a_chunk_behind_a_gap_is_left_out():
    actor = TOKENIZERS["bpe"]
    made = translator(actor, actor)
    made.register_prompt("uid", MESSAGES)
    assert made.translate(Chunk("uid_0", 5, np.arange(20))) == []


def test_a_trajectory_that_starts_again_is_streamed_again_from_the_start():
    actor = TOKENIZERS["bpe"]
    made = translator(actor, actor)
    made.register_prompt("uid", MESSAGES)
    ids = np.array([*actor_prompt(actor), *actor(SAMPLE[:300])["input_ids"]])
    first = made.translate(Chunk("uid_0", 0, ids[:80]))
    assert made.translate(Chunk("uid_0", 40, ids[40:80])) == []
    again = made.translate(Chunk("uid_0", 0, ids[:80]))
    assert again[0].offset == first[0].offset == 0
    assert again[0].token_ids.tolist() == first[0].token_ids.tolist()


def test_a_prompt_that_the_template_does_not_explain_streams_up_to_the_response_unless_its_length_is_given():
    """As with the schemas of tools, which are in the actor's prompt and not in its messages."""
    actor = TOKENIZERS["bpe"]
    prompt = [*actor("tools: none\n")["input_ids"], *actor_prompt(actor)]
    ids = np.array([*prompt, *actor(SAMPLE[:300])["input_ids"]])
    lengths = []
    for prompt_length in (None, len(prompt)):
        made = translator(actor, actor)
        made.register_prompt("uid", MESSAGES, prompt_length)
        lengths.append(len(received(made.translate(Chunk("uid_0", 0, ids)))))
    final = made._input.token_ids(made._input.text(MESSAGES, ids[len(prompt) :]))
    start, end = made._input.response_span(MESSAGES, final)
    assert 0 < lengths[0] <= start
    assert end - 16 <= lengths[1] <= end


@pytest.mark.parametrize("opening", ["response", "prompt"])
def test_an_open_reasoning_is_streamed_as_one_that_will_be_closed(opening):
    actor, reward = byte_level_bpe(), byte_level_bpe()
    reward.chat_template = REASONING_TEMPLATE
    if opening == "prompt":
        actor.chat_template = CHATML_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    made = translator(actor, reward)
    made.register_prompt("uid", MESSAGES)
    prompt = actor_prompt(actor)
    assert actor.decode(prompt).endswith("<think>\n") == (opening == "prompt")
    text = ("" if opening == "prompt" else "<think>\n") + SAMPLE[:200] + "\n</think>\n\nSo the answer is 4."
    response = actor(text)["input_ids"]
    ids = np.array([*prompt, *response])
    chunks = [
        one
        for start in range(0, len(ids), 20)
        for one in made.translate(Chunk("uid_0", start, ids[start : start + 20]))
    ]
    offsets = [chunk.offset for chunk in chunks]
    lengths = [len(chunk.token_ids) for chunk in chunks]
    assert offsets[1:] == np.cumsum(lengths)[:-1].tolist(), "nothing sent was taken back"
    streamed = received(chunks)
    final = made._input.token_ids(made._input.text(MESSAGES, response))
    assert streamed.tolist() == final[: len(streamed)].tolist()
    assert len(final) - len(streamed) < 40


def test_dropped_trajectories_are_forgotten():
    actor = TOKENIZERS["bpe"]
    made = translator(actor, actor)
    made.register_prompt("uid", MESSAGES)
    made.translate(Chunk("uid_0", 0, np.array(actor_prompt(actor))))
    made.forget(["uid_0", "unknown"])
    assert made.translate(Chunk("uid_0", 9, np.arange(20))) == []


# The score ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What `reward_scoring/fsdp_scores.py` saw; a process of its own, since verl reads its platform at import."""
    folder = tmp_path_factory.mktemp("scores")
    script = Path(__file__).parent / "reward_scoring" / "fsdp_scores.py"
    done = subprocess.run([sys.executable, str(script), str(folder)], timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.timeout(600)
def test_streamed_scores_are_those_of_the_model_itself_with_another_tokenizer_and_template(scores):
    assert scores["tokens_differ"]
    for case, seen in scores["cases"].items():
        np.testing.assert_allclose(seen["scores"], scores["expected"], rtol=1e-5, atol=1e-5, err_msg=case)
    assert np.ptp(scores["expected"]) > 0.1, "the scores tell the trajectories apart"


@pytest.mark.timeout(600)
def test_the_translated_chunks_are_found_cached(scores):
    for size in (1, 7, 64):
        lengths, cached = scores["lengths"], scores["cases"][f"chunks of {size}"]["cached"]
        # The last chunk and the last word are left, and what the template puts behind the response.
        assert all(length - found <= 2 * size + 8 for length, found in zip(lengths, cached, strict=True)), (
            size,
            cached,
        )
        assert min(cached) > 0
    assert scores["cases"]["nothing streamed"]["cached"] == [0] * len(scores["lengths"])
    assert max(scores["cases"]["of another prompt"]["cached"]) < max(scores["lengths"]) / 2
