"""Tiny reward models whose tokenizer and template differ from the actor's, for the reward tests."""

from pathlib import Path

import numpy as np
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import DictConfig
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForSequenceClassification

from verl_oppo.demo.models import ModelSettings, build_classifier
from verl_oppo.demo.tokenizer import build_actor_tokenizer, build_other_tokenizer

MESSAGES = [{"role": "system", "content": "outline"}, {"role": "user", "content": "music 40 food 17"}]


def save_tokenizers(folder: Path) -> tuple[Path, Path]:
    """Folders of the actor's tokenizer and of the other one."""
    build_actor_tokenizer().save_pretrained(folder / "actor")
    build_other_tokenizer().save_pretrained(folder / "reward")
    return folder / "actor", folder / "reward"


def save_reward_model(folder: Path, max_positions: int = 2048) -> Qwen2ForSequenceClassification:
    """A reward model with the tokenizer that lies in the folder, and a head that is not zero."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = ModelSettings(max_positions=max_positions)
    model = build_classifier(Qwen2ForSequenceClassification, settings, tokenizer, backbone=None)
    with torch.no_grad():
        # Far from uniform attention, and scores far apart: a wrong prefix must show.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return model.eval()


def hf_score(model: Qwen2ForSequenceClassification, input_ids: np.ndarray) -> float:
    with torch.no_grad():
        return model(input_ids=torch.as_tensor(np.asarray(input_ids), dtype=torch.int64)[None]).logits.item()


def actor_prompt(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]] = MESSAGES) -> np.ndarray:
    """The actor's prompt as verl's agent loop builds it, int64 [tokens]."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return np.asarray(ids, dtype=np.int64)


def responses(tokenizer: PreTrainedTokenizerFast, lengths: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """Random words of the actor's vocabulary, each ended by its eos, int64 [length]."""
    rng = np.random.default_rng(seed)
    special = set(tokenizer.all_special_ids)
    words = np.array([index for index in range(len(tokenizer)) if index not in special])
    return [np.append(rng.choice(words, length - 1), tokenizer.eos_token_id) for length in lengths]


def compose(folder: Path, *overrides: str) -> DictConfig:
    """A run's configuration with the models in the folder."""
    with initialize_config_module("verl_oppo.config", version_base=None):
        return hydra_compose(
            "oppo_cpu",
            overrides=[
                f"actor_rollout_ref.model.path={folder / 'actor'}",
                "data.max_prompt_length=64",
                "data.max_response_length=192",
                "reward.custom_reward_function.path=null",
                "reward.reward_model.enable=True",
                "reward.reward_model.enable_resource_pool=False",
                "reward.reward_model.rollout.free_cache_engine=True",
                f"reward.reward_model.model_path={folder / 'reward'}",
                "reward.reward_model.rollout.name=vllm",
                "reward.reward_model.rollout.dtype=float32",
                "reward.reward_model.rollout.tensor_model_parallel_size=1",
                "reward.reward_model.rollout.max_num_seqs=16",
                "reward.reward_model.rollout.max_model_len=640",
                "++reward.reward_model.rollout.enable_sleep_mode=False",
                "++reward.reward_model.rollout.engine_kwargs.vllm.block_size=32",
                "++reward.reward_model.rollout.engine_kwargs.vllm.model_impl=vllm",
                *overrides,
            ],
        )
