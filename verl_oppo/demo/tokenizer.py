"""Word-level tokenizers of the demo, as real fast tokenizers of transformers with a chat template.

Called when the assets are made. The actor's tokenizer speaks Qwen's ChatML (verl picks its Qwen token builder for model
type qwen2, which needs a newline that is one token and `<|im_end|>`). One token is one space-separated word, so any
sequence of its ids survives decode and encode unchanged. The other tokenizer, for a reward model that differs from the
actor, has other ids, other markers and spells numbers digit by digit.
"""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_oppo.demo.task import AUDIENCES, HEADINGS, PHRASES, SECTION_SIZES, TOPICS

UNKNOWN = "<unk>"
PAD = "<|endoftext|>"
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BRACKET_TEMPLATE = (
    "{{ '<s> judge the following ' }}"
    "{% for message in messages %}"
    "{{ '[' + message['role'] + '] ' + message['content'] + ' [end] ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% else %}{{ '</s>' }}{% endif %}"
)


def build_actor_tokenizer() -> PreTrainedTokenizerFast:
    """ChatML tokenizer with eos `<|im_end|>` and pad `<|endoftext|>`; `len()` of it is the models' vocabulary size."""
    words = [UNKNOWN, PAD, "<|im_start|>", "<|im_end|>", "\n", "system", "user", "assistant", "tool"]
    words += [*HEADINGS, *(str(size) for size in SECTION_SIZES), *_task_words()]
    tokenizer = _word_level(words, split_digits=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=CHATML_TEMPLATE,
    )


def build_other_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer for a reward model that shares neither ids, markers, template nor token counts with the actor's."""
    roles = ["[system]", "[user]", "[assistant]", "[tool]", "[end]"]
    words = [*reversed(_task_words()), "judge", "the", "following", "#", *(str(digit) for digit in range(10)), *roles]
    words += ["</s>", "<s>", "<pad>", UNKNOWN]
    tokenizer = _word_level(words, split_digits=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=roles,
        clean_up_tokenization_spaces=False,
        chat_template=BRACKET_TEMPLATE,
    )


def _task_words() -> list[str]:
    words = [word for topic, members in TOPICS.items() for word in (topic, *members)]
    words += AUDIENCES
    words += [word for phrase in PHRASES for word in phrase.split() if not word.startswith("{")]
    return list(dict.fromkeys(words))


def _word_level(words: list[str], split_digits: bool) -> Tokenizer:
    """Tokens are separated by spaces, a newline is a token; without a decoder tokenizers joins tokens with spaces."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    splits = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    if split_digits:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return tokenizer
