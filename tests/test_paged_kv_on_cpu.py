"""One forward over rows of different cached lengths, padded and packed, against transformers' own forward."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl_oppo.scoring.paged_kv import PagedCache, Segment, dummy_segment, packed_layout, padded_layout
from verl_oppo.scoring.prefix_cache import PrefixCache, as_ids

VOCAB_SIZE, BLOCK_SIZE, NUM_LAYERS = 97, 8, 2
SIZES = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    # Ten times the default: with nearly uniform attention a wrong mask would hardly show.
    initializer_range=0.2,
)


def varlen_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """What flash attention's varlen kernel computes, row by row, out of the arguments transformers hands to it."""
    assert attention_mask is None and query.shape[0] == 1
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    starts_q, starts_k = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"].tolist()
    assert kwargs["max_length_q"] == max(np.diff(starts_q)) and kwargs["max_length_k"] == max(np.diff(starts_k))
    rows = []
    for (q0, q1), (k0, k1) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(diagonal=(k1 - k0) - (q1 - q0))
        row = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1], attn_mask=mask, scale=scaling
        )
        rows.append(row.transpose(1, 2))
    return torch.cat(rows, dim=1), None


AttentionInterface.register("varlen_reference", varlen_attention)


def build(attention: str, moe: bool = False) -> Qwen2ForCausalLM | Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    if moe:
        config = Qwen3MoeConfig(
            **SIZES, head_dim=8, intermediate_size=48, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
        )
        model = Qwen3MoeForCausalLM(config)
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, intermediate_size=48))
    model.set_attn_implementation(attention)
    return model.eval()


class Streamed:
    """Logits of sequences that arrive piece by piece, through one paged cache."""

    def __init__(self, model: torch.nn.Module, attention: str) -> None:
        self.model, self.attention = model, attention
        self.cache = PrefixCache(num_blocks=64, block_size=BLOCK_SIZE, lookahead=0)
        self.kv = PagedCache(NUM_LAYERS)
        self.logits: dict[str, list[torch.Tensor]] = {}

    def extend(self, pieces: dict[str, np.ndarray]) -> None:
        """The next tokens of some sequences, in one forward; `logits` takes in what it gives."""
        segments = []
        for name, ids in pieces.items():
            known = self.cache.known(name) if name in self.cache else np.empty(0, dtype=np.int64)
            start = self.cache.rewrite(name, np.concatenate([known, ids]))
            stop = start + len(ids)
            assert self.cache.make_room(name, stop, keep=())
            segments.append(Segment(ids, ids, self.cache.slots(name, 0, stop)))
            self.cache.commit(name, np.zeros(len(ids)))
        output = self.forward(segments)
        for name, row in zip(pieces, output.split([len(ids) for ids in pieces.values()]), strict=True):
            self.logits.setdefault(name, []).append(row)

    @torch.no_grad()
    def forward(self, segments: list[Segment]) -> torch.Tensor:
        if self.attention == "varlen_reference":
            layout = packed_layout(segments, "cpu")
        else:
            layout = padded_layout(segments, "cpu", torch.float32 if self.attention == "eager" else None)
        self.kv.lay_out(layout, self.cache.block_limit * BLOCK_SIZE)
        output = self.model(
            input_ids=layout.input_ids,
            position_ids=layout.position_ids,
            past_key_values=self.kv,
            use_cache=True,
            **layout.attention_kwargs,
        )
        return layout.unpad(output.logits)


def random_ids(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [as_ids(rng.integers(0, VOCAB_SIZE, length)) for length in lengths]


@torch.no_grad()
def plain_logits(model: torch.nn.Module, ids: np.ndarray) -> torch.Tensor:
    return model(input_ids=torch.from_numpy(ids)[None]).logits[0]


@pytest.mark.parametrize(
    ("attention", "moe"),
    [("sdpa", False), ("eager", False), ("varlen_reference", False), ("sdpa", True), ("varlen_reference", True)],
)
def test_rows_of_different_cached_lengths_get_the_logits_of_their_own_prefix(attention, moe):
    streamed = Streamed(build(attention, moe), attention)
    sequences = dict(zip("abcd", random_ids(50, 23, 9, 70), strict=True))
    for cuts in ({"a": (0, 5), "d": (0, 31)}, {"a": (5, 40), "b": (0, 1), "d": (31, 32)}, {"b": (1, 23), "c": (0, 9)}):
        streamed.extend({name: sequences[name][start:stop] for name, (start, stop) in cuts.items()})
    streamed.extend({"d": sequences["d"][32:], "a": sequences["a"][40:]})
    plain_model = build("sdpa", moe)
    for name, ids in sequences.items():
        expected = plain_logits(plain_model, ids)
        torch.testing.assert_close(torch.cat(streamed.logits[name]), expected, rtol=1e-5, atol=1e-5)
        # The test is only worth something if the prefix matters.
        if len(ids) > 20:
            assert (plain_logits(plain_model, ids[10:])[-1] - expected[-1]).abs().max() > 1e-2


@pytest.mark.parametrize("attention", ["sdpa", "eager", "varlen_reference"])
def test_a_dummy_row_changes_nothing_that_is_cached(attention):
    streamed = Streamed(build(attention), attention)
    (ids,) = random_ids(20)
    streamed.extend({"a": ids[:13]})
    assert streamed.forward([dummy_segment()]).isfinite().all()
    streamed.extend({"a": ids[13:]})
    expected = plain_logits(build("sdpa"), ids)
    torch.testing.assert_close(torch.cat(streamed.logits["a"]), expected, rtol=1e-5, atol=1e-5)


def test_growing_keeps_what_is_cached_and_release_frees_it():
    streamed = Streamed(build("sdpa"), "sdpa")
    first, second = random_ids(BLOCK_SIZE, 6 * BLOCK_SIZE)
    bytes_per_token = 2 * NUM_LAYERS * 2 * 8 * 4
    streamed.extend({"a": first[:5]})
    assert streamed.kv.nbytes == 2 * BLOCK_SIZE * bytes_per_token, "a block of padding and one of tokens"
    streamed.extend({"b": second})
    assert streamed.kv.nbytes == 8 * BLOCK_SIZE * bytes_per_token
    streamed.extend({"a": first[5:]})
    torch.testing.assert_close(
        torch.cat(streamed.logits["a"]), plain_logits(streamed.model, first), rtol=1e-5, atol=1e-5
    )
    streamed.kv.release()
    assert streamed.kv.nbytes == 0


def test_padding_is_masked_in_the_compute_type_when_attention_adds_its_mask():
    """float32's minimum would become -inf where FSDP casts its inputs to bfloat16, and an all-masked row NaN."""
    short, long = (Segment(ids, ids, np.arange(8, 8 + len(ids))) for ids in random_ids(2, 5))
    layout = padded_layout([short, long], "cpu", torch.bfloat16)
    mask = layout.attention_kwargs["attention_mask"]
    assert mask.shape == (2, 1, 5, 5) and mask.dtype == torch.bfloat16 and mask.isfinite().all()
    assert (mask[0, 0] == 0).tolist() == [[True, False, False, False, False]] + [[True, True, False, False, False]] * 4
    assert layout.position_ids.tolist() == [[0, 1, 1, 1, 1], [0, 1, 2, 3, 4]]
    assert layout.tokens == 10 and layout.real.sum() == 7
