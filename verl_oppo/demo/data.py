"""Training and validation prompts of the demo, as parquet files in the format of verl's RLHFDataset.

Called when the assets are made; knows the task and verl's column names, no tokenizer.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow
import pyarrow.parquet

from verl_oppo.demo.task import AUDIENCES, DATA_SOURCE, PHRASES, TOPICS, Request, TaskSettings, sample_request

ABILITY = "writing"


def write_data(folder: Path, task: TaskSettings, num_train: int, num_val: int, rng: random.Random) -> None:
    """Write train.parquet and val.parquet of prompts that are distinct within and between the two.

    Raises ValueError if the task has too few distinct prompts of a common section size.
    """
    requests = _distinct_requests(num_train + num_val, task, rng)
    _write(folder / "train.parquet", "train", requests[:num_train])
    _write(folder / "val.parquet", "val", requests[num_train:])


def _distinct_requests(num: int, task: TaskSettings, rng: random.Random) -> list[Request]:
    prompts_per_size = len(TOPICS) * len(AUDIENCES) * len(PHRASES)
    if num > 8 * prompts_per_size:
        raise ValueError(f"{num} demo prompts asked for, allowed are at most {8 * prompts_per_size} distinct ones")
    requests: dict[Request, None] = {}
    while len(requests) < num:
        requests[sample_request(rng, task)] = None
    return list(requests)


def _write(path: Path, split: str, requests: list[Request]) -> None:
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": request.text}],
            "ability": ABILITY,
            "reward_model": {"style": "rule", "ground_truth": request.topic},
            "extra_info": {"index": index, "split": split, "topic": request.topic, "size": request.size},
        }
        for index, request in enumerate(requests)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
