"""The cases of `test_fsdp_scoring_on_cpu.py`, by name: each returns the numbers that the test judges.

A case asserts what must hold exactly (what was cached, how many forwards) and returns differences from verl's plain
path. All ranks run the same case with sequences of their own. Some of them serve `megatron_scoring` too, where a rank
has the plain path of transformers.
"""

from typing import Any

import numpy as np
import torch
from harness import (
    VOCAB_SIZE,
    Rank,
    chunked,
    hf_scores,
    largest_difference,
    plain,
    plain_batch,
    plain_in_all_modes,
    prefill,
    score,
    settings,
)

from verl_oppo.scoring.scorer import Chunk, Scored, Trajectory
from verl_oppo.scoring.workers import ScoringTrainingWorker

Result = dict[str, Any]


def setup(rank: Rank, name: str, **fields: Any) -> ScoringTrainingWorker:
    """The worker of that name with a fresh scorer; `reference07` is the reference at temperature 0.7."""
    worker = rank.worker(name.removesuffix("07"))
    worker.oppo_setup(settings(temperature=temperature_of(name), **fields))
    return worker


def temperature_of(name: str) -> float:
    return 0.7 if name.endswith("07") else 1.0


def lookahead(worker: ScoringTrainingWorker) -> int:
    return int(getattr(worker.config, "model_type", None) == "language_model")


def compared(rank: Rank, name: str, scored: list[Scored]) -> Result:
    """Against verl's plain path in all its modes, on the sequences of this rank."""
    expected = rank.expected(name.removesuffix("07"), temperature_of(name))
    return {"difference": max(largest_difference(scored, rows) for rows in expected)}


def chunks(rank: Rank, name: str, size: str) -> Result:
    """Everything streamed: the final call has nothing left to compute."""
    worker = setup(rank, name)
    longest = max(len(ids) for ids in rank.sequences)
    prefill(worker, chunked(rank.sequences, longest if size == "whole" else int(size)))
    reply = score(worker, rank.sequences)
    assert [one.cached_tokens for one in reply.scored] == [len(ids) - lookahead(worker) for ids in rank.sequences]
    assert (reply.report.tokens_computed, reply.report.forwards) == (0, 0)
    assert worker.oppo_stats().cached_trajectories == 0, "what is scored gives its blocks back"
    return compared(rank, name, reply.scored)


def unstreamed(rank: Rank, name: str) -> Result:
    """Nothing streamed: the final call computes all, in forwards of at most 64 tokens, longer rows in several."""
    worker = setup(rank, name, max_tokens_per_forward=64, max_context_per_forward=128)
    reply = score(worker, rank.sequences)
    assert {one.cached_tokens for one in reply.scored} == {0}
    assert reply.report.tokens_computed == sum(len(ids) - lookahead(worker) for ids in rank.sequences)
    assert reply.report.forwards >= 4
    return compared(rank, name, reply.scored) | {"forwards": reply.report.forwards}


def shortened(chunk: Chunk, length: int) -> Chunk:
    return Chunk(chunk.trajectory_id, chunk.offset, chunk.token_ids[:length])


def disturbed(rank: Rank, name: str, how: str) -> Result:
    """Chunks of 16 that do not arrive as they should; `known`: tokens that are right and without a gap before them."""
    worker = setup(rank, name)
    lengths = [len(ids) for ids in rank.sequences]
    calls = chunked(rank.sequences, 16)
    if how == "dropped":
        del calls[1]
        known = [min(16, length) for length in lengths]
    elif how == "doubled":
        calls = [call + call for call in calls for _ in range(2)]
        known = lengths
    elif how == "reordered":
        calls[1], calls[2] = calls[2], calls[1]
        known = [min(32, length) for length in lengths]
    elif how == "shuffled":
        calls = [[chunk for call in reversed(calls) for chunk in call]]
        known = lengths
    elif how == "retokenised":
        calls[1] = [Chunk(each.trajectory_id, 16, (each.token_ids + 1) % VOCAB_SIZE) for each in calls[1]]
        known = [min(16, length) for length in lengths]
    elif how == "restarted":
        calls = chunked(rank.random_sequences(seed=1), 16) + calls
        known = lengths
    elif how == "aborted":
        calls = [calls[0], [shortened(each, 10) for each in calls[1]]]
        known = [min(26, length) for length in lengths]
    else:
        assert how == "resumed"
        resumed = [Chunk(str(index), 26, ids[26:]) for index, ids in enumerate(rank.sequences) if len(ids) > 26]
        calls = [calls[0], [shortened(each, 10) for each in calls[1]], resumed]
        known = lengths
    prefill(worker, calls)
    reply = score(worker, rank.sequences)
    assert [one.cached_tokens for one in reply.scored] == [length - lookahead(worker) for length in known]
    return compared(rank, name, reply.scored)


