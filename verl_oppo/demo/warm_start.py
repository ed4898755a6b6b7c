"""Supervised warm start of the demo's actor: seconds of imitation that teach the format and the lengths, not the topic.

Called when the assets are made. The model learns the exact next-token distribution of `task.sample_response` rather
than its samples: most words are random, and their noise would drown the few tokens that carry the format. The imitated
responses are on the topic at a mediocre rate, so PPO starts with real entropy and something to learn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

from verl_oppo.demo.task import (
    COMMA,
    HEADINGS,
    SECTION_SIZES,
    TOPICS,
    Request,
    TaskSettings,
    off_topic_words,
    sample_request,
    sample_response,
)
from verl_oppo.demo.tokenizer import word_ids
from verl_oppo.demo.training import TrainSettings, batches, pad, train


@dataclass(frozen=True)
class Example:
    """Token ids of one prompt and response with what the task emits next after each of them.

    `links[i]` is the token that may follow token i instead of a word or a comma (a heading or the end token), -1 within
    the prompt. `link_probabilities[i]` is its probability and `comma_probabilities[i]` that of a comma.
    """

    ids: list[int]
    topic: str
    links: list[int]
    link_probabilities: list[float]
    comma_probabilities: list[float]


def warm_start_actor(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: TaskSettings,
    settings: TrainSettings,
    rng: random.Random,
) -> None:
    """Train `model` in place to imitate the task's responses at `task.warm_on_topic_rate`."""
    word_distribution = _word_distribution(tokenizer, task.warm_on_topic_rate)
    (comma,) = word_ids(tokenizer, [COMMA])

    def loss(batch: list[Example]) -> torch.Tensor:
        ids = pad([example.ids for example in batch], tokenizer.pad_token_id)
        links = pad([example.links for example in batch], -1)
        link_probabilities = pad([example.link_probabilities for example in batch], 0.0)
        comma_probabilities = pad([example.comma_probabilities for example in batch], 0.0)
        logits = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long()).logits
        log_probs = logits.log_softmax(-1)
        words = torch.stack([word_distribution[example.topic] for example in batch])
        cross_entropy = -(
            link_probabilities * log_probs.gather(-1, links.clamp(min=0)[..., None])[..., 0]
            + comma_probabilities * log_probs[..., comma]
            + (1 - link_probabilities - comma_probabilities) * torch.einsum("btv,bv->bt", log_probs, words)
        )
        return cross_entropy[links >= 0].mean()

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
    """Endless examples, in which all section sizes are equally frequent and most sections are cut short.

    What may follow a token does not depend on how long its section is, so large sizes need not dominate the tokens.
    """
    sizes = [size for size in SECTION_SIZES if size <= task.max_size]
    while True:
        request = replace(sample_request(rng, task), size=rng.choice(sizes))
        written = replace(request, size=rng.choice([size for size in sizes if size <= request.size]))
        words = sample_response(rng, written, task.warm_on_topic_rate)
        prompt = prompt_ids(tokenizer, request)
        yield _example(prompt, words, request, tokenizer)


def _example(prompt: list[int], words: list[str], request: Request, tokenizer: PreTrainedTokenizerBase) -> Example:
    due = [*word_ids(tokenizer, HEADINGS), tokenizer.eos_token_id]
    links = [-1] * (len(prompt) - 1) + [due[0]]
    link_probabilities = [0.0] * (len(prompt) - 1) + [1.0]
    comma_probabilities = [0.0] * len(prompt)
    for word in words:
        if word in HEADINGS:
            due.pop(0)
        ends_section = 0.0 if word in (*HEADINGS, COMMA) else 1 / request.size
        links.append(due[0])
        link_probabilities.append(ends_section)
        comma_probabilities.append(0.0 if word in (*HEADINGS, COMMA) else 1 - ends_section)
    return Example(prompt + word_ids(tokenizer, words), request.topic, links, link_probabilities, comma_probabilities)
