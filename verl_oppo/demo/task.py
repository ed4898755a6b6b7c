"""The toy task of the demo: write so many words about a topic, counting down, and the rule that scores them.

The data set, the warm start and the reward models draw requests and responses here; verl loads `compute_score` as its
custom reward function (`reward.custom_reward_function.path` is this file or `pkg://verl_oppo.demo.task`). This module
knows nothing of tokenizers or models and imports only the standard library.

A request reads "write 4 words about fruit for anna". A response numbers its words downwards, all separated by spaces,
here

    4 apple 3 lemon 2 nail 1 wolf

and ends after the last. So the request sets the length (a clipped log-normal: a long tail), and since each number
follows from the one before, PPO finds nothing to change in it; the score, the share of words on the topic, is a
property of every word that PPO can raise quickly. It says nothing of the length, which a tiny reward model cannot
measure: PPO would learn to write ever longer instead.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DATA_SOURCE = "verl_oppo/words"

TOPICS: dict[str, tuple[str, ...]] = {
    "fruit": ("apple", "lemon", "pear", "plum", "fig", "mango", "melon", "cherry"),
    "animals": ("wolf", "horse", "mouse", "eagle", "tiger", "sheep", "otter", "camel"),
    "tools": ("hammer", "nail", "saw", "drill", "chisel", "wrench", "pliers", "ladder"),
    "weather": ("rain", "snow", "storm", "fog", "hail", "wind", "frost", "thunder"),
    "music": ("violin", "flute", "drum", "harp", "piano", "cello", "organ", "trumpet"),
    "clothes": ("shirt", "coat", "scarf", "glove", "boot", "hat", "belt", "sock"),
    "kitchen": ("spoon", "kettle", "plate", "oven", "bowl", "fork", "jar", "pan"),
    "colours": ("red", "green", "blue", "yellow", "purple", "orange", "white", "brown"),
}
AUDIENCES = ("anna", "boris", "chen", "dora", "emil", "farah", "goran", "hana")
PHRASES = (
    "write {size} words about {topic} for {audience}",
    "please write {size} words about {topic} for {audience}",
    "for {audience} write {size} words about {topic}",
    "{audience} would like to read {size} words about {topic} please",
)
MAX_SIZE = 156
"""Words of the longest response: 312 tokens and an end token."""
NUMBERS = tuple(str(number) for number in range(1, MAX_SIZE + 1))


@dataclass(frozen=True)
class TaskSettings:
    """Distribution of requests in words, and the on-topic rate of the responses that the warm start imitates.

    A response has two tokens a word, and an end token.
    """

    median_size: float = 48.0
    sigma_size: float = 0.8
    max_size: int = MAX_SIZE
    warm_on_topic_rate: float = 0.4

    def __post_init__(self) -> None:
        _require("max_size", self.max_size, 1 <= self.max_size <= MAX_SIZE, f"1 to {MAX_SIZE}")
        _require("median_size", self.median_size, 1 <= self.median_size <= self.max_size, "1 to max_size")
        _require("sigma_size", self.sigma_size, 0 <= self.sigma_size <= 3, "0 to 3")
        _require("warm_on_topic_rate", self.warm_on_topic_rate, 0 <= self.warm_on_topic_rate <= 1, "0 to 1")


@dataclass(frozen=True)
class Request:
    """What one prompt asks for; `phrase` indexes PHRASES."""

    topic: str
    size: int
    audience: str
    phrase: int

    @property
    def text(self) -> str:
        return PHRASES[self.phrase].format(topic=self.topic, size=self.size, audience=self.audience)


def sample_request(rng: random.Random, settings: TaskSettings) -> Request:
    """A request whose size is log-normal, rounded and clipped to 1 and the largest."""
    size = round(settings.median_size * math.exp(rng.gauss(0.0, settings.sigma_size)))
    return Request(
        topic=rng.choice(tuple(TOPICS)),
        size=min(settings.max_size, max(1, size)),
        audience=rng.choice(AUDIENCES),
        phrase=rng.randrange(len(PHRASES)),
    )


def off_topic_words(topic: str) -> list[str]:
    return [word for other, words in TOPICS.items() if other != topic for word in words]


def sample_response(rng: random.Random, request: Request, on_topic_rate: float) -> list[str]:
    """A well-formed response, number and word in turn, whose words are on the topic at `on_topic_rate`."""
    on_topic, off_topic = TOPICS[request.topic], off_topic_words(request.topic)
    response: list[str] = []
    for number in range(request.size, 0, -1):
        response += [str(number), rng.choice(on_topic if rng.random() < on_topic_rate else off_topic)]
    return response


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """Score in [0, 1] of a decoded response without special tokens, in verl's custom reward function signature.

    A number that does not follow a number is neutral, any other token counts as a word. The score is the share of the
    words that are on the topic, which `ground_truth` names.

    Raises ValueError for rows that are not of this task.
    """
    if data_source != DATA_SOURCE:
        raise ValueError(f"data_source is {data_source!r}, allowed is {DATA_SOURCE!r}: this reward scores nothing else")
    words = [word for word in solution_str.split(" ") if word]
    return running_scores(words, ground_truth)[-1] if words else 0.0


def running_scores(words: Sequence[str], ground_truth: str) -> list[float]:
    """Score of a response that ends after the first, the second, ... and the last of its words."""
    if ground_truth not in TOPICS:
        raise ValueError(f"ground_truth is {ground_truth!r}, allowed is a topic of {sorted(TOPICS)}")
    num_words = num_on_topic = 0
    after_number = False
    scores = []
    for word in words:
        after_number = word in NUMBERS and not after_number
        if not after_number:
            num_words += 1
            num_on_topic += word in TOPICS[ground_truth]
        scores.append(num_on_topic / num_words if num_words else 0.0)
    return scores


def _require(key: str, value: float, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"demo task setting {key} is {value!r}, allowed is {allowed}")