def evicted(rank: Rank, name: str) -> Result:
    """A cache of 8 blocks for sequences of 12: trajectories lose theirs while chunks come and while they are scored."""
    block_bytes = 16 * setup(rank, name).oppo_stats().bytes_per_token
    worker = setup(rank, name, cache_bytes=9 * block_bytes, max_tokens_per_forward=64)
    for call in chunked(rank.sequences, 16):
        for chunk in call:
            worker.oppo_prefill([chunk])
    stats = worker.oppo_stats()
    assert stats.prefill.evicted > 0 and stats.cache_bytes_allocated <= stats.cache_bytes_limit
    together = worker.oppo_prefill(chunked(rank.sequences, 1000)[0])
    assert together.report.tokens_without_room > 0 and together.report.evicted == 0
    reply = score(worker, rank.sequences)
    assert reply.report.tokens_cached == sum(one.cached_tokens for one in reply.scored)
    assert reply.report.tokens_cached + reply.report.tokens_computed >= sum(
        len(ids) - lookahead(worker) for ids in rank.sequences
    )
    assert worker.oppo_stats().cache_bytes_used == 0
    return compared(rank, name, reply.scored)


def carried(rank: Rank, name: str) -> Result:
    """Two trajectories finish in step 1, two are carried with half their tokens and finish in step 2."""
    worker = setup(rank, name)
    first, second = rank.sequences[:2], rank.sequences[2:]
    prefill(worker, chunked(first, 16, ["a", "b"]))
    prefill(worker, chunked([ids[:35] for ids in second], 16, ["c", "d"]))
    finished = score(worker, first, ["a", "b"])
    assert sum(one.cached_tokens for one in finished.scored) == sum(len(ids) - lookahead(worker) for ids in first)
    # A resumed request is a new one on prompt + partial: everything comes once more, in chunks cut elsewhere.
    replies = prefill(worker, chunked(second, 20, ["c", "d"]))
    new = sum(len(ids) - 35 for ids in second)
    assert sum(reply.report.tokens_computed for reply in replies) == new
    reply = score(worker, second, ["c", "d"])
    assert reply.report.tokens_computed == 0
    return compared(rank, name, finished.scored + reply.scored)


def updated(rank: Rank) -> Result:
    """The critic learns while two trajectories are carried: nothing of the old critic is left."""
    worker = setup(rank, "critic_trained")
    before = plain(worker, rank.sequences)
    prefill(worker, chunked([ids[:35] for ids in rank.sequences], 16))
    assert worker.oppo_stats().cached_tokens > 0
    train(worker, rank)
    stats = worker.oppo_stats()
    assert (stats.cached_tokens, stats.cache_bytes_allocated) == (0, 0)
    prefill(worker, chunked(rank.sequences, 16))
    reply = score(worker, rank.sequences)
    assert {one.cached_tokens for one in reply.scored} == {len(ids) for ids in rank.sequences}
    assert largest_difference(reply.scored, before) > 1e-2, "the update must be one that a stale cache would show"
    expected = plain_in_all_modes(worker, rank.sequences, 1.0)
    return {"difference": max(largest_difference(reply.scored, rows) for rows in expected)}


def train(worker: ScoringTrainingWorker, rank: Rank) -> None:
    """One optimizer step of verl's own `train_mini_batch`."""

    def loss(model_output: dict[str, torch.Tensor], data: Any, dp_group: Any) -> tuple[torch.Tensor, dict]:
        return model_output["values"].values().square().mean(), {}

    worker.set_loss_fn(loss)
    mini_batch_size = len(rank.sequences) * rank.world_size
    worker.train_mini_batch(plain_batch(rank.sequences, mini_batch_size=mini_batch_size, epochs=1))


def reloaded(rank: Rank) -> Result:
    """Loading a checkpoint changes the weights too."""
    worker = setup(rank, "critic_trained")
    before = plain(worker, rank.sequences)
    worker.save_checkpoint(str(rank.folder / "checkpoint"))
    train(worker, rank)
    prefill(worker, chunked(rank.sequences, 16))
    worker.load_checkpoint(str(rank.folder / "checkpoint"))
    reply = score(worker, rank.sequences)
    assert {one.cached_tokens for one in reply.scored} == {0}
    return {"difference": largest_difference(reply.scored, before)}


def reward(rank: Rank) -> Result:
    """A sequence classification model on the value engine: the value at the last token is its score."""
    worker = setup(rank, "reward")
    prefill(worker, chunked([ids[:-2] for ids in rank.sequences], 16))
    reply = score(worker, rank.sequences)
    assert reply.report.tokens_computed == 2 * len(rank.sequences)
    scores = np.array([one.last for one in reply.scored])
    expected = np.array(hf_scores(rank.folder, rank.sequences))
    return {
        **compared(rank, "reward", reply.scored),
        "difference_from_transformers": float(np.max(np.abs(scores - expected) / np.maximum(1, np.abs(expected)))),
    }


