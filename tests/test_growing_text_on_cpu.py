"""A text that grows: decoded and tokenised piece by piece as if it were whole each time."""

import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent / "reward_scoring"))

from split_words import SAMPLE, TOKENIZERS, unhurried, words, wrapped

from verl_oppo.scoring.growing_text import GrowingText, GrowingTokens


@unhurried
@given(text=words, steps=st.lists(st.integers(1, 30), min_size=1, max_size=12), name=st.sampled_from(list(TOKENIZERS)))
def test_a_growing_text_is_decoded_as_the_whole(text, steps, name):
    tokenizer = TOKENIZERS[name]
    ids = np.array(tokenizer(text * 5, add_special_tokens=False)["input_ids"], dtype=np.int64)
    growing = GrowingText(tokenizer)
    for length in np.cumsum(steps):
        whole, text = tokenizer.decode(ids[:length]), growing.text(ids[:length])
        if whole.endswith("\ufffd"):
            # A run of byte tokens whose last character is incomplete may be decoded as no character at all.
            assert text in {whole.rstrip("\ufffd"), *(tokenizer.decode(ids[:end]) for end in range(length))}
        else:
            assert text == whole


@unhurried
@given(text=words, steps=st.lists(st.integers(1, 80), min_size=1, max_size=12), name=st.sampled_from(list(TOKENIZERS)))
def test_a_growing_text_is_tokenised_as_the_whole(text, steps, name):
    whole = SAMPLE[:600] + text * 3
    growing = GrowingTokens(TOKENIZERS[name])
    for length in 200 + np.cumsum(steps):
        anew = GrowingTokens(TOKENIZERS[name]).stable_ids(whole[:length])
        assert growing.stable_ids(whole[:length]).tolist() == anew.tolist()


def test_an_end_that_comes_out_otherwise_by_itself_is_tokenised_with_the_whole():
    """Digits in groups of three, of two tokens each: taken up in the middle of a group, the groups shift."""
    tokenizer = Tokenizer(models.BPE({"1": 0, "2": 1, "3": 2, "31": 3, "12": 4}, [("3", "1"), ("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    growing, text = GrowingTokens(wrapped(tokenizer)), "123" * 100
    for length in range(2, len(text), 4):
        ids = growing.stable_ids(text[:length]).tolist()
        assert ids == [4, 2] * (len(ids) // 2)
    assert len(ids) > 190


def test_a_text_that_its_next_token_changes_is_decoded_as_the_whole():
    """As where decoding takes the spaces around an apostrophe away."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"rock": 0, "'": 1, "roll": 2, "<unk>": 3}, "<unk>")),
        clean_up_tokenization_spaces=True,
        unk_token="<unk>",
    )
    ids = np.array([0] * 30 + [1, 2])
    growing = GrowingText(tokenizer)
    texts = [growing.text(ids[:length]) for length in range(1, len(ids) + 1)]
    assert texts == [tokenizer.decode(ids[:length]) for length in range(1, len(ids) + 1)]
    assert texts[-2].endswith("rock '") and texts[-1].endswith("rock'roll")


def test_only_the_end_of_a_growing_text_is_tokenised_again():
    """Without it a long response would cost its length squared."""
    lengths = []
    tokenizer = TOKENIZERS["bpe"]

    class Counting:
        is_fast = True

        def __call__(self, text: str, **kwargs):
            lengths.append(len(text))
            return tokenizer(text, **kwargs)

    growing = GrowingTokens(Counting())
    for length in range(400, 4400, 400):
        growing.stable_ids(SAMPLE[:length])
    assert lengths[0] == 400
    assert max(lengths[1:]) < 800
