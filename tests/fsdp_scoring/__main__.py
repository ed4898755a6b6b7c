"""One rank of `test_fsdp_scoring_on_cpu.py`: runs the named cases in order and leaves one JSON file for each.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python tests/fsdp_scoring FOLDER CASE...

Started once per rank and world size, since importing verl takes longer than all cases together. A rank whose case fails
says so and ends, which ends the others: after a failure the ranks' collectives may no longer match.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from verl_oppo.platform import cpu

cpu.export_environment()

import cases  # noqa: E402
import dpo_cases  # noqa: E402
import setup_cases  # noqa: E402
import torch  # noqa: E402
from harness import Rank, save_models  # noqa: E402


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("cpu:gloo", timeout=timedelta(seconds=60))
    index = torch.distributed.get_rank()
    if index == 0:
        save_models(folder)
    torch.distributed.barrier()
    rank = Rank(folder)
    for name in names:
        try:
            result = run(name, rank)
        except BaseException:
            write(folder, name, index, {"error": traceback.format_exc()})
            os._exit(1)
        write(folder, name, index, result)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(name: str, rank: Rank) -> dict:
    """`chunks-critic-7` calls `cases.chunks(rank, "critic", "7")`."""
    function, *arguments = name.split("-")
    module = next(module for module in (setup_cases, dpo_cases, cases) if hasattr(module, function))
    return getattr(module, function)(rank, *arguments)


def write(folder: Path, name: str, index: int, result: dict) -> None:
    (folder / f"{name}.{index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
