"""The knobs under ``trainer.v1.oppo``: frozen dataclasses that refuse a bad value at start.

The entry and the trainer build them with ``OppoConfig.from_mapping(OmegaConf.to_container(config.trainer.v1.oppo))``.
It knows neither Hydra nor verl: what depends on verl's own keys (the support matrix) is checked by the trainer.
Every error is a ValueError that names the full key, the value received and what is allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_oppo.algorithms.registry import check_name
from verl_oppo.control.overcommit import RULES

PREFIX = "trainer.v1.oppo"
INTER_STEP = f"{PREFIX}.inter_step"
INTRA_STEP = f"{PREFIX}.intra_step"
ONLINE_DPO = f"{PREFIX}.online_dpo"
REWARD_KINDS = ("auto", "off", "vllm", "fsdp", "megatron")
DPO_LOSSES = ("sigmoid", "ipo")
MAX_INFLIGHT_LIMIT = 1000 - 16
"""Requests a replica can hold: verl's server actor has max_concurrency = max(1000, max_num_seqs + 16), and a parked
generate() call keeps its slot. 16 are set aside for control calls (CONTROL_METHOD_CONCURRENCY): without one the weight
sync finds no free slot and the run hangs (verl#7990)."""


def _refuse(key: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{key} is {value!r}; allowed: {allowed}")


def _check_bool(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _refuse(key, value, "true or false")


def _check_int(key: str, value: object, low: int, high: int | None = None, why: str = "") -> None:
    """A whole number in [low, high]; true and false are not numbers here, though Python counts them as such."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        span = f"a whole number of {low} or more" if high is None else f"a whole number from {low} to {high}"
        raise _refuse(key, value, f"{span}{f' ({why})' if why else ''}")


def _check_number(key: str, value: object, low: float, high: float, allowed: str) -> None:
    """A number above or at ``low`` and below ``high``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value < high:
        raise _refuse(key, value, allowed)


def _check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise _refuse(key, value, f"one of {', '.join(choices)}")


@dataclass(frozen=True)
class InterStepConfig:
    """Inter-step overlap: run B + delta prompts, train on the first B, carry the rest.

    Invariant: ``0 <= delta_min <= delta_init <= delta_max`` and every value is in its range.
    """

    enable: bool = True
    """Default true. False: delta is 0 and every step waits for its own B prompts.
    Turn it off if ``timing_s/straggler_wait`` is near 0 with it off too."""

    rule: str = "least_squares"
    """Default least_squares; or paper, proportional, constant. See ``verl_oppo/control/overcommit.py``.
    Change it if ``oppo/overcommit/delta`` wanders while the reward is flat."""

    delta_init: int = 4
    """Default 4 prompts: delta of the first step. Change it if ``oppo/overcommit/delta`` takes long to settle."""

    delta_min: int = 0
    """Default 0 prompts: delta never falls below. Raise it if ``timing_s/straggler_wait`` is still large when
    ``oppo/overcommit/delta`` has come down and ``oppo/staleness/stale_token_ratio`` is harmless."""

    delta_max: int = 16
    """Default 16 prompts: delta never exceeds it; at most batch size x max_deferrals. Lower it if
    ``oppo/staleness/stale_token_ratio`` is high; raise it if delta sits at it and ``timing_s/straggler_wait`` is
    large."""

    delta_inc: int = 1
    """Default 1 prompt per step: growth. Raise it if ``oppo/overcommit/delta`` lags behind a rising reward."""

    delta_dec: int = 1
    """Default 1 prompt per step: decline. Raise it if ``oppo/staleness/stale_token_ratio`` stays high after the
    reward has stopped rising."""

    window: int = 8
    """Default 8 steps: rewards that the slope is taken over. Raise it if ``oppo/overcommit/slope`` changes sign from
    step to step."""

    max_deferrals: int = 4
    """Default 4 steps: how often one prompt may be deferred before a step waits for it. Lower it if
    ``oppo/deferred/age_max`` sits at it and ``oppo/staleness/stale_token_ratio`` is high; raise it if
    ``timing_s/straggler_wait`` grows with ``oppo/deferred/age_max`` at the bound. ``max_deferrals + 1`` must fit
    under verl's ``max_off_policy_threshold``."""

    max_inflight_per_replica: int = 900
    """Default 900 requests: submitted to one replica at once; the rest wait in the client. Lower it if the
    replica preempts (vLLM's ``num_preemptions``); it cannot exceed 984, see ``MAX_INFLIGHT_LIMIT``."""

    stall_timeout_s: int = 3600
    """Default 3600 s: how long a waiting step may see no completion and no kept token before it ends the run. Raise it
    if a single response can take longer than that to decode."""

    def __post_init__(self) -> None:
        _check_bool(f"{INTER_STEP}.enable", self.enable)
        _check_choice(f"{INTER_STEP}.rule", self.rule, tuple(RULES))
        for name in ("delta_init", "delta_min", "delta_max", "max_deferrals"):
            _check_int(f"{INTER_STEP}.{name}", getattr(self, name), low=0)
        for name in ("delta_inc", "delta_dec"):
            _check_int(f"{INTER_STEP}.{name}", getattr(self, name), low=1)
        _check_int(f"{INTER_STEP}.window", self.window, RULES[self.rule].min_window, why=f"for rule {self.rule}")
        if self.delta_min > self.delta_max:
            raise _refuse(f"{INTER_STEP}.delta_min", self.delta_min, f"0 to delta_max = {self.delta_max}")
        if not self.delta_min <= self.delta_init <= self.delta_max:
            allowed = f"delta_min = {self.delta_min} to delta_max = {self.delta_max}"
            raise _refuse(f"{INTER_STEP}.delta_init", self.delta_init, allowed)
        _check_int(f"{INTER_STEP}.stall_timeout_s", self.stall_timeout_s, low=1)
        _check_int(
            f"{INTER_STEP}.max_inflight_per_replica",
            self.max_inflight_per_replica,
            low=1,
            high=MAX_INFLIGHT_LIMIT,
            why="verl's server actor has max_concurrency = max(1000, max_num_seqs + 16) and a parked generate() "
            "call holds a slot, so a weight sync hangs above it: verl#7990",
        )

    def disabled(self) -> InterStepConfig:
        """The same with delta fixed at 0."""
        return dataclasses.replace(self, enable=False, rule="constant", delta_init=0, delta_min=0, delta_max=0)

    @property
    def effective(self) -> InterStepConfig:
        """What the controllers are built from: this, or ``disabled()`` where ``enable`` is false."""
        return self if self.enable else self.disabled()

    def check_batch(self, batch_size: int) -> None:
        """Refuses a delta that the deferral bound cannot hold, see ``verl_oppo/control/admission.py``.

        Args:
            batch_size: prompts per step (``data.train_batch_size``).

        Raises:
            ValueError: if the effective ``delta_max`` is above ``batch_size * max_deferrals``.
        """
        bound = batch_size * self.max_deferrals
        if self.effective.delta_max > bound:
            raise _refuse(
                f"{INTER_STEP}.delta_max",
                self.delta_max,
                f"0 to {bound} = data.train_batch_size ({batch_size}) x max_deferrals ({self.max_deferrals}), "
                "or else a prompt would have to be deferred more often than that",
            )


@dataclass(frozen=True)
class IntraStepConfig:
    """Intra-step overlap: stream chunks of tokens to the models downstream, which prefill them meanwhile."""

    enable: bool = True
    """Default true. False leaves no actor, process or thread. Turn it off if ``oppo/overlap/hidden_ratio`` is near
    0, e.g. because the reward is rule-based and critic and reference are not streamed."""

    reward: str = "auto"
    """Default auto: the kind that the run's reward model has, or off where there is none; or off, vllm, fsdp,
    megatron. Change it if ``timing_s/score_tail`` is large and ``oppo/overlap/cached_token_ratio`` is low."""

    critic: bool = False
    """Default false: stream to the critic. Turn it on if ``timing_s/values`` is large and memory is free."""

    reference: bool = False
    """Default false: stream to the reference. Turn it on if ``timing_s/ref`` is large and memory is free."""

    chunk_size: int | str = "auto"
    """Default auto: chosen among ``candidates`` by the tuner; or a number of tokens. Raise it if
    ``oppo/chunk/dropped`` is above 0 or decoding slows down; lower it if ``timing_s/score_tail`` is large."""

    candidates: tuple[int | None, ...] = (128, 256, 512, None)
    """Default [128, 256, 512, null] tokens: what ``auto`` tries; null is the whole response, i.e. no streaming.
    Change it if ``oppo/chunk/size`` always settles at one end."""

    explore_period: int = 50
    """Default 50 steps: from one exploration to the next. Lower it if response lengths drift faster."""

    explore_steps: int = 3
    """Default 3 steps: how long each candidate runs in an exploration. Raise it if ``oppo/chunk/size`` differs from
    one exploration to the next without a reason."""

    verify: int = 0
    """Default 0, never; N: every N-th step is also scored the plain way, compared, and its plain scoring time taken
    for ``oppo/overlap/hidden_ratio``. Set it if that metric is missing or old; it costs the plain time each time."""

    def __post_init__(self) -> None:
        for name in ("enable", "critic", "reference"):
            _check_bool(f"{INTRA_STEP}.{name}", getattr(self, name))
        _check_choice(f"{INTRA_STEP}.reward", self.reward, REWARD_KINDS)
        if self.chunk_size != "auto":
            is_int = isinstance(self.chunk_size, int) and not isinstance(self.chunk_size, bool)
            if not is_int or self.chunk_size < 1:
                raise _refuse(f"{INTRA_STEP}.chunk_size", self.chunk_size, "auto or a whole number of 1 or more tokens")
        self._check_candidates()
        for name in ("explore_period", "explore_steps"):
            _check_int(f"{INTRA_STEP}.{name}", getattr(self, name), low=1)
        _check_int(f"{INTRA_STEP}.verify", self.verify, low=0)
        exploring = len(self.candidates) * self.explore_steps
        if self.chunk_size == "auto" and self.explore_period <= exploring:
            allowed = f"above candidates x explore_steps = {exploring} steps, or the best one would never run"
            raise _refuse(f"{INTRA_STEP}.explore_period", self.explore_period, allowed)

    def _check_candidates(self) -> None:
        key = f"{INTRA_STEP}.candidates"
        if not isinstance(self.candidates, list | tuple) or not self.candidates:
            raise _refuse(key, self.candidates, "a list of one or more chunk sizes, null being the whole response")
        object.__setattr__(self, "candidates", tuple(self.candidates))
        for position, size in enumerate(self.candidates):
            if size is not None:
                _check_int(f"{key}[{position}]", size, low=1, why="or null")
        if len(set(self.candidates)) != len(self.candidates):
            raise _refuse(key, list(self.candidates), "each chunk size once")


@dataclass(frozen=True)
class OnlineDPOConfig:
    """Online DPO (``algorithm: online_dpo``); unused otherwise. See ``verl_oppo/algorithms/online_dpo.py``."""

    beta: float = 0.1
    """Default 0.1: how strongly the reference holds the policy; the inverse of ``ipo``'s target margin is twice it.
    Lower it if ``rewards/accuracies`` stays near 0.5; raise it if ``logps/chosen`` falls from step to step."""

    label_smoothing: float = 0.0
    """Default 0: share of preferences taken to be wrong (conservative DPO), below 0.5; 0 for ``ipo``. Raise it if the
    reward is noisy and ``rewards/margins`` grows without the mean reward."""

    loss_type: str = "sigmoid"
    """Default sigmoid: the DPO loss; or ipo (arXiv 2310.12036) on log-ratios averaged over tokens, as in TRL. Change
    it if ``rewards/margins`` grows without bound."""

    def __post_init__(self) -> None:
        _check_choice(f"{ONLINE_DPO}.loss_type", self.loss_type, DPO_LOSSES)
        _check_number(f"{ONLINE_DPO}.beta", self.beta, 1e-9, float("inf"), "a number above 0")
        smoothing, key = self.label_smoothing, f"{ONLINE_DPO}.label_smoothing"
        _check_number(key, smoothing, 0.0, 0.5, "a number of 0 or more and below 0.5")
        if smoothing and self.loss_type == "ipo":
            raise _refuse(key, smoothing, f"0 with {ONLINE_DPO}.loss_type=ipo")


@dataclass(frozen=True)
class OppoConfig:
    """All of ``trainer.v1.oppo``."""

    inter_step: InterStepConfig = field(default_factory=InterStepConfig)
    intra_step: IntraStepConfig = field(default_factory=IntraStepConfig)
    algorithm: str | None = None
    """Default null: PPO, GRPO or what else verl's own keys describe; or online_dpo."""
    online_dpo: OnlineDPOConfig = field(default_factory=OnlineDPOConfig)

    def __post_init__(self) -> None:
        if self.algorithm is not None:
            check_name(self.algorithm)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> OppoConfig:
        """Builds and validates the config from a plain nested dict; a key that is left out has its default.

        Raises:
            ValueError: on an unknown key or a bad value.
        """
        values = _known_keys(cls, PREFIX, mapping)
        sections = {
            "inter_step": (InterStepConfig, INTER_STEP),
            "intra_step": (IntraStepConfig, INTRA_STEP),
            "online_dpo": (OnlineDPOConfig, ONLINE_DPO),
        }
        for name, (section, prefix) in sections.items():
            if name in values:
                values[name] = section(**_known_keys(section, prefix, values[name]))
        return cls(**values)

    def check_batch(self, batch_size: int) -> None:
        """See ``InterStepConfig.check_batch``."""
        self.inter_step.check_batch(batch_size)


def _known_keys(section: type, prefix: str, mapping: Mapping[str, Any] | None) -> dict[str, Any]:
    if mapping is None:
        return {}
    allowed = [f.name for f in dataclasses.fields(section)]
    if not isinstance(mapping, Mapping):
        raise _refuse(prefix, mapping, f"a mapping with the keys {', '.join(allowed)}")
    for key in mapping:
        if key not in allowed:
            raise ValueError(f"{prefix}.{key} is not a key of OPPO; allowed under {prefix}: {', '.join(allowed)}")
    return dict(mapping)
