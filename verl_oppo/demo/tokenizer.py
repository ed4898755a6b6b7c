"""Tokenizers of the demo: a `Qwen2Tokenizer` whose words are whole tokens, with a chat template.

Called when the assets are made. Beside a config of model type qwen2, transformers loads `Qwen2Tokenizer` whatever the
files say, and verl picks its Qwen token builder, which needs a newline that is one token and `<|im_end|>`. Each word
with the space before it is one added token, so any sequence of their ids survives decode and encode unchanged; text
without a token is dropped. The other tokenizer, for a reward model that differs from the actor, has other ids, other
markers and spells numbers digit by digit.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import AddedToken, PreTrainedTokenizerBase
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from verl_oppo.demo.task import AUDIENCES, NUMBERS, PHRASES, TOPICS

PAD = "<|endoftext|>"
NEWLINE = "\u010a"
"""How a byte-level vocabulary spells a newline."""
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n ' + (message['content'] | trim) + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BRACKET_TEMPLATE = (
    "{{ '<s> judge the following' }}"
    "{% for message in messages %}"
    "{{ '[' + message['role'] + '] ' + (message['content'] | trim) + '[end]' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% else %}{{ '</s>' }}{% endif %}"
)


def build_actor_tokenizer() -> Qwen2Tokenizer:
    """ChatML tokenizer with eos `<|im_end|>` and pad `<|endoftext|>`; `len()` of it is the models' vocabulary size."""
    return _tokenizer(
        special=[PAD, "<|im_start|>", "<|im_end|>"],
        plain=["system", "user", "assistant", "tool"],
        words=[*NUMBERS, *_task_words()],
        chat_template=CHATML_TEMPLATE,
        pad_token=PAD,
        eos_token="<|im_end|>",
    )


def build_other_tokenizer() -> Qwen2Tokenizer:
    """Tokenizer for a reward model that shares neither ids, markers, template nor token counts with the actor's."""
    roles = ["[system]", "[user]", "[assistant]", "[tool]", "[end]"]
    digits = [str(digit) for digit in range(10)]
    return _tokenizer(
        special=["</s>", "<s>", "<pad>", *roles],
        plain=digits,
        words=[*reversed(_task_words()), "judge", "the", "following", *digits],
        chat_template=BRACKET_TEMPLATE,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )


def word_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[int]:
    """Ids of words as they stand in a text, the space before them included."""
    return tokenizer.convert_tokens_to_ids([f" {word}" for word in words])


def _task_words() -> list[str]:
    words = [word for topic, members in TOPICS.items() for word in (topic, *members)]
    words += AUDIENCES
    words += [word for phrase in PHRASES for word in phrase.split() if not word.startswith("{")]
    return list(dict.fromkeys(words))


def _tokenizer(
    special: list[str], plain: list[str], words: list[str], chat_template: str, **roles: str
) -> Qwen2Tokenizer:
    """Ids in this order: special tokens, the newline, `plain` tokens, and `words` with the space before each."""
    vocabulary = {token: index for index, token in enumerate([*special, NEWLINE])}
    others = [token for token in special if token not in roles.values()]
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=roles["pad_token"], additional_special_tokens=others, **roles
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in [*plain, *(f" {word}" for word in words)]])
    tokenizer.chat_template = chat_template
    return tokenizer
