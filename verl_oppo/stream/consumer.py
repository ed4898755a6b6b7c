"""Settings and statistics of one consumer of the stream (a scorer behind a pump): plain data, no calls.

The trainer writes the settings and reads the statistics; the pump does the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_oppo.scoring.scorer import CallReport
from verl_oppo.stream.hub import HubCounters

Span = tuple[str, float, float]
"""("prefill" or "score", start, end), both in seconds of `time.time()`."""


@dataclass(frozen=True)
class ConsumerSettings:
    """Bounds of one consumer of the stream. `key` is the config group that error messages name."""

    max_held_tokens: int = 1 << 22
    """Tokens that the hub holds, 8 bytes each. Raise it when `oppo/chunk/dropped` grows."""
    max_tokens_per_prefill: int = 2048
    """Tokens of one prefill call and rank: a score call waits for the prefill in flight, so this bounds its wait."""
    max_tokens_per_score: int = 1 << 20
    """Tokens of the score requests that are merged into one call; a larger request gets a call of its own."""
    call_timeout_s: float = 300.0
    """Seconds after which a call to the scorer is given up, and the scorer with it."""
    key: str = "trainer.v1.oppo.intra_step"

    def __post_init__(self) -> None:
        for name in ("max_held_tokens", "max_tokens_per_prefill", "max_tokens_per_score"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{self.key}.{name} is {value!r}, allowed is an integer of 1 or more")
        if not self.call_timeout_s > 0:
            raise ValueError(f"{self.key}.call_timeout_s is {self.call_timeout_s!r}, allowed is a number above 0")


@dataclass
class CallTimes:
    """Calls of one kind since the last reset."""

    calls: int = 0
    busy_s: float = 0.0
    """Seconds in which the scorer worked, by its own clock; of each call those of its slowest rank."""
    wall_s: float = 0.0
    """Seconds from issuing a call to its last answer; also of calls that failed."""
    report: CallReport = field(default_factory=CallReport)
    """Sums over ranks and calls."""

    def add(self, reports: Sequence[CallReport]) -> None:
        self.busy_s += max((report.seconds for report in reports), default=0.0)
        for report in reports:
            self.report.add(report)


@dataclass
class ConsumerStats:
    """What one consumer did since the last reset; `tokens_waiting` is of this moment."""

    hub: HubCounters = field(default_factory=HubCounters)
    prefill: CallTimes = field(default_factory=CallTimes)
    score: CallTimes = field(default_factory=CallTimes)
    trajectories_refused: int = 0
    """Trajectories no longer streamed, since their chunks were malformed or the scorer refused them."""
    tokens_waiting: int = 0
    spans: list[Span] = field(default_factory=list)
