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

    `section_end[i]` is the token that may end the section after token i (a heading or the end token, -1 within the
    prompt), `end_probability[i]` the probability that it does; otherwise a word follows.
    """

    ids: list[int]
    topic: str
    section_end: list[int]
    end_probability: list[float]


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
        section_end = pad([example.section_end for example in batch], -1)
        end_probability = pad([example.end_probability for example in batch], 0.0)
        logits = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long()).logits
        log_probs = logits.log_softmax(-1)
        words = torch.stack([word_distribution[example.topic] for example in batch])
        of_word = torch.einsum("btv,bv->bt", log_probs, words)
        of_end = log_probs.gather(-1, section_end.clamp(min=0)[..., None])[..., 0]
        cross_entropy = -(end_probability * of_end + (1 - end_probability) * of_word)
        return cross_entropy[section_end >= 0].mean()

    train(model, loss, batches(_examples(tokenizer, task, rng), settings, rng), settings)


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
    headings = word_ids(tokenizer, HEADINGS)
    sizes = [size for size in SECTION_SIZES if size <= task.max_size]
    while True:
        request = replace(sample_request(rng, task), size=rng.choice(sizes))
        ids = prompt_ids(tokenizer, request)
        due = [*headings, tokenizer.eos_token_id]
        section_end = [-1] * (len(ids) - 1) + [due.pop(0)]
        end_probability = [0.0] * (len(ids) - 1) + [1.0]
        written = replace(request, size=rng.choice([size for size in sizes if size <= request.size]))
        for token in word_ids(tokenizer, sample_response(rng, written, task.warm_on_topic_rate)):
            ids.append(token)
            is_heading = token == section_end[-1]
            section_end.append(due.pop(0) if is_heading else section_end[-1])
            end_probability.append(0.0 if is_heading else 1 / request.size)
        yield Example(ids, request.topic, section_end, end_probability)
