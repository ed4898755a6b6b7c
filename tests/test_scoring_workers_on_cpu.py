"""The scoring workers in real Ray processes: critic and reference fused by verl into the same two workers."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import ray

from verl_oppo.scoring.scorer import Chunk, Trajectory

pytestmark = pytest.mark.timeout(900)

CASES_FOLDER = Path(__file__).parent / "fsdp_scoring"
TOLERANCE = 1e-5
SECONDS = 600
NUM_RANKS = 2


@pytest.fixture(scope="module")
def harness():
    """The tiny models and verl's plain path, as the cases of `test_fsdp_scoring_on_cpu.py` have them."""
    spec = importlib.util.spec_from_file_location("fsdp_scoring_harness", CASES_FOLDER / "harness.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def groups(shared_ray, harness, tmp_path_factory):
    """The worker groups "critic" and "actor_rollout_ref" of one pool, models loaded, as verl's trainer makes them."""
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls

    from verl_oppo.scoring.workers import ActorRolloutRefWorkerOppo, CriticWorkerOppo

    folder = tmp_path_factory.mktemp("models")
    harness.save_models(folder)
    roles = {
        "actor_rollout_ref": RayClassWithInitArgs(
            cls=ray.remote(ActorRolloutRefWorkerOppo),
            config=harness.trainer_config(folder).actor_rollout_ref,
            role="ref",
        ),
        "critic": RayClassWithInitArgs(
            cls=ray.remote(CriticWorkerOppo), config=harness.worker_config(folder / "value", "value_model")
        ),
    }
    group = RayWorkerGroup(
        resource_pool=RayResourcePool([NUM_RANKS], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=create_colocated_worker_cls(roles),
        device_name="cpu",
    )
    spawned = group.spawn(prefix_set=roles.keys())
    spawned["critic"].reset()
    spawned["actor_rollout_ref"].init_model()
    yield spawned
    for worker in group.workers:
        ray.kill(worker)


def answers(references: list) -> list:
    return ray.get(references, timeout=SECONDS)


@pytest.mark.parametrize(("role", "lookahead"), [("critic", 0), ("actor_rollout_ref", 1)])
def test_streamed_through_a_fused_worker_group_equals_its_plain_path(groups, harness, role, lookahead):
    group = groups[role]
    assert len(answers(group.oppo_setup(harness.settings()))) == NUM_RANKS
    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, harness.VOCAB_SIZE, length) for length in (40, 9, 66, 23)]
    of_rank = [sequences[:2], sequences[2:]]
    answers(group.oppo_stream_open())
    for call in range(5):
        cut = slice(16 * call, 16 * (call + 1))
        chunks = [
            [Chunk(f"{rank}/{row}", cut.start, ids[cut]) for row, ids in enumerate(rows) if len(ids) > cut.start]
            for rank, rows in enumerate(of_rank)
        ]
        answers(group.oppo_prefill(chunks))
    answers(group.oppo_stream_close())
    answers(group.oppo_drop(["1/1"]))
    replies = answers(
        group.oppo_score(
            [[Trajectory(f"{rank}/{row}", ids) for row, ids in enumerate(rows)] for rank, rows in enumerate(of_rank)]
        )
    )
    scored = [one for reply in replies for one in reply.scored]
    assert [one.cached_tokens for one in scored] == [40 - lookahead, 9 - lookahead, 66 - lookahead, 0]
    batch = harness.plain_batch(sequences)
    output = group.infer_batch(batch).get() if role == "critic" else group.compute_ref_log_prob(batch)
    expected = [row.numpy() for row in output["values" if role == "critic" else "log_probs"].unbind()]
    assert harness.largest_difference(scored, expected) <= TOLERANCE
    answers(group.oppo_invalidate())
    assert [stats.cache_bytes_allocated for stats in answers(group.oppo_stats())] == [0] * NUM_RANKS


def test_bad_input_is_a_value_error_of_every_rank_and_the_next_call_is_served(groups, harness):
    group = groups["critic"]
    answers(group.oppo_setup(harness.settings()))
    for reference in group.oppo_prefill([[], [Chunk("t7", 0, [harness.VOCAB_SIZE])]]):
        with pytest.raises(ValueError, match="rank 1 of the scorer: trajectory t7: token id 97"):
            ray.get(reference, timeout=SECONDS)
    (first, second) = answers(group.oppo_score([[Trajectory("a", [1, 2, 3])], []]))
    assert (len(first.scored), len(second.scored)) == (1, 0)


def test_bad_settings_are_a_value_error_at_start(groups, harness):
    with pytest.raises(ValueError, match=r"intra_step\.cache_bytes is 1, allowed is"):
        answers(groups["critic"].oppo_setup(harness.settings(cache_bytes=1)))
