"""A checkpoint callback that writes what a step trained to `<checkpoint>/recorded.json`, read back by the e2e tests.

Named in `trainer.checkpoint_callback_class`; runs inside the trainer's actor, after the update and before verl clears
the rows. Works with every trainer mode, since it uses verl's own hook.
"""

import json
from pathlib import Path

import ray
import transfer_queue as tq
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

TENSORS = (
    "responses",
    "response_mask",
    "rm_scores",
    "rollout_log_probs",
    "old_log_probs",
    "values",
    "advantages",
    "pair_weight",
)


def as_list(field) -> list:
    return [getattr(value, "data", value) for value in field]


class Recorder(CheckpointCallback):
    """One JSON file a checkpoint: the rows in TransferQueue by key, and the live actors of the run."""

    def on_save(self, trainer, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs) -> None:
        items = (tq.kv_list("train") or {}).get("train", {})
        keys = [key for key, tag in items.items() if not tag.get("is_prompt", False)]
        rows = {}
        for key in keys:
            data = tq.kv_batch_get(keys=[key], partition_id="train")
            row = {name: data[name][0].tolist() for name in TENSORS if name in data.keys()}
            extra = as_list(data["extra_fields"])[0]
            rows[key] = {"tag": items[key], "token_versions": extra.get("token_versions"), **row}
        state = {
            "step": global_step,
            "rows": rows,
            "prompts": {key: tag for key, tag in items.items() if tag.get("is_prompt", False)},
            "actors": sorted(actor["name"] or "" for actor in ray.util.list_named_actors(all_namespaces=True)),
        }
        Path(checkpoint_dir, "recorded.json").write_text(json.dumps(state))
