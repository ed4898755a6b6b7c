"""Measures what the token tee costs: microseconds per token, and decode throughput against verl's stock server.

    python scripts/measure_tee.py [--pairs 100] [--requests 32] [--tokens 256] [--chunk-size 64]

One real engine (a tiny Qwen2 with random weights) decodes the same load in turn through verl's server as it is and
through the tee, whose chunks go to an actor in a process of its own; the order within a pair alternates. Prints a table
and ends with one line of JSON. Takes 8 minutes on 2 cores. The machine should be idle: the sink, the engine and this
process share its cores, so on a small one the loss is overstated, and single pairs differ by tens of per cent. Exit
status 1 when the upper bound of the loss is 5 % or more.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, TypeVar
from uuid import uuid4

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from verl_oppo.platform import cpu  # noqa: E402

cpu.export_environment()  # verl's import fixes its platform

import ray  # noqa: E402
from verl.workers.config import HFModelConfig, RolloutConfig  # noqa: E402
from verl.workers.rollout.replica import RolloutMode, TokenOutput  # noqa: E402

from verl_oppo.demo.models import ModelSettings, build_actor  # noqa: E402
from verl_oppo.demo.tokenizer import build_actor_tokenizer  # noqa: E402
from verl_oppo.rollout.tee import tag_request  # noqa: E402
from verl_oppo.rollout.vllm_server import TeeEngine, vLLMHttpServerOppo  # noqa: E402

ALLOWED_LOSS = 0.05
PROMPT_LENGTH = 32
CONFIDENCE = 0.95
START_S = 480
SHUTDOWN_S = 30
Result = TypeVar("Result")


def start_ray() -> None:
    """A local cluster whose workers find this package."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        _temp_dir=tempfile.mkdtemp(prefix="tee_"),
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        logging_level=logging.WARNING,
    )


class LocalServer:
    """A server of ours in this process, on an event loop in a thread of its own, as Ray runs it.

    Needs Ray. Invariant: after `close` the engine's processes are gone.
    """

    def __init__(self, model: Path, max_num_seqs: int, max_model_len: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="server")
        self._thread.start()
        self.vocab_size = save_model(model, max_model_len)
        self.server: vLLMHttpServerOppo = self.call(self._start(model, max_num_seqs, max_model_len), timeout_s=START_S)
        self.stock_engine = self.server.engine._engine
        self.tee_engine: TeeEngine = self.server.engine

    async def _start(self, model: Path, max_num_seqs: int, max_model_len: int) -> vLLMHttpServerOppo:
        config = RolloutConfig(
            name="vllm",
            tensor_model_parallel_size=1,
            dtype="float32",
            load_format="auto",
            enforce_eager=True,
            enable_sleep_mode=False,
            free_cache_engine=False,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.2,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_model_len,
            prompt_length=max_model_len // 2,
            response_length=max_model_len // 2,
        )
        server = vLLMHttpServerOppo(
            config=config,
            model_config=HFModelConfig(path=str(model)),
            rollout_mode=RolloutMode.STANDALONE,
            workers=[],
            replica_rank=0,
            node_rank=0,
            gpus_per_node=1,
            nnodes=1,
            cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        )
        await server.launch_server()
        return server

    def call(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float = 120) -> Result:
        """Run it on the server's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    async def _stop(self) -> None:
        self.server._server_task.cancel()
        self.stock_engine.shutdown(timeout=SHUTDOWN_S)

    def close(self) -> None:
        self.call(self._stop(), timeout_s=2 * SHUTDOWN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def save_model(folder: Path, max_positions: int) -> int:
    """Write an untrained model with its tokenizer; returns the size of the vocabulary."""
    tokenizer = build_actor_tokenizer()
    tokenizer.save_pretrained(folder)
    build_actor(ModelSettings(max_positions=max_positions), tokenizer).save_pretrained(folder)
    return len(tokenizer)


@ray.remote(num_cpus=0)
class CountingSink:
    """Takes chunks and keeps nothing of them but their number."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def push(self, chunks: list[Any]) -> None:
        self._num_tokens += sum(len(chunk.token_ids) for chunk in chunks)

    def num_tokens(self) -> int:
        return self._num_tokens


@dataclass
class Run:
    """One load through one of the two paths. CPU seconds are those of the process that holds the server."""

    tokens: int
    seconds: float
    cpu_seconds: float
    tee_seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.cpu_seconds / self.tokens

    @property
    def tee_us_per_token(self) -> float:
        return 1e6 * self.tee_seconds / self.tokens


async def decode(server: vLLMHttpServerOppo, prompt: list[int], num_tokens: int, request_id: str) -> TokenOutput:
    sampling_params = {"temperature": 1.0, "ignore_eos": True, "max_tokens": num_tokens, "logprobs": True}
    return await server.generate(prompt_ids=prompt, sampling_params=sampling_params, request_id=request_id)


