"""Supervised warm start of the demo's actor: seconds of imitation that teach the format and the lengths, not the topic.

Called when the assets are made. The model learns the exact next-token distribution of `task.sample_response` rather
than its samples: words are random, and their noise would drown the tokens that carry the format. The imitated
responses are on the topic at a mediocre rate, so PPO starts with real entropy and something to learn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

from verl_oppo.demo.task import (
    TOPICS,
    Request,
    TaskSettings,
    off_topic_words,
    sample_request,
    sample_response,
)
from verl_oppo.demo.tokenizer import word_ids
from verl_oppo.demo.training import TrainSettings, batches, pad, train

WORD, NOT_LEARNED = -1, -2
CUT_RATE = 0.7


@dataclass(frozen=True)
class Example:
    """Token ids of one prompt and response, and what the task emits next after each of them.

    `followers[i]` is the one token that may follow token i (a number or the end token), WORD where a word follows, and
    NOT_LEARNED within the prompt.
    """

    ids: list[int]
    topic: str
    followers: list[int]


def warm_start_actor(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: TaskSettings,
    settings: TrainSettings,
    rng: random.Random,
) -> None:
    """Train `model` in place to imitate the task's responses at `task.warm_on_topic_rate`."""
    word_distribution = _word_distribution(tokenizer, task.warm_on_topic_rate)

    def loss(batch: list[Example]) -> torch.Tensor:
        ids = pad([example.ids for example in batch], tokenizer.pad_token_id)
        followers = pad([example.followers for example in batch], NOT_LEARNED)
        logits = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long()).logits
        log_probs = logits.log_softmax(-1)
        words = torch.stack([word_distribution[example.topic] for example in batch])
        cross_entropy = -torch.where(
            followers == WORD,
            torch.einsum("btv,bv->bt", log_probs, words),
            log_probs.gather(-1, followers.clamp(min=0)[..., None])[..., 0],
        )
        return cross_entropy[followers != NOT_LEARNED].mean()

    train(list(model.parameters()), loss, batches(_examples(tokenizer, task, rng), settings, rng), settings)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, request: Request) -> list[int]:
    messages = [{"role": "user", "content": request.text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def _word_distribution(tokenizer: PreTrainedTokenizerBase, on_topic_rate: float) -> dict[str, torch.Tensor]:
    """Probability of each token where the task emits a word, by topic: tensors of shape (vocabulary,)."""
    distributions = {}
    for topic, on_topic in TOPICS.items():
        off_topic = off_topic_words(topic)
        probabilities = torch.zeros(len(tokenizer))
        probabilities[word_ids(tokenizer, on_topic)] = on_topic_rate / len(on_topic)
        probabilities[word_ids(tokenizer, off_topic)] = (1 - on_topic_rate) / len(off_topic)
        distributions[topic] = probabilities
    return distributions


def _examples(tokenizer: PreTrainedTokenizerBase, task: TaskSettings, rng: random.Random) -> Iterator[Example]:
    """Endless examples of all sizes, most of them cut short.

    What may follow a token does not depend on what comes later, so the large numbers need not dominate the tokens.
    """
    while True:
        size = rng.randint(1, task.max_size)
        request = replace(sample_request(rng, task), size=rng.choice([size, round(task.max_size ** rng.random())]))
        words = sample_response(rng, request, task.warm_on_topic_rate)
        if rng.random() < CUT_RATE:
            words = words[: 2 * rng.randint(1, request.size)]
        yield _example(prompt_ids(tokenizer, request), words, request.topic, tokenizer)


def _example(prompt: list[int], words: list[str], topic: str, tokenizer: PreTrainedTokenizerBase) -> Example:
    numbers = word_ids(tokenizer, words[::2])
    count = int(words[-2])
    last = word_ids(tokenizer, [str(count - 1)]) if count > 1 else [tokenizer.eos_token_id]
    followers = [follower for number in [*numbers[1:], *last] for follower in (WORD, number)]
    return Example(
        prompt + word_ids(tokenizer, words), topic, [NOT_LEARNED] * (len(prompt) - 1) + numbers[:1] + followers
    )
