"""The toy task of the demo: write four sections of a requested size about a topic, and the rule that scores it.

The data set, the warm start and the reward models draw requests and responses here; verl loads `compute_score` as its
custom reward function (`reward.custom_reward_function.path` is this file or `pkg://verl_oppo.demo.task`). This module
knows nothing of tokenizers or models and imports only the standard library.

A request reads "write sections of 3 words about fruit for anna". A response numbers its sections and links the words of
one by commas, all separated by spaces, here

    #1 apple , lemon , nail , wolf #2 pear #3 plum , hat , rain #4 fig , mango

and ends after the fourth. So the request sets the length (the section size is a clipped log-normal: a long tail) and
the share of words on the topic is a property of every word that PPO can raise quickly. Whether a section goes on is
decided after a word, by the comma: next to the words it would become likelier with each word that becomes likelier.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DATA_SOURCE = "verl_oppo/sections"

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
    "write sections of {size} words about {topic} for {audience}",
    "please write sections of {size} words about {topic} for {audience}",
    "for {audience} write sections of {size} words about {topic}",
    "{audience} would like to read sections of {size} words about {topic} please",
)
HEADINGS = ("#1", "#2", "#3", "#4")
COMMA = ","
SECTION_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)

ON_TOPIC_WEIGHT = 0.8
"""Share of the score given for words on the topic; the rest is for a length near the requested one."""


@dataclass(frozen=True)
class TaskSettings:
    """Distribution of requests, and the on-topic rate of the responses that the warm start imitates.

    Section sizes are in words; a response has about len(HEADINGS) * 2 * size tokens and an end token.
    """

    median_size: float = 10.0
    sigma_size: float = 0.8
    max_size: int = 48
    warm_on_topic_rate: float = 0.4

    def __post_init__(self) -> None:
        _require("max_size", self.max_size, self.max_size in SECTION_SIZES, f"one of {SECTION_SIZES}")
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

    @property
    def ground_truth(self) -> str:
        """What `compute_score` needs, as the string that verl's `reward_model.ground_truth` holds."""
        return f"{self.topic} {self.size}"


def sample_request(rng: random.Random, settings: TaskSettings) -> Request:
    """A request whose section size is log-normal, rounded in its logarithm to one of SECTION_SIZES and clipped."""
    log_size = math.log(settings.median_size) + rng.gauss(0.0, settings.sigma_size)
    allowed = [size for size in SECTION_SIZES if size <= settings.max_size]
    return Request(
        topic=rng.choice(tuple(TOPICS)),
        size=min(allowed, key=lambda size: abs(math.log(size) - log_size)),
        audience=rng.choice(AUDIENCES),
        phrase=rng.randrange(len(PHRASES)),
    )


def off_topic_words(topic: str) -> list[str]:
    return [word for other, words in TOPICS.items() if other != topic for word in words]


def sample_response(rng: random.Random, request: Request, on_topic_rate: float) -> list[str]:
    """A well-formed response whose words are on the topic at `on_topic_rate`; each section has at least one word.

    After every word its section ends with probability 1 / size, so a model can end it without counting.
    """
    off_topic = off_topic_words(request.topic)
    response: list[str] = []
    for heading in HEADINGS:
        link = heading
        while True:
            on_topic = rng.random() < on_topic_rate
            response += [link, rng.choice(TOPICS[request.topic] if on_topic else off_topic)]
            if rng.random() < 1 / request.size:
                break
            link = COMMA
    return response


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """Score in [0, 1] of a decoded response without special tokens, in verl's custom reward function signature.

    A heading in its turn and a comma after a word are neutral, any other token counts as a word. The score is the share
    of the words that are on the topic, plus a small part for a number of words near the requested one (nothing of it
    beyond a factor of four), so that lengths do not drift while the share is learned.

    Raises ValueError for rows that are not of this task.
    """
    if data_source != DATA_SOURCE:
        raise ValueError(f"data_source is {data_source!r}, allowed is {DATA_SOURCE!r}: this reward scores nothing else")
    words = [word for word in solution_str.split(" ") if word]
    return running_scores(words, ground_truth)[-1] if words else 0.0


def running_scores(words: Sequence[str], ground_truth: str) -> list[float]:
    """Score of a response that ends after the first, the second, ... and the last of its words."""
    topic, size = _parse_ground_truth(ground_truth)
    num_words = num_on_topic = num_headings = 0
    after_word = False
    scores = []
    for word in words:
        if num_headings < len(HEADINGS) and word == HEADINGS[num_headings]:
            num_headings += 1
            after_word = False
        elif word == COMMA and after_word:
            after_word = False
        else:
            num_words += 1
            num_on_topic += word in TOPICS[topic]
            after_word = True
        share_on_topic = num_on_topic / num_words if num_words else 0.0
        length_fit = _length_fit(num_words, size * len(HEADINGS))
        scores.append(ON_TOPIC_WEIGHT * share_on_topic + (1.0 - ON_TOPIC_WEIGHT) * length_fit)
    return scores


def _length_fit(num_words: int, requested: int) -> float:
    """1 at the requested number of words, 0 beyond a factor of four, linear in the logarithm between."""
    if not num_words:
        return 0.0
    return max(0.0, 1.0 - abs(math.log2(num_words / requested)) / 2)


def _parse_ground_truth(ground_truth: str) -> tuple[str, int]:
    topic, _, size = str(ground_truth).partition(" ")
    if topic not in TOPICS or not size.isdigit() or int(size) not in SECTION_SIZES:
        raise ValueError(
            f"ground_truth is {ground_truth!r}, allowed is '<topic> <section size>' with a topic of {sorted(TOPICS)} "
            f"and a size of {SECTION_SIZES}"
        )
    return topic, int(size)


def _require(key: str, value: float, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"demo task setting {key} is {value!r}, allowed is {allowed}")