def measure(local: LocalServer, with_tee: bool, num_requests: int, num_tokens: int, rng: random.Random) -> Run:
    local.server.engine = local.tee_engine if with_tee else local.stock_engine
    prompts = [rng.choices(range(local.vocab_size), k=PROMPT_LENGTH) for _ in range(num_requests)]

    async def load() -> list[TokenOutput]:
        ids = [uuid4().hex for _ in prompts]
        if with_tee:
            ids = [tag_request(each, uid=uuid4().hex, session_id=0) for each in ids]
        pairs = zip(prompts, ids, strict=True)
        return await asyncio.gather(*(decode(local.server, prompt, num_tokens, each) for prompt, each in pairs))

    tee_seconds = local.call(local.server.stream_stats())["seconds"]
    started, cpu_started = time.perf_counter(), time.process_time()
    outputs = local.call(load(), timeout_s=120)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    tee_seconds = local.call(local.server.stream_stats())["seconds"] - tee_seconds
    return Run(sum(len(output.token_ids) for output in outputs), seconds, cpu_seconds, tee_seconds)


def upper_bound(samples: Sequence[float]) -> float:
    """Upper end of the two-sided 95 % confidence interval of the mean.

    Student's t from the normal quantile (Abramowitz and Stegun 26.7.5, two terms; 0.1 % low at 10 samples).
    """
    if len(samples) < 2:
        raise ValueError(f"a confidence interval of {len(samples)} samples, allowed is 2 or more")
    degrees = len(samples) - 1
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return fmean(samples) + t * stdev(samples) / len(samples) ** 0.5


def summarize(pairs: list[tuple[Run, Run]], stats: dict[str, Any]) -> dict[str, Any]:
    """`pairs` are (stock, tee). A loss is the fraction of the stock path's throughput, above 0 if the tee is slower."""
    losses = [1 - tee.tokens_per_s / stock.tokens_per_s for stock, tee in pairs]
    extra_cpu = [tee.cpu_us_per_token - stock.cpu_us_per_token for stock, tee in pairs]
    return {
        "pairs": len(pairs),
        "stock_tokens_per_s": round(fmean(stock.tokens_per_s for stock, _ in pairs), 1),
        "tee_tokens_per_s": round(fmean(tee.tokens_per_s for _, tee in pairs), 1),
        "loss_mean": round(fmean(losses), 4),
        "loss_upper_95": round(upper_bound(losses), 4),
        "loss_allowed": ALLOWED_LOSS,
        "tee_us_per_token": round(fmean(tee.tee_us_per_token for _, tee in pairs), 3),
        "extra_cpu_us_per_token": round(fmean(extra_cpu), 3),
        "extra_cpu_us_per_token_upper_95": round(upper_bound(extra_cpu), 3),
        "stock_cpu_us_per_token": round(fmean(stock.cpu_us_per_token for stock, _ in pairs), 2),
        "chunks_pushed": stats["chunks_pushed"],
        "chunks_dropped": stats["chunks_dropped"],
        "load_average": round(os.getloadavg()[0], 2),
    }


def print_pairs(pairs: list[tuple[Run, Run]]) -> None:
    print(f"{'pair':>4} {'stock tok/s':>12} {'tee tok/s':>12} {'loss':>8} {'tee us/tok':>11} {'extra CPU us/tok':>17}")
    for index, (stock, tee) in enumerate(pairs):
        loss = 1 - tee.tokens_per_s / stock.tokens_per_s
        extra_cpu = tee.cpu_us_per_token - stock.cpu_us_per_token
        print(
            f"{index:>4} {stock.tokens_per_s:>12.0f} {tee.tokens_per_s:>12.0f} {loss:>8.2%} "
            f"{tee.tee_us_per_token:>11.3f} {extra_cpu:>17.2f}"
        )


def run_pairs(local: LocalServer, arguments: argparse.Namespace) -> list[tuple[Run, Run]]:
    rng = random.Random(0)

    def one(with_tee: bool) -> Run:
        return measure(local, with_tee, arguments.requests, arguments.tokens, rng)

    for with_tee in (False, True):  # the first load compiles
        one(with_tee)
    pairs = []
    for index in range(arguments.pairs):
        order = (False, True) if index % 2 == 0 else (True, False)
        runs = {with_tee: one(with_tee) for with_tee in order}
        pairs.append((runs[False], runs[True]))
    return pairs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--requests", type=int, default=32, help="requests that decode at once")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each response")
    parser.add_argument("--chunk-size", type=int, default=64)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    start_ray()
    local = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            local = LocalServer(Path(folder), arguments.requests, max_model_len=2 * (PROMPT_LENGTH + arguments.tokens))
            sink = CountingSink.remote()
            ray.get(sink.num_tokens.remote(), timeout=60)
            local.call(local.server.connect_stream(sink, arguments.chunk_size))
            pairs = run_pairs(local, arguments)
            summary = summarize(pairs, local.call(local.server.stream_stats()))
    finally:
        if local is not None:
            local.close()
        ray.shutdown()
    print_pairs(pairs)
    print(json.dumps({**vars(arguments), **summary}))
    return 0 if summary["loss_upper_95"] < ALLOWED_LOSS else 1


if __name__ == "__main__":
    sys.exit(main())
