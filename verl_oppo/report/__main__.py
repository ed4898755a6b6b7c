"""`python -m verl_oppo.report RUN_DIR [RUN_DIR ...]`: writes a page and PNGs into `report/` in the first run's folder.

Any folder with a metrics.jsonl that verl's file logger wrote (trainer.logger has "file", VERL_FILE_LOGGER_PATH names
the file), of OPPO or of verl itself, still going or long over; a metrics file itself may be named too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl_oppo.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, help="folder of the report (default: report/ in the first run's folder)")
    options = parser.parse_args(argv)
    try:
        from verl_oppo.report.page import write_report
    except ImportError as error:
        print(f"FAILED: {error}: the report needs matplotlib (pip install 'verl-oppo[plot]')", file=sys.stderr)
        return 2
    first = options.runs[0]
    out = options.out or (first.parent if first.is_file() else first) / "report"
    try:
        page = write_report(options.runs, out)
    except ValueError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 2
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
