"""A real vLLM engine with a reward model, fed through the stream service; leaves what was seen as JSON.

    python tests/reward_scoring/vllm_engine.py FOLDER

Only Ray is left out: the server's calls go to this process. Started once by `test_vllm_reward_on_cpu.py`.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_oppo.platform import cpu

cpu.export_environment()

import numpy as np  # noqa: E402
from reward_models import MESSAGES, actor_prompt, hf_score, responses, save_reward_model, save_tokenizers  # noqa: E402
from vllm import PoolingParams  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402

from verl_oppo.scoring.reward_input import RewardInput, RewardInputTranslator  # noqa: E402
from verl_oppo.scoring.scorer import Chunk, Trajectory  # noqa: E402
from verl_oppo.scoring.vllm_reward import VllmRewardTarget  # noqa: E402
from verl_oppo.scoring.vllm_reward_server import RewardServerMethods  # noqa: E402
from verl_oppo.stream.consumer import ConsumerSettings  # noqa: E402
from verl_oppo.stream.service import StreamService  # noqa: E402

BLOCK_SIZE, CONTEXT = 32, 640
LENGTHS = (5, 90, 200, 330)


class Server(RewardServerMethods):
    """The server's calls, without Ray and HTTP; `prefilled` are the lengths that were asked for."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self.prefilled: dict[str, list[int]] = {}

    async def oppo_prefill(self, prefixes: dict[str, np.ndarray]) -> dict[str, int]:
        for name, ids in prefixes.items():
            self.prefilled.setdefault(name, []).append(len(ids))
        return await super().oppo_prefill(prefixes)

    async def clear_kv_cache(self) -> None:
        await self.engine.reset_prefix_cache()


class Handle:
    """Calls the server as its actor handle would."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._server, name))


def chunked(name: str, ids: np.ndarray, prompt_length: int, size: int) -> Iterator[Chunk]:
    """As the token tee cuts: the first chunk brings the prompt."""
    bounds = [0, *range(prompt_length + size, len(ids), size), len(ids)]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        yield Chunk(name, start, ids[start:stop])


async def plain_score(engine: AsyncLLM, ids: np.ndarray) -> float:
    """A request that reads nothing from the prefix cache."""
    params = PoolingParams(task="classify", use_activation=False, skip_reading_prefix_cache=True)
    prompt = TokensPrompt(prompt_token_ids=ids.tolist())
    outputs = [output async for output in engine.encode(prompt, params, f"plain-{id(ids)}")]
    assert outputs[-1].num_cached_tokens == 0
    return float(outputs[-1].outputs.data[-1])


async def served_ids(engine: AsyncLLM, text: str) -> list[int]:
    """The token ids that vLLM makes of an input text."""
    params = PoolingParams(task="classify", use_activation=False)
    outputs = [output async for output in engine.encode(text, params, f"text-{id(text)}")]
    return list(outputs[-1].prompt_token_ids)


async def stream(engine: AsyncLLM, folder: Path) -> dict[str, Any]:
    actor_path, reward_path = folder / "actor", folder / "reward"
    reward_input = RewardInput.from_paths(str(actor_path), str(reward_path))
    server = Server(engine)
    info = await server.oppo_describe()
    target = VllmRewardTarget([Handle(server)], [info])
    service = StreamService()
    translator = RewardInputTranslator(str(actor_path), str(reward_path))
    await service.add_consumer("reward", target, ConsumerSettings(), translator)
    await service.open(["reward"])
    prompt = actor_prompt(reward_input.actor_tokenizer)
    response_ids = responses(reward_input.actor_tokenizer, LENGTHS)
    names = [f"prompt{index}_0" for index in range(len(LENGTHS))]
    for index, (name, response) in enumerate(zip(names, response_ids, strict=True)):
        await service.register_prompt(f"prompt{index}", MESSAGES)
        for chunk in chunked(name, np.concatenate([prompt, response]), len(prompt), size=16):
            await service.push([chunk])
            await drained(service)
    texts = [reward_input.text(MESSAGES, response) for response in response_ids]
    final = [reward_input.token_ids(text) for text in texts]
    # A prefix that the final input contradicts: another trajectory's.
    await target.prefill([[Chunk("wrong_0", 0, np.concatenate([final[-1][:300], final[2]]))]])
    scored = await service.score("reward", [Trajectory(*pair) for pair in zip(names, final, strict=True)])
    wrong = await service.score("reward", [Trajectory("wrong_0", final[-1])])
    too_long = await error_of(service.score("reward", [Trajectory("long_0", np.resize(final[-1], CONTEXT))]))
    over = await target.prefill([[Chunk("over_0", 0, np.resize(final[-1], CONTEXT + 200))]])
    longest = np.resize(final[-1], CONTEXT - 1)
    full = await service.score("reward", [Trajectory("full_0", longest)])
    still_served = await service.score("reward", [Trajectory("again_0", final[0])])
    return {
        "info": vars(info),
        "served_ids": [await served_ids(engine, text) == ids.tolist() for text, ids in zip(texts, final, strict=True)],
        "lengths": [len(ids) for ids in final],
        "spans": [reward_input.response_span(MESSAGES, ids) for ids in final],
        "prefilled": [server.prefilled.get(name, []) for name in names],
        "scores": [one.last for one in scored],
        "cached": [one.cached_tokens for one in scored],
        "plain": [await plain_score(engine, ids) for ids in final],
        "wrong": wrong[0].last,
        "wrong_cached": wrong[0].cached_tokens,
        "too_long": too_long,
        "over": over[0].cached,
        "full": full[0].last,
        "full_plain": await plain_score(engine, longest),
        "again": still_served[0].last,
        "failure": None if service._consumers["reward"].pump.failure is None else "broken",
        "final": [ids.tolist() for ids in final],
    }


async def drained(service: StreamService) -> None:
    """Waits until what was pushed has been prefilled; a closed pump has no call in flight."""
    while service._consumers["reward"].pump.stats(reset=False).tokens_waiting:
        await asyncio.sleep(0.001)
    await service.close(["reward"], timeout_s=60)
    await service.open(["reward"])


async def error_of(call: Any) -> str:
    try:
        await call
    except ValueError as error:
        return str(error)
    return "no ValueError"


async def run(folder: Path) -> dict[str, Any]:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder / "reward"),
            dtype="float32",
            max_model_len=CONTEXT,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            block_size=BLOCK_SIZE,
            enforce_eager=True,
            model_impl="vllm",
        )
    )
    try:
        return await stream(engine, folder)
    finally:
        engine.shutdown()


def main(folder: Path) -> None:
    save_tokenizers(folder)
    model = save_reward_model(folder / "reward")
    seen = asyncio.run(run(folder))
    seen["transformers"] = [hf_score(model, np.array(ids)) for ids in seen.pop("final")]
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
