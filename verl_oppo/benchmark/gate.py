"""The gate between a benchmark and its runs: files in a folder, so that a run can start up and wait before it trains.

The benchmark's agent loop waits at it inside the run, `runs.py` opens it. Imports nothing of either.
"""

import asyncio
from pathlib import Path

GATE_VARIABLE = "VERL_OPPO_BENCHMARK_GATE"
"""The folder; without it nothing waits."""
READY, GO = "ready", "go"
"""Files: the run's first rollout has come so far; the run may train."""
POLL_S = 0.05


async def pass_gate(folder: str | None) -> None:
    """Says that the run is ready and waits until it may train; whoever ends the run ends the wait."""
    if folder is None:
        return
    gate = Path(folder)
    (gate / READY).touch()
    while not (gate / GO).exists():
        await asyncio.sleep(POLL_S)
