"""One of the two ranks of `test_megatron_scoring_on_cpu.py`: runs all cases and leaves one JSON file for each.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python tests/megatron_scoring FOLDER CASE...

A case is named "tp2-..." or "tp1-...": with tensor parallel 2 both ranks are one scorer, with 1 each is one by itself.
Those that `fsdp_scoring` has too are its very own. A rank whose case fails says so and ends.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from verl_oppo.platform import cpu

cpu.export_environment()
sys.path.insert(1, str(Path(__file__).parent.parent / "fsdp_scoring"))

import cases  # noqa: E402
import megatron_cases  # noqa: E402
import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("cpu:gloo", timeout=timedelta(seconds=60))
    index = torch.distributed.get_rank()
    if index == 0:
        megatron_cases.save_models(folder)
    torch.distributed.barrier()
    rank = None
    for name in names:
        try:
            size, case = name.split("-", 1)
            if rank is None or rank.tensor_parallel != int(size.removeprefix("tp")):
                rank = in_groups_of(int(size.removeprefix("tp")), folder)
            result = run(case, rank)
        except BaseException:
            (folder / f"{name}.{index}.json").write_text(json.dumps({"error": traceback.format_exc()}))
            os._exit(1)
        (folder / f"{name}.{index}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def in_groups_of(tensor_parallel: int, folder: Path) -> megatron_cases.Rank:
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    return megatron_cases.Rank(folder, tensor_parallel)


def run(name: str, rank: megatron_cases.Rank) -> dict:
    """`chunks-qwen2_value-7` calls `cases.chunks(rank, "qwen2_value", "7")`."""
    function, *arguments = name.split("-")
    module = megatron_cases if hasattr(megatron_cases, function) else cases
    return getattr(module, function)(rank, *arguments)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
