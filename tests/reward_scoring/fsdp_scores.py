"""Scores of an FSDP reward model that was fed translated chunks, and those of the model itself, as JSON.

    python tests/reward_scoring/fsdp_scores.py FOLDER

The reward model's tokenizer and template differ from the actor's. Started once by `test_reward_input_on_cpu.py`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from verl_oppo.platform import cpu

cpu.export_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from reward_models import MESSAGES, actor_prompt, hf_score, responses, save_reward_model, save_tokenizers  # noqa: E402
from verl.workers.config import RewardModelConfig, RolloutConfig  # noqa: E402

from verl_oppo.scoring.reward_input import RewardInput, RewardInputTranslator  # noqa: E402
from verl_oppo.scoring.scorer import Chunk, ScorerSettings, Trajectory  # noqa: E402
from verl_oppo.scoring.workers import RewardWorkerOppo, reward_worker_config  # noqa: E402

LENGTHS = (2, 30, 75, 140)


class Stream:
    """One reward worker, fed by a translator of its own for each case."""

    def __init__(self, folder: Path) -> None:
        self.paths = str(folder / "actor"), str(folder / "reward")
        self.input = RewardInput.from_paths(*self.paths)
        self.prompt = actor_prompt(self.input.actor_tokenizer)
        self.responses = responses(self.input.actor_tokenizer, LENGTHS)
        self.final = [self.input.token_ids(self.input.text(MESSAGES, ids)) for ids in self.responses]
        rollout = RolloutConfig(name="vllm", dtype="float32")
        config = RewardModelConfig(enable=True, model_path=self.paths[1], rollout=rollout)
        self.worker = RewardWorkerOppo(reward_worker_config(config))
        self.worker.reset()
        self.worker.oppo_setup(ScorerSettings(cache_bytes=8 << 20, longest_trajectory=512, block_size=16))

    def case(self, size: int, messages: list[dict[str, str]] | None) -> dict[str, Any]:
        """Streams all trajectories side by side in chunks of `size` generated tokens, then scores the final inputs."""
        translator = RewardInputTranslator(*self.paths)
        names = [f"prompt{index}_0" for index in range(len(LENGTHS))]
        for index in range(len(LENGTHS)):
            if messages is not None:
                translator.register_prompt(f"prompt{index}", messages, len(self.prompt))
        for start in range(0, max(LENGTHS), size):
            chunks = [
                self.actor_chunk(name, response, start, size)
                for name, response in zip(names, self.responses, strict=True)
                if start < len(response)
            ]
            self.worker.oppo_prefill([one for chunk in chunks for one in translator.translate(chunk)])
        reply = self.worker.oppo_score([Trajectory(*pair) for pair in zip(names, self.final, strict=True)])
        return {"scores": [one.last for one in reply.scored], "cached": [one.cached_tokens for one in reply.scored]}

    def actor_chunk(self, name: str, response: np.ndarray, start: int, size: int) -> Chunk:
        new = response[start : start + size]
        if start == 0:
            return Chunk(name, 0, np.concatenate([self.prompt, new]))
        return Chunk(name, len(self.prompt) + start, new)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # verl's Worker reads them; the process group takes the file.
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)
    save_tokenizers(folder)
    model = save_reward_model(folder / "reward")
    stream = Stream(folder)
    whole = np.concatenate([stream.prompt, stream.responses[1]])
    seen = {
        "expected": [hf_score(model, ids) for ids in stream.final],
        "lengths": [len(ids) for ids in stream.final],
        "tokens_differ": whole.tolist() != stream.final[1].tolist(),
        "cases": {f"chunks of {size}": stream.case(size, MESSAGES) for size in (1, 7, 64, 1000)},
    }
    other = [{"role": "user", "content": "sport 9"}]
    seen["cases"]["of another prompt"] = stream.case(7, other)
    seen["cases"]["nothing streamed"] = stream.case(7, None)
    torch.distributed.destroy_process_group()
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
