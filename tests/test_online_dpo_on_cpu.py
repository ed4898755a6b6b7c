"""Online DPO without an engine: which pairs, in which order and weight, what is sent to the actor, what is refused.

Loss and gradient through verl's own worker on 1 and 2 ranks: `test_fsdp_scoring_on_cpu.py`.
"""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload

from verl_oppo import main_ppo
from verl_oppo.algorithms.dpo_loss import PAIR_SIZE, PAIR_WEIGHT, dpo_loss
from verl_oppo.algorithms.online_dpo import OnlineDPO, check_mini_batch, update_metrics
from verl_oppo.algorithms.pairs import Pair, balance_pairs, choose_pairs, mini_batch_of, pair_weights
from verl_oppo.algorithms.registry import ALGORITHMS, load_algorithm
from verl_oppo.config.schema import OnlineDPOConfig, OppoConfig
from verl_oppo.trainer.support import apply_algorithm_preset, load_oppo_config

pytestmark = pytest.mark.timeout(300)

ALGORITHM = "trainer.v1.oppo.algorithm=online_dpo"
ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.name=vllm"


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


# ---------------------------------- pairs ----------------------------------


def test_the_best_row_is_chosen_and_the_worst_rejected():
    scores = {"a_0_0": 0.5, "a_1_0": -1.0, "a_2_0": 2.0, "b_1_0": 0.0, "b_0_0": 1.0}
    assert choose_pairs(scores) == [Pair("a_2_0", "a_1_0"), Pair("b_0_0", "b_1_0")]


def test_among_equals_the_lower_session_counts_and_equal_scores_are_a_tie():
    scores = {"a_2_0": 1.0, "a_0_0": 0.0, "a_1_0": 1.0, "a_3_0": 0.0, "b_1_0": 3.0, "b_0_0": 3.0, "b_10_0": 3.0}
    assert choose_pairs(scores) == [Pair("a_1_0", "a_0_0"), Pair("b_0_0", "b_1_0", tie=True)]


def test_a_prompt_with_one_row_has_no_pair_and_several_outputs_a_session_are_refused():
    assert choose_pairs({"a_0_0": 1.0}) == []
    with pytest.raises(ValueError, match="row a_1_1 is output 1 of its session; online DPO allows one"):
        choose_pairs({"a_0_0": 1.0, "a_1_0": 0.0, "a_1_1": 0.0})


LENGTHS = st.tuples(st.integers(1, 400), st.integers(1, 400))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_pairs_are_balanced_whole_and_their_weights_make_the_mean_of_each_minibatch(ranks, per_rank, minis, data):
    num_pairs = ranks * per_rank * minis
    lengths = data.draw(st.lists(LENGTHS, min_size=num_pairs, max_size=num_pairs))
    trained = data.draw(st.lists(st.booleans(), min_size=num_pairs, max_size=num_pairs))
    order = balance_pairs(lengths, ranks)
    assert sorted(order) == list(range(num_pairs))
    weights, counts = pair_weights([trained[index] for index in order], ranks, ranks * per_rank)
    assert sum(counts) == sum(trained)
    sums = [0.0] * minis
    for position, (index, weight) in enumerate(zip(order, weights, strict=True)):
        mini = mini_batch_of(position, num_pairs, ranks, ranks * per_rank)
        assert weight == (1.0 / counts[mini] if trained[index] else 0.0)
        sums[mini] += weight
    assert all(math.isclose(total, 1.0) if count else total == 0.0 for total, count in zip(sums, counts, strict=True))


def test_ranks_get_about_the_same_work():
    lengths = [(10 * i, 400 - 7 * i) for i in range(1, 33)]
    work = calculate_workload(torch.tensor(lengths)).sum(dim=1)
    order = balance_pairs(lengths, 4)
    parts = [float(work[order[rank * 8 : rank * 8 + 8]].sum()) for rank in range(4)]
    assert max(parts) < 1.05 * min(parts)


# ---------------------------------- the loss alone ----------------------------------