def uneven(rank: Rank) -> Result:
    """Ranks with more work, less work and none run the same number of forwards."""
    worker = setup(rank, "critic", max_tokens_per_forward=32)
    mine = rank.sequences if rank.index == 0 else []
    report = worker.oppo_prefill(chunked(mine, 1000)[0] if mine else []).report
    scored = worker.oppo_score([Trajectory("x", rank.sequences[1])] if rank.index > 0 else [])
    forwards = torch.tensor([report.forwards, scored.report.forwards])
    others = forwards.clone()
    torch.distributed.broadcast(others, src=0)
    assert torch.equal(forwards, others) and report.forwards >= sum(len(ids) for ids in mine) // 32
    full = score(worker, rank.sequences)
    return compared(rank, "critic", full.scored)


def refused_input(rank: Rank) -> Result:
    """What one rank refuses ends the call on all ranks at once; the next call is served."""
    worker = setup(rank, "critic")
    ids = rank.sequences[1]
    bad = {
        "token id": lambda: worker.oppo_prefill([Chunk("t7", 0, [1, VOCAB_SIZE])]),
        "offset": lambda: worker.oppo_prefill([Chunk("t7", -1, [1])]),
        "list": lambda: worker.oppo_prefill([Chunk("t7", 0, [[1]])]),
        "too long": lambda: worker.oppo_prefill([Chunk("t7", 100, [1] * 29)]),
        "empty": lambda: worker.oppo_score([Trajectory("t7", [])]),
        "negative": lambda: worker.oppo_score([Trajectory("t7", [-1])]),
        "long": lambda: worker.oppo_score([Trajectory("t7", [1] * 129)]),
        "twice": lambda: worker.oppo_score([Trajectory("t7", ids), Trajectory("t7", ids)]),
    }
    good = {True: lambda: worker.oppo_score([]), False: lambda: worker.oppo_prefill([])}
    messages = {}
    for what, call in bad.items():
        is_score = what in ("empty", "negative", "long", "twice")
        try:
            call() if rank.index == rank.world_size - 1 else good[is_score]()
        except ValueError as error:
            messages[what] = str(error)
    return {"messages": messages} | compared(rank, "critic", score(worker, rank.sequences).scored)


def short(rank: Rank, name: str) -> Result:
    """Sequences of 1 and 2 tokens: a log-prob needs a token before it."""
    worker = setup(rank, name)
    sequences = [ids[:length] for ids, length in zip(rank.sequences, (1, 2, 1, 2), strict=True)]
    prefill(worker, chunked(sequences, 1))
    reply = score(worker, sequences)
    assert [len(one.outputs) for one in reply.scored] == [length - lookahead(worker) for length in (1, 2, 1, 2)]
    expected = plain_in_all_modes(worker, sequences, temperature_of(name))
    return {"difference": max(largest_difference(reply.scored, rows) for rows in expected)}


def offloaded(rank: Rank) -> Result:
    """Weights are moved when the stream opens and closes and not in between, and by verl's own calls as ever."""
    worker = setup(rank, "critic_offloaded")
    moves: list[str] = []
    engine_to = worker.engine.to

    def recorded(device: str, **kwargs: bool) -> None:
        moves.append("cpu" if moves and len(moves) % 2 else "device")
        engine_to(device, **kwargs)

    worker.engine.to = recorded
    worker.oppo_stream_open()
    prefill(worker, chunked(rank.sequences, 16))
    reply = score(worker, rank.sequences)
    during = len(moves)
    worker.oppo_stream_close()
    worker.oppo_stream_close()
    after = len(moves)
    prefill(worker, chunked(rank.sequences, 1000))
    assert (during, after, len(moves)) == (1, 2, 4)
    worker.engine.to = engine_to
    return compared(rank, "critic_offloaded", reply.scored)


def bfloat16(rank: Rank) -> Result:
    """Streamed values against the plain path's own noise: padded against packed batches."""
    worker = setup(rank, "critic_bf16")
    prefill(worker, chunked(rank.sequences, 16))
    cached_bytes = worker.oppo_stats().bytes_per_token
    scored = score(worker, rank.sequences).scored
    padded = plain(worker, rank.sequences)
    noise = [
        np.max(np.abs(one - other) / np.maximum(1, np.abs(one)))
        for one, other in zip(padded, plain(worker, rank.sequences, use_remove_padding=True), strict=True)
    ]
    return {
        "difference": largest_difference(scored, padded),
        "noise": float(max(noise)),
        "bytes_per_token": cached_bytes,
    }
