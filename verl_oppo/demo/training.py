"""A small supervised training loop for the demo's models, called by the warm start and the reward regression."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

POOL_SIZE = 512


class HasIds(Protocol):
    """An example with token ids."""

    ids: list[int]


Example = TypeVar("Example", bound=HasIds)


@dataclass(frozen=True)
class TrainSettings:
    """Length and step size of a supervised training; a step's batch is bounded in tokens with padding."""

    num_steps: int
    learning_rate: float
    tokens_per_step: int = 2048

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"demo training setting num_steps is {self.num_steps!r}, allowed is 1 or more")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"demo training setting learning_rate is {self.learning_rate!r}, allowed is 0 to 1")
        if self.tokens_per_step < 512:
            raise ValueError(
                f"demo training setting tokens_per_step is {self.tokens_per_step!r}, allowed is 512 or more"
            )


def batches(examples: Iterator[Example], settings: TrainSettings, rng: random.Random) -> Iterator[list[Example]]:
    """Endless batches of examples of similar length, each at most `tokens_per_step` tokens with padding."""
    while True:
        pool = sorted((next(examples) for _ in range(POOL_SIZE)), key=lambda example: len(example.ids))
        groups: list[list[Example]] = [[]]
        for example in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(example.ids) > settings.tokens_per_step:
                groups.append([])
            groups[-1].append(example)
        rng.shuffle(groups)
        yield from groups


def train(
    parameters: Sequence[torch.nn.Parameter],
    loss_fn: Callable[[list[Example]], torch.Tensor],
    batch_iterator: Iterator[list[Example]],
    settings: TrainSettings,
) -> None:
    """AdamW with a linear warm-up over a tenth of the steps and a linear decay to zero."""
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    warm_up = max(1, settings.num_steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, (settings.num_steps - step) / max(1, settings.num_steps - warm_up)),
    )
    for _ in range(settings.num_steps):
        loss = loss_fn(next(batch_iterator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def pad(rows: list[list], value: float) -> torch.Tensor:
    """Rows padded on the right with `value` to one (rows, longest row) tensor."""
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])
