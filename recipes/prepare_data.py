"""Writes the data of the recipes in verl's format: one parquet file each for training and test.

    python recipes/prepare_data.py {gsm8k,stack_exchange,opencoder} --out FOLDER [--limit ROWS]

Downloads the data set from the Hugging Face hub (`datasets`, a dependency of verl). A row holds what verl's data set
and reward loop read: `data_source`, `prompt` (chat messages), `ability`, `reward_model`, `extra_info`.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NUM_TEST = 512
"""Rows set aside where the data set has no test split."""


def verl_row(source: str, ability: str, question: str, style: str, ground_truth: str) -> Row:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": {},
    }


def gsm8k_row(record: Mapping[str, Any]) -> Row:
    """Rewarded by verl's own rule for `openai/gsm8k`, which reads the number after `####`."""
    question = record["question"] + ' Let\'s think step by step and output the final answer after "####".'
    answer = record["answer"].rpartition("####")[2].strip().replace(",", "")
    return verl_row("openai/gsm8k", "math", question, "rule", answer)


def stack_exchange_row(record: Mapping[str, Any]) -> Row:
    """Rewarded by the run's reward model; of the preference pairs only the question is used."""
    return verl_row("stack_exchange", "chat", record["question"].strip(), "model", "")


def opencoder_row(record: Mapping[str, Any]) -> Row:
    """Rewarded by `opencoder_reward.py`: the task's own assertions are the ground truth."""
    question = (
        f"{record['instruction'].strip()}\n\nName the function `{record['entry_point']}` and answer with one block of "
        "Python code."
    )
    return verl_row("opencoder", "code", question, "rule", json.dumps(list(record["testcase"])))


@dataclass(frozen=True)
class Source:
    """A data set on the hub and how its records become rows. `key`: field that tells questions apart."""

    load: Mapping[str, Any]
    row: Callable[[Mapping[str, Any]], Row]
    key: str
    test_split: str | None = None


SOURCES = {
    "gsm8k": Source({"path": "openai/gsm8k", "name": "main"}, gsm8k_row, "question", test_split="test"),
    "stack_exchange": Source(
        {"path": "lvwerra/stack-exchange-paired", "data_dir": "data/rl"}, stack_exchange_row, "question"
    ),
    "opencoder": Source(
        {"path": "OpenCoder-LLM/opc-sft-stage2", "name": "educational_instruct"}, opencoder_row, "instruction"
    ),
}


def rows_of(source: Source, records: Iterator[Mapping[str, Any]], split: str) -> Iterator[Row]:
    """One row a question, in order; repeated questions (preference pairs) are left out."""
    seen: set[str] = set()
    for record in records:
        if record[source.key] not in seen:
            seen.add(record[source.key])
            row = source.row(record)
            row["extra_info"] = {"split": split, "index": len(seen) - 1}
            yield row


def split_rows(source: Source, load: Callable[..., Any], limit: int | None) -> dict[str, list[Row]]:
    """Rows for `train` and `test`; where there is no test split, the first `NUM_TEST` questions are set aside."""
    rows = rows_of(source, iter(load(**source.load, split="train", streaming=True)), "train")
    if source.test_split:
        test = rows_of(source, iter(load(**source.load, split=source.test_split, streaming=True)), "test")
    else:
        test = [row | {"extra_info": row["extra_info"] | {"split": "test"}} for row in itertools.islice(rows, NUM_TEST)]
    return {"train": list(itertools.islice(rows, limit)), "test": list(itertools.islice(test, limit))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--limit", type=int, help="most rows of each file")
    arguments = parser.parse_args()
    import datasets

    arguments.out.expanduser().mkdir(parents=True, exist_ok=True)
    for name, rows in split_rows(SOURCES[arguments.source], datasets.load_dataset, arguments.limit).items():
        file = arguments.out.expanduser() / f"{name}.parquet"
        datasets.Dataset.from_list(rows).to_parquet(str(file))
        print(f"{file}: {len(rows)} rows")


if __name__ == "__main__":
    main()
