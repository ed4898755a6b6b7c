"""Runs verl's modes and OPPO side by side on the same work: `python scripts/benchmark.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl_oppo.benchmark.command import main  # noqa: E402

if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except ValueError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        status = 2
    sys.exit(status)
