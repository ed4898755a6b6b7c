"""What a model step costs on the device that a process stands for, when accelerators are emulated: pure Python.

Used by `emulated` in every process of a run, by `emulated_run` at the entry, and by whoever predicts a step. The
constants and where they come from are in `config/emulate/on.yaml`. It knows neither processes nor clocks.

Not modelled: what grows faster than linearly (attention over long contexts in prefill and training), FSDP's gathering
of weights, the optimizer's step, tensor parallelism. The host's own work between two steps comes on top, in real time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY = "emulate"


@dataclass(frozen=True)
class CostModel:
    """Seconds on one device, linear in tokens and sequences, all times `time_scale`.

    Invariant: every constant is finite and in its range, so no step has a negative or endless cost.
    """

    time_scale: float
    """Factor on every cost below."""
    device_share_factor: float
    """How many times longer a step lasts while one other model runs on its device: 1 (no contention) or more."""
    actor_devices_per_reward_device: float
    """Devices that generate and train for each one that only scores, in the deployment that is modelled."""
    decode_step_s: float
    """Each step of an inference engine, whatever is in it: reading the weights, launches, sampling."""
    decode_sequence_s: float
    """Each sequence that gets a token in an engine's step."""
    decode_cached_token_s: float
    """Each cached token that such a sequence attends to."""
    prefill_call_s: float
    """Each forward of a training engine or a scorer, whatever is in it."""
    prefill_token_s: float
    """Each new token of a prefill or a forward."""
    train_token_s: float
    """Each token of a mini-batch, forward and backward."""
    weight_sync_s: float
    """Each weight sync, on the side of the inference engine."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{KEY}.{field.name} is {value!r}; allowed: a finite number of 0 or more")
        for name in ("time_scale", "actor_devices_per_reward_device"):
            if getattr(self, name) == 0:
                raise ValueError(f"{KEY}.{name} is {getattr(self, name)!r}; allowed: above 0")
        if self.device_share_factor < 1:
            raise ValueError(f"{KEY}.device_share_factor is {self.device_share_factor!r}; allowed: 1 or more")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> CostModel:
        """Raises ValueError for a key too many, a key missing, or a value out of range."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in mapping:
            if key not in names:
                raise ValueError(f"{KEY}.{key} is not a key of the cost model; allowed: {', '.join(names)}")
        for name in names:
            if name not in mapping:
                raise ValueError(f"{KEY}.{name} is missing; allowed: a number")
        return cls(**mapping)

    def engine_step_s(self, prefill_tokens: float = 0, decode_sequences: int = 0, cached_tokens: int = 0) -> float:
        """One step of an inference engine, which may hold prefill and decode at once and reads the weights once.

        Args:
            prefill_tokens: new tokens of sequences that are not decoding yet.
            decode_sequences: sequences that get one token each.
            cached_tokens: tokens in the KV cache of those sequences, all together.
        """
        return self.time_scale * (
            self.decode_step_s
            + self.decode_sequence_s * decode_sequences
            + self.decode_cached_token_s * cached_tokens
            + self.prefill_token_s * prefill_tokens
        )

    def forward_s(self, tokens: float) -> float:
        """One forward of a training engine or a scorer over `tokens` new tokens, cached ones not counted."""
        return self.time_scale * (self.prefill_call_s + self.prefill_token_s * tokens)

    def train_s(self, tokens: float) -> float:
        """One mini-batch of `tokens` tokens, forward and backward."""
        return self.time_scale * self.train_token_s * tokens

    def sync_s(self) -> float:
        """One weight sync."""
        return self.time_scale * self.weight_sync_s

    def reward_load(self, actor_devices: int, reward_devices: int) -> float:
        """Tokens that a reward device of its own sees for each one that this run sends it.

        The deployment that is modelled has more actor devices for each reward device than the run; the tokens of those
        that are not there are added.
        """
        return self.actor_devices_per_reward_device * reward_devices / actor_devices


def shared_progress_s(elapsed_s: float, overlap_s: float, share_factor: float) -> float:
    """Seconds of its own work that a step has done `elapsed_s` after its start.

    Args:
        elapsed_s: time since the step started.
        overlap_s: time that other models were running on its device since then, added up over these models.
        share_factor: `CostModel.device_share_factor`.

    With one other model: full speed while alone, 1 / share_factor while shared. With a mean number n > 1 of others: the
    speed is 1 / (1 + (share_factor - 1) * n) throughout.
    """
    if elapsed_s <= 0:
        return 0.0
    others = overlap_s / elapsed_s
    if others <= 1:
        return elapsed_s - overlap_s * (1 - 1 / share_factor)
    return elapsed_s / (1 + (share_factor - 1) * others)