@pytest.mark.parametrize(
    "config",
    [OnlineDPOConfig(beta=0.3), OnlineDPOConfig(label_smoothing=0.1), OnlineDPOConfig(beta=0.7, loss_type="ipo")],
    ids=["sigmoid", "smoothed", "ipo"],
)
def test_the_loss_and_its_gradient_are_exact_in_float64(config):
    generator = torch.Generator().manual_seed(0)
    lengths, prompt = [3, 5, 2, 4, 1, 6], 2
    rows = [torch.randn(prompt + length, dtype=torch.float64, generator=generator) for length in lengths]
    refs = [torch.randn(length, dtype=torch.float64, generator=generator) for length in lengths]
    masks = [torch.ones(length, dtype=torch.int64) for length in lengths]
    masks[1][2] = 0  # A token of a tool.
    weights = [0.5, 0.5, 0.0]

    ours = jagged(rows).detach().requires_grad_()
    ids = [torch.zeros(length, dtype=torch.int64) for length in lengths]
    fields = {"prompts": jagged([torch.zeros(prompt, dtype=torch.int64)] * 6), "responses": jagged(ids)}
    fields |= {"response_mask": jagged(masks), "ref_log_prob": jagged(refs)}
    data = TensorDict(fields | {PAIR_WEIGHT: torch.tensor(weights).repeat_interleave(2)}, batch_size=6)
    tu.assign_non_tensor(data, dp_size=2)
    loss, metrics = dpo_loss(config, {"log_probs": ours}, data)
    loss.backward()

    theirs = [row.clone().requires_grad_() for row in rows]
    expected = torch.zeros((), dtype=torch.float64)
    for i, weight in enumerate(weights):
        ratios = []
        for row in (2 * i, 2 * i + 1):
            ratio = ((theirs[row][prompt - 1 : -1] - refs[row]) * masks[row]).sum()
            ratios.append(ratio / masks[row].sum() if config.loss_type == "ipo" else ratio)
        difference = ratios[0] - ratios[1]
        p = torch.sigmoid(config.beta * difference)
        smooth = config.label_smoothing
        pair = (difference - 0.5 / config.beta) ** 2
        if config.loss_type == "sigmoid":
            pair = -(1 - smooth) * torch.log(p) - smooth * torch.log(1 - p)
        expected = expected + 2 * weight * pair
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = torch.cat([row.grad for row in theirs])
    assert torch.allclose(ours.grad.values(), gradients, rtol=0, atol=1e-12) and float(gradients.abs().max()) > 0.01
    assert not gradients[-9:].any(), "the pair of weight 0 is not trained"
    assert metrics["rewards/margins"].aggregate() == pytest.approx(
        metrics["rewards/chosen"].aggregate() - metrics["rewards/rejected"].aggregate()
    )


def test_metrics_are_means_over_pairs_and_keep_the_fields_names():
    output = {"loss": [1.0, 4.0], "rewards/margins": [0.0, 3.0], "grad_norm": [1.0, 2.0], "lr": [1e-3], "mfu": [0.5]}
    assert update_metrics(output, counts=[1, 2]) == {
        "loss": 3.0,
        "rewards/margins": 2.0,
        "actor/grad_norm": 1.5,
        "actor/lr": 1e-3,
        "perf/mfu/actor": 0.5,
    }
    assert update_metrics({"loss": [0.0], "lr": [0.1]}, counts=[0]) == {"actor/lr": 0.1}


# ---------------------------------- preset and refusals ----------------------------------


def prepared(config: DictConfig) -> DictConfig:
    apply_algorithm_preset(config)
    load_oppo_config(config)
    return config


@pytest.mark.parametrize("config_name", ["oppo_trainer", "oppo_cpu"])
def test_the_preset_alone_makes_a_run_without_critic_and_with_reference(compose_config, config_name):
    config = prepared(compose_config(VLLM, f"{ROLLOUT}.n=2", ALGORITHM, config_name=config_name))
    assert not need_critic(config) and need_reference_policy(config)
    assert config.algorithm.adv_estimator != "gae"


def test_null_changes_nothing(compose_config):
    config = compose_config(VLLM)
    before = OmegaConf.to_container(config)
    apply_algorithm_preset(config)
    assert OmegaConf.to_container(config) == before


