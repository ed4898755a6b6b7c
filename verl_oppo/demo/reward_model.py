"""Regression of the demo's reward models on the rule of the task, in seconds.

Called when the assets are made. A reward model reads what verl's reward loop would send it: the conversation with the
decoded response as the assistant's message, rendered by the reward model's own chat template. Its score is that of the
last token, but it is trained at every token of the response on the rule's score of the words so far, many targets for
one forward, and its first layer on whether each word is on the topic, which the second then only has to average.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase, Qwen2ForSequenceClassification

from verl_oppo.demo.task import (
    NUMBERS,
    TOPICS,
    Request,
    TaskSettings,
    running_scores,
    sample_request,
    sample_response,
)
from verl_oppo.demo.training import TrainSettings, batches, pad, train

NO_TARGET = -1.0
LAST_TOKEN_WEIGHT = 8.0
OTHER_SIZE_RATE = 0.7
"""Most have another size than was asked for: what the score does not depend on must vary."""
MALFORMED_RATE = 0.3


@dataclass(frozen=True)
class Example:
    """One judged conversation, with a target or NO_TARGET for each token.

    `scores` holds the rule's score of the words up to the token, `on_topic` whether the word that it ends is on topic.
    """

    ids: list[int]
    scores: list[float]
    on_topic: list[float]


def train_reward_model(
    model: Qwen2ForSequenceClassification,
    tokenizer: PreTrainedTokenizerBase,
    task: TaskSettings,
    settings: TrainSettings,
    rng: random.Random,
) -> None:
    """Train `model` in place to predict `compute_score` at the last token of `judged_text`."""
    probe = torch.nn.Linear(model.config.hidden_size, 1)

    def loss(batch: list[Example]) -> torch.Tensor:
        ids = pad([example.ids for example in batch], tokenizer.pad_token_id)
        scores = pad([example.scores for example in batch], NO_TARGET)
        on_topic = pad([example.on_topic for example in batch], NO_TARGET)
        last = torch.tensor([len(example.ids) - 1 for example in batch])[:, None]
        mask = (ids != tokenizer.pad_token_id).long()
        output = model.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        squared_error = (model.score(output.last_hidden_state)[..., 0] - scores) ** 2
        judged = on_topic != NO_TARGET
        on_topic_logits = probe(output.hidden_states[1])[..., 0][judged]
        return (
            squared_error[scores != NO_TARGET].mean()
            + LAST_TOKEN_WEIGHT * squared_error.gather(1, last).mean()
            + torch.nn.functional.binary_cross_entropy_with_logits(on_topic_logits, on_topic[judged])
        )

    train(
        [*model.parameters(), *probe.parameters()],
        loss,
        batches(_examples(tokenizer, task, rng), settings, rng),
        settings,
    )


def judged_text(tokenizer: PreTrainedTokenizerBase, request: Request, response: str) -> str:
    """The text that verl sends to a reward model: RewardLoopWorker._preprocess_reward_inputs, verl 0.9.1."""
    messages = [{"role": "user", "content": request.text}, {"role": "assistant", "content": response}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
    return text.removeprefix(tokenizer.bos_token) if tokenizer.bos_token else text


def sample_judged_response(rng: random.Random, request: Request, task: TaskSettings) -> list[str]:
    """Words of a response with any share on the topic, mostly of another size, at times malformed or cut short."""
    written = request
    if rng.random() < OTHER_SIZE_RATE:
        written = replace(request, size=rng.randint(1, task.max_size))
    words = sample_response(rng, written, on_topic_rate=rng.random())
    if rng.random() < MALFORMED_RATE:
        strays = [*TOPICS, *rng.sample(NUMBERS, len(TOPICS))]
        for _ in range(rng.randint(1, 3)):
            words[rng.randrange(len(words))] = rng.choice(strays)
        words = words[: rng.randint(1, len(words))]
    return words


def _examples(tokenizer: PreTrainedTokenizerBase, task: TaskSettings, rng: random.Random) -> Iterator[Example]:
    while True:
        request = sample_request(rng, task)
        words = sample_judged_response(rng, request, task)
        text = judged_text(tokenizer, request, " ".join(words))
        encoding = tokenizer(text, return_offsets_mapping=True)
        last_tokens = _last_tokens(text, [end for _, end in encoding["offset_mapping"]], words)
        yield _example(encoding["input_ids"], last_tokens, request, words)


def _example(ids: list[int], last_tokens: list[int], request: Request, words: Sequence[str]) -> Example:
    scores = [NO_TARGET] * len(ids)
    on_topic = [NO_TARGET] * len(ids)
    ends = [*last_tokens[1:], len(ids)]
    for word, token, end, score in zip(words, last_tokens, ends, running_scores(words, request.topic), strict=True):
        scores[token:end] = [score] * (end - token)
        if word not in NUMBERS:
            on_topic[token] = float(word in TOPICS[request.topic])
    return Example(ids, scores, on_topic)


def _last_tokens(text: str, token_ends: list[int], words: Sequence[str]) -> list[int]:
    """Index of the token in which each word of the response ends."""
    position = text.rindex(" ".join(words))
    token_at = {end: token for token, end in enumerate(token_ends)}
    last_tokens = []
    for word in words:
        position += len(word)
        last_tokens.append(token_at[position])
        position += 1
    return last_tokens
