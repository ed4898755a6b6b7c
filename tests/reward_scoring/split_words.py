"""Tokenizers of the kinds that split words otherwise, and texts for them, for the tests of the reward's input."""

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl_oppo.demo.tokenizer import CHATML_TEMPLATE, build_actor_tokenizer, build_other_tokenizer
from verl_oppo.scoring import reward_input

SAMPLE = Path(reward_input.__file__).read_text()
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
unhurried = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def byte_level_bpe() -> PreTrainedTokenizerFast:
    """Qwen's splitting and byte-level merges, trained on `SAMPLE`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<|im_start|>", "<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return wrapped(tokenizer, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])


def sentence_piece() -> PreTrainedTokenizerFast:
    """Llama 2's scheme: the whole text is one word, spaces are written as a letter, bytes are the last resort."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE.split(), trainer)
    return wrapped(tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def wrapped(tokenizer: Tokenizer, **roles) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHATML_TEMPLATE, clean_up_tokenization_spaces=False, **roles
    )


TOKENIZERS = {
    "demo": build_actor_tokenizer(),
    "demo_other": build_other_tokenizer(),
    "bpe": byte_level_bpe(),
    "sentence_piece": sentence_piece(),
}
words = st.lists(
    st.one_of(
        st.sampled_from(
            ["the", " model", "\n", "  ", "don't", " 1234", "...", "\u00e9t\u00e9", "\u4f60\u597d", "tokens"]
        ),
        st.text(max_size=6),
    ),
    max_size=40,
).map("".join)