def test_a_name_in_the_registry_loads_and_another_is_refused():
    for name in ALGORITHMS:
        assert load_algorithm(OppoConfig(algorithm=name)).preset
    with pytest.raises(ValueError, match="trainer.v1.oppo.algorithm is 'spin'; allowed: null or one of online_dpo"):
        OppoConfig.from_mapping({"algorithm": "spin"})


ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
REFUSED = {
    f"{ROLLOUT}.n=1": f"{ROLLOUT}.n is 1; allowed with online_dpo: 2 or more",
    f"{ACTOR}.shuffle=true": f"{ACTOR}.shuffle is True; allowed with online_dpo: False, since pairs are adjacent",
    f"{ACTOR}.entropy_coeff=0.01": f"{ACTOR}.entropy_coeff is 0.01; allowed with online_dpo: 0",
    f"{CORRECTION}.rollout_rs=token_k1": f"{CORRECTION}.rollout_rs is 'token_k1'; allowed with online_dpo: None",
    f"{CORRECTION}.bypass_mode=true": f"{CORRECTION}.bypass_mode is True; allowed with online_dpo: False",
    "trainer.critic_warmup=3": "trainer.critic_warmup is 3; allowed with online_dpo: 0",
    "distillation.enabled=true": "distillation.enabled is True; allowed with online_dpo: False",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_online_dpo_cannot_work_with_is_refused(compose_config, override):
    logs = f"{ROLLOUT}.calculate_log_probs=true"
    with pytest.raises(ValueError) as refusal:
        prepared(compose_config(VLLM, logs, f"{ROLLOUT}.n=2", ALGORITHM, override))
    assert REFUSED[override] in str(refusal.value)


def test_a_config_without_the_preset_is_refused(compose_config):
    with pytest.raises(ValueError, match="algorithm.adv_estimator is 'gae'; allowed with online_dpo: 'grpo'"):
        load_oppo_config(compose_config(VLLM, f"{ROLLOUT}.n=2", ALGORITHM))


def test_a_stock_mode_would_train_ppo_and_is_refused(compose_config):
    with pytest.raises(ValueError, match="algorithm is 'online_dpo'; allowed with trainer_mode=sync: null"):
        main_ppo.train_in_mode(compose_config(VLLM, ALGORITHM, "trainer.v1.trainer_mode=sync"))


def test_a_minibatch_that_splits_pairs_is_refused(compose_config):
    config = compose_config(config_name="oppo_cpu")
    check_mini_batch(config, num_ranks=2)
    with pytest.raises(ValueError, match="ppo_mini_batch_size is 16; allowed .* on 3 .* multiples of 24 prompts"):
        check_mini_batch(config, num_ranks=3)
    config.actor_rollout_ref.actor.use_dynamic_bsz = True
    check_mini_batch(config, num_ranks=4)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"beta": 0}, "online_dpo.beta is 0; allowed: a number above 0"),
        ({"beta": True}, "online_dpo.beta is True; allowed: a number above 0"),
        ({"label_smoothing": 0.5}, "online_dpo.label_smoothing is 0.5; allowed: a number of 0 or more and below 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing is 0.1; allowed: 0 with"),
        ({"loss_type": "hinge"}, "online_dpo.loss_type is 'hinge'; allowed: one of sigmoid, ipo"),
        ({"gamma": 1}, "trainer.v1.oppo.online_dpo.gamma is not a key of OPPO; allowed"),
    ],
)
def test_bad_options_are_refused(section, message):
    with pytest.raises(ValueError, match=message):
        OppoConfig.from_mapping({"online_dpo": section})


# ---------------------------------- what the actor is sent ----------------------------------

VERSION = 4
"""Weights that sampled a step's newest tokens."""


class ActorGroup:
    """verl's actor worker group as `update_actor` sees it: keeps the batch that it was sent, as its workers read it."""

    def __init__(self, num_ranks: int) -> None:
        self._dispatch_info = {"actor": list(range(num_ranks))}
        self.loss_fn = None

    def set_loss_fn(self, loss_fn: Callable) -> None:
        self.loss_fn = loss_fn

    def update_actor(self, batch: KVBatchMeta) -> TensorDict:
        self.batch = batch
        self.data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=batch.fields)
        return {"metrics": {"loss": [0.5], "rewards/margins": [0.25], "grad_norm": [1.0]}}


@pytest.fixture
def transfer_queue(shared_ray: None) -> Iterator[None]:
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()


