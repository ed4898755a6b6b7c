"""Runs verl's modes and OPPO side by side on the same work: `python scripts/benchmark.py --help`."""

import signal
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl_oppo.benchmark.command import main  # noqa: E402


def stop(signum: int, frame: FrameType | None) -> None:
    """As any other end, so that the runs are ended too; a background job of a shell ignores SIGINT without it."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    try:
        status = main(sys.argv[1:])
    except ValueError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        status = 2
    sys.exit(status)
