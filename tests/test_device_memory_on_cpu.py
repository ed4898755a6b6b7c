"""Whether critic and reference fit beside an awake rollout engine: the sums, and what is said where they do not."""

import torch
from transformers import Qwen2Config

from verl_oppo.scoring.device_memory import GIB, MemoryNeed, free_device_bytes, memory_needed, reason_not_to_stream
from verl_oppo.scoring.scorer import ScorerSettings, ScorerStats

NEED = MemoryNeed(layers=1 * GIB, cache=4 * GIB, activations=2 * GIB)


def test_needs_of_a_known_model() -> None:
    """Qwen2.5-7B: 3584 hidden, 18944 intermediate, 28 heads of 128, 4 of them for keys and values."""
    config = Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=28,
        num_key_value_heads=4,
        num_hidden_layers=28,
        vocab_size=152064,
    )
    settings = ScorerSettings(cache_bytes=4 * GIB, longest_trajectory=8192, max_tokens_per_forward=1024)
    value, log_prob = (memory_needed(config, settings, torch.bfloat16, outputs) for outputs in (1, 152064))
    layer = 3584 * 3584 * 2 + 3584 * 512 * 2 + 3 * 3584 * 18944
    assert value.layers == 2 * (layer + 3584 * 152065)
    assert log_prob.layers == 2 * (layer + 3584 * 2 * 152064)
    assert value.cache == log_prob.cache == 4 * GIB
    assert log_prob.activations - value.activations == 1024 * (152064 - 1) * 6
    assert value.total == value.layers + value.cache + value.activations


def test_free_memory_decides() -> None:
    roomy, tight = ScorerStats(device_free_bytes=7 * GIB), ScorerStats(device_free_bytes=7 * GIB - 1)
    assert reason_not_to_stream([roomy, roomy], NEED) is None
    reason = reason_not_to_stream([roomy, tight], NEED)
    assert reason is not None and "7.00 GiB of the device are free" in reason
    assert "gathered weights 1.00 GiB + cache 4.00 GiB + activations 2.00 GiB" in reason


def test_weights_in_host_memory_speak_against_it() -> None:
    reason = reason_not_to_stream([ScorerStats(), ScorerStats(weights_offloaded=True)], NEED)
    assert reason is not None and "host memory" in reason


def test_a_cpu_has_no_device_memory_to_check() -> None:
    if not torch.cuda.is_available():
        assert free_device_bytes() is None
    assert reason_not_to_stream([ScorerStats()], NEED) is None