def sampled(rows: dict[str, tuple[float, int, list]]) -> KVBatchMeta:
    """A batch after the scoring passes. `rows`: by key, score, response length and versions of its tokens."""
    lengths = [length for _, length, _ in rows.values()]
    prompt = torch.ones(3, dtype=torch.int64)
    responses = [torch.arange(length) for length in lengths]
    margins = [torch.full((length,), score) for score, length, _ in rows.values()]
    extra = [{"token_versions": versions} for *_, versions in rows.values()]
    tensors = {
        "prompts": [prompt] * len(rows),
        "responses": responses,
        "input_ids": [torch.cat([prompt, response]) for response in responses],
        "position_ids": [torch.arange(3 + length) for length in lengths],
        "response_mask": [torch.ones_like(response) for response in responses],
        "loss_mask": [torch.ones_like(response) for response in responses],
        "rm_scores": [torch.tensor([0.0] * (n - 1) + [score]) for score, n, _ in rows.values()],
        "old_log_probs": margins,
        "ref_log_prob": [torch.zeros(length) for length in lengths],
    }
    fields = TensorDict({name: jagged(values) for name, values in tensors.items()}, batch_size=len(rows))
    fields["extra_fields"] = extra
    tags = [{"seq_len": 3 + length, "response_len": length, "prompt_len": 3} for length in lengths]
    return tq.kv_batch_put(keys=list(rows), partition_id="train", fields=fields, tags=tags)


FRESH, STALE = [[VERSION, 2]], [[VERSION - 1, 1], [VERSION, 1]]
ROWS = {
    "a_0_0": (0.0, 2, FRESH),
    "a_1_0": (1.0, 2, STALE),
    "a_2_0": (0.5, 2, FRESH),
    "b_0_0": (2.0, 2, FRESH),
    "b_1_0": (2.0, 2, FRESH),
    "c_0_0": (3.0, 2, FRESH),
    "c_1_0": (-1.0, 2, FRESH),
}


def test_whole_pairs_are_sent_with_padding_in_pairs_and_nothing_is_left_of_it(transfer_queue, compose_config):
    config = compose_config(config_name="oppo_cpu")
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 4
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 4
    group = ActorGroup(num_ranks=2)
    trainer = SimpleNamespace(
        config=config, actor_rollout_wg=group, global_steps=VERSION + 1, tokenizer=SimpleNamespace(eos_token_id=0)
    )
    algorithm = OnlineDPO(OppoConfig(algorithm="online_dpo"))
    algorithm.connect(trainer)
    batch, metrics = sampled(ROWS), {}
    batch.extra_info["temperature"] = 1.0
    before = set((tq.kv_list("train") or {})["train"])
    assert algorithm.update_actor(trainer, batch, metrics, plain=None) is batch and len(batch) == len(ROWS)

    keys, data = group.batch.keys, group.data
    assert len(keys) == 8 and "a_2_0" not in keys, "four pairs, one of them padding; the middle row is not trained"
    real = [tuple(keys[i : i + 2]) for i in range(0, 8, 2) if not keys[i].startswith("pad")]
    assert sorted(real) == [("a_1_0", "a_0_0"), ("b_0_0", "b_1_0"), ("c_0_0", "c_1_0")]
    weight = dict(zip(keys, data[PAIR_WEIGHT].tolist(), strict=True))
    assert {key: value for key, value in weight.items() if value} == dict.fromkeys(
        ["a_1_0", "a_0_0", "c_0_0", "c_1_0"], 0.5
    )
    assert [len(row) for row in data["ref_log_prob"]] == [len(row) for row in data["responses"]]
    assert not any(row.any() for key, row in zip(keys, data["loss_mask"], strict=True) if key.startswith("pad"))
    extra = group.batch.extra_info
    assert (extra["force_group_size"], extra["mini_batch_size"], extra["micro_batch_size_per_gpu"]) == (PAIR_SIZE, 8, 2)
    assert set((tq.kv_list("train") or {})["train"]) == before

    assert (metrics["loss"], metrics["rewards/margins"], metrics["actor/grad_norm"]) == (0.5, 0.25, 1.0)
    dpo = {name.removeprefix("oppo/dpo/"): value for name, value in metrics.items() if name.startswith("oppo/dpo/")}
    assert (dpo["pairs"], dpo["ties"], dpo["pairs_fresh"], dpo["pairs_stale"]) == (2, 1, 1, 1)
    assert dpo["margin_stale_mean"] == pytest.approx(0.1 * 2 * 1.0)
    assert dpo["margin_fresh_mean"] == pytest.approx(0.1 * 2 * 4.0)
    tq.kv_clear(keys=list(before), partition_id="train")
