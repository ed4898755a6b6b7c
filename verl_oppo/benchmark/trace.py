"""Where the time of a step went, from the metrics that verl logged of it: pure functions on numbers.

Called by the summary and the report. Knows metric names, no files. A step is the interval that verl times as
`timing_s/step`, from asking for new prompts to the end of the weight sync.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PARTS = ("decode", "straggler", "reward", "values", "reference", "training", "weight_sync", "other")
"""What a step consists of, in order; the parts add up to the step.

decode: generation without the two that follow.
straggler: decoding for the sake of a few. Where a step waits for all of its own responses: the part of generation in
    which the average response had already ended, 1 - mean / longest. Where prompts are carried: what the trainer waited
    for prompts at their deferral bound (`timing_s/straggler_wait`); 0 for stock modes, which have no such bound.
reward, values, reference: scoring that the step waited for ("exposed"). With streaming the reward's is that of the last
    final call, which lies within generation and is taken out of it.
training: log-probs of the trained policy, advantages, updates of critic and actor.
weight_sync: from the trainer to the inference engine.
other: the rest: data transfer, calls, scheduling.
"""
TRAINING = ("old_log_prob", "adv", "update_critic", "update_actor")
EMULATED = "oppo/emulated"
BUSY = f"{EMULATED}/busy_s/"
ACTOR_KINDS = ("decode", "train", "sync")


@dataclass(frozen=True)
class Step:
    """One measured step.

    Attributes:
        parts: seconds by name of `PARTS`; they add up to `seconds`.
        tokens: prompt and response tokens trained. generated: response tokens trained.
        busy: emulated seconds of each device in the step, None where nothing is emulated; models that run at the same
            time on a device count each.
        overruns, overrun_s, model_steps: emulated model steps that took longer for real, by how much all together, of
            how many in this step. Devices run at the same time, so not every second of it made the step longer.
    """

    step: int
    seconds: float
    parts: dict[str, float]
    tokens: float
    generated: float
    reward: float | None
    busy: dict[str, float] | None
    scorer_busy_s: float | None
    overruns: float
    overrun_s: float
    model_steps: float
    exposed_reward_s: float | None
    plain_reward_s: float | None
    is_verify: bool


def number(data: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    value = data.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else default


def straggler_share(mean_length: float, longest: float) -> float:
    """Share of a generation phase in which the average response had already ended; lengths in tokens."""
    return 0.0 if longest <= 0 else 1.0 - mean_length / longest


def parts_of(data: Mapping[str, Any], *, waits_for_all: bool) -> dict[str, float]:
    """Seconds by name of `PARTS`, from one step's metrics.

    Args:
        waits_for_all: whether the step ended its generation with the longest of its own responses, none carried.
    """
    generation = number(data, "timing_s/gen")
    hidden_in_generation = number(data, "oppo/overlap/reward_exposed_s")
    rest = max(0.0, generation - hidden_in_generation)
    if waits_for_all:
        share = straggler_share(number(data, "response_length/mean"), number(data, "response_length/max"))
        straggler = rest * share
    else:
        straggler = min(rest, number(data, "timing_s/straggler_wait"))
    parts = {
        "decode": rest - straggler,
        "straggler": straggler,
        "reward": number(data, "timing_s/reward") + min(generation, hidden_in_generation),
        "values": number(data, "timing_s/values"),
        "reference": number(data, "timing_s/ref"),
        "training": sum(number(data, f"timing_s/{name}") for name in TRAINING),
        "weight_sync": number(data, "timing_s/update_weights"),
    }
    parts["other"] = number(data, "timing_s/step") - sum(parts.values())
    return parts


def emulated_busy(data: Mapping[str, Any]) -> dict[str, float]:
    """Seconds since the run began by device, as logged; empty where nothing is emulated."""
    return {key.removeprefix(BUSY): number(data, key) for key in sorted(data) if key.startswith(BUSY)}


def steps_of(records: Sequence[tuple[int, Mapping[str, Any]]], *, waits_for_all: bool) -> list[Step]:
    """The steps of a run.

    Args:
        records: (step, metrics) of each step, in order. A counter that runs on over the run is taken as the difference
            to the record before; the first record has the start-up in it.
    """
    steps = []
    before: Mapping[str, Any] = {}
    for step, data in records:
        busy, busy_before = emulated_busy(data), emulated_busy(before)
        scorer = [number(data, f"oppo/scorer/reward_{kind}_s", math.nan) for kind in ("prefill", "score")]
        steps.append(
            Step(
                step=step,
                seconds=number(data, "timing_s/step"),
                parts=parts_of(data, waits_for_all=waits_for_all),
                tokens=number(data, "perf/total_num_tokens"),
                generated=number(data, "response_length/mean") * num_responses(data),
                reward=None if "critic/score/mean" not in data else number(data, "critic/score/mean"),
                busy={name: value - busy_before.get(name, 0.0) for name, value in busy.items()} or None,
                scorer_busy_s=None if any(math.isnan(value) for value in scorer) else sum(scorer),
                overruns=number(data, f"{EMULATED}/overruns") - number(before, f"{EMULATED}/overruns"),
                overrun_s=number(data, f"{EMULATED}/overrun_s") - number(before, f"{EMULATED}/overrun_s"),
                model_steps=number(data, f"{EMULATED}/steps") - number(before, f"{EMULATED}/steps"),
                exposed_reward_s=_optional(data, "oppo/overlap/reward_exposed_s"),
                plain_reward_s=_optional(data, "oppo/overlap/reward_plain_s"),
                is_verify=any(key.startswith("oppo/verify/") for key in data),
            )
        )
        before = data
    return steps


def num_responses(data: Mapping[str, Any]) -> int:
    """Responses trained: verl logs the sum of all tokens and the two means."""
    mean = number(data, "response_length/mean") + number(data, "prompt_length/mean")
    return round(number(data, "perf/total_num_tokens") / mean) if mean else 0


def _optional(data: Mapping[str, Any], key: str) -> float | None:
    return number(data, key) if key in data else None


def utilisation(step: Step, *, own_pool: bool) -> dict[str, float | None]:
    """Busy share of a step by side, `actor` and `scorer`.

    Emulated: busy seconds of the side's device; the actor's comes first. With a colocated reward model there is one
    device and no scorer side (None). Two models at the same time on a device count each, so a share may exceed 1.
    Else: the actor's side is busy while it decodes, scores, trains or syncs, by the parts; the scorer's by its own
    clock or, colocated, None.
    """
    if step.seconds <= 0:
        return {"actor": None, "scorer": None}
    if step.busy:
        devices = list(step.busy.values())
        scorer = devices[1] / step.seconds if own_pool and len(devices) > 1 else None
        return {"actor": devices[0] / step.seconds, "scorer": scorer}
    waits = step.parts["other"] + (step.parts["reward"] if own_pool else 0.0)
    scorer_s = step.scorer_busy_s if own_pool else None
    return {
        "actor": 1.0 - waits / step.seconds,
        "scorer": None if scorer_s is None else scorer_s / step.seconds,
    }


def idle(share: float | None) -> float | None:
    """Idle share of a worker that is busy for `share` of a step; not below 0."""
    return None if share is None else max(0.0, 1.0 - share)


def lower_bound_s(step: Step, *, reward_load: float) -> float:
    """Seconds that a step of `sync_fast_poll` would take with perfect overlap.

    No response is waited for alone (`straggler` gone) and the reward is hidden on a device of its own, which pays for
    `reward_load` times the tokens. Each device is busy with its own work only, without gaps (`other` gone):
    max(actor's device, reward's device). Values, reference, log-probs, training and weight sync are the actor device's
    own work. Decoding is that of B responses at a time; more at a time decode faster, so OPPO could fall below it.
    """
    own = ("decode", "values", "reference", "training", "weight_sync")
    return max(sum(step.parts[name] for name in own), step.parts["reward"] * reward_load)


def generation_and_scoring_share(step: Step) -> float:
    """Share of a step that the actor decodes or a scorer (reward, values, reference) is waited for."""
    names = ("decode", "straggler", "reward", "values", "reference")
    return sum(step.parts[name] for name in names) / step.seconds


def hidden_share(steps: Sequence[Step], plain_s_per_token: float | None) -> float | None:
    """1 - exposed / plain reward scoring, added up over steps of a run; None where nothing streams.

    `plain_s_per_token` is the time of the plain path, measured in the same run, for each prompt and response token.
    """
    streamed = [step for step in steps if step.exposed_reward_s is not None]
    plain = sum(step.tokens for step in streamed) * (plain_s_per_token or 0.0)
    return 1.0 - sum(step.exposed_reward_s or 0.0 for step in streamed) / plain if plain else None


def ratios(a: Mapping[int, float], b: Mapping[int, float]) -> dict[int, float]:
    """a / b for each repeat that both have."""
    return {repeat: a[repeat] / b[repeat] for repeat in sorted(a.keys() & b.keys()) if b[repeat] > 0}
