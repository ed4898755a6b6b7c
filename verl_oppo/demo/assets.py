"""Makes the demo's models, tokenizer and data on first use and keeps them in a cache folder.

Called by the demo and by tests (`ensure_assets`), and by hand: `python -m verl_oppo.demo.assets` prints the paths.
Nothing is downloaded. Each asset is a folder that appears under its final name only when it is complete, in a folder
named after a hash of the settings and of the code that makes it, so a stale or half-made asset is never used and two
processes may make the same one at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import (
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2Tokenizer,
)

from verl_oppo.demo.data import write_data
from verl_oppo.demo.models import ModelSettings, build_actor, build_classifier
from verl_oppo.demo.reward_model import train_reward_model
from verl_oppo.demo.task import TaskSettings
from verl_oppo.demo.tokenizer import build_actor_tokenizer, build_other_tokenizer
from verl_oppo.demo.training import TrainSettings
from verl_oppo.demo.warm_start import warm_start_actor

CACHE_VARIABLE = "VERL_OPPO_CACHE"
SOURCES = ("assets", "data", "models", "reward_model", "task", "tokenizer", "training", "warm_start")
"""Modules of this package whose code decides what the assets contain."""


@dataclass(frozen=True)
class DemoSettings:
    """All that decides what the assets contain; equal settings and code give equal assets."""

    seed: int = 0
    num_train_prompts: int = 1024
    num_val_prompts: int = 64
    task: TaskSettings = field(default_factory=TaskSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    warm_start: TrainSettings = field(default_factory=lambda: TrainSettings(num_steps=500, learning_rate=5e-3))
    reward_model: TrainSettings = field(default_factory=lambda: TrainSettings(num_steps=450, learning_rate=5e-3))

    def __post_init__(self) -> None:
        for key in ("num_train_prompts", "num_val_prompts"):
            if getattr(self, key) < 1:
                raise ValueError(f"demo setting {key} is {getattr(self, key)!r}, allowed is 1 or more")

    @property
    def fingerprint(self) -> str:
        """Hash of the settings and of the code that makes the assets."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for module in SOURCES:
            digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class DemoAssets:
    """Paths of the assets, as verl's configuration wants them.

    `actor` is also the reference and the tokenizer's folder. `reward_model` has the actor's tokenizer and template and
    scores what `compute_score` in `reward_function` scores.
    """

    root: Path
    actor: Path
    critic: Path
    reward_model: Path
    train_file: Path
    val_file: Path
    reward_function: Path


def default_cache_dir() -> Path:
    """$VERL_OPPO_CACHE, or verl_oppo in the user's cache folder."""
    if cache := os.environ.get(CACHE_VARIABLE):
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_oppo"


def ensure_assets(settings: DemoSettings | None = None, cache_dir: Path | None = None) -> DemoAssets:
    """The assets of `settings`, made now (about a minute on one core) where the cache lacks them."""
    settings = settings or DemoSettings()
    root = _root(settings, cache_dir)
    actor = _ensure(root / "actor", lambda folder: _make_actor(settings, folder))
    critic = _ensure(root / "critic", lambda folder: _make_critic(settings, actor, folder))
    data = _ensure(
        root / "data",
        lambda folder: write_data(
            folder, settings.task, settings.num_train_prompts, settings.num_val_prompts, _rng(settings, "data")
        ),
    )
    return DemoAssets(
        root=root,
        actor=actor,
        critic=critic,
        reward_model=_ensure(
            root / "reward_model", lambda folder: _make_reward_model(settings, build_actor_tokenizer(), folder)
        ),
        train_file=data / "train.parquet",
        val_file=data / "val.parquet",
        reward_function=Path(__file__).with_name("task.py"),
    )


def ensure_other_reward_model(settings: DemoSettings | None = None, cache_dir: Path | None = None) -> Path:
    """A reward model for the same task whose tokenizer and chat template differ from the actor's, made on request."""
    settings = settings or DemoSettings()
    return _ensure(
        _root(settings, cache_dir) / "other_reward_model",
        lambda folder: _make_reward_model(settings, build_other_tokenizer(), folder),
    )


def _root(settings: DemoSettings, cache_dir: Path | None) -> Path:
    return (cache_dir or default_cache_dir()) / f"demo-{settings.fingerprint}"


def _make_actor(settings: DemoSettings, folder: Path) -> None:
    tokenizer = build_actor_tokenizer()
    with _deterministic(settings, "actor") as rng:
        model = build_actor(settings.model, tokenizer)
        warm_start_actor(model, tokenizer, settings.task, settings.warm_start, rng)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_critic(settings: DemoSettings, actor: Path, folder: Path) -> None:
    tokenizer = build_actor_tokenizer()
    backbone = Qwen2ForCausalLM.from_pretrained(actor)
    build_classifier(Qwen2ForTokenClassification, settings.model, tokenizer, backbone).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_reward_model(settings: DemoSettings, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    with _deterministic(settings, "reward model") as rng:
        model = build_classifier(Qwen2ForSequenceClassification, settings.model, tokenizer, backbone=None)
        train_reward_model(model, tokenizer, settings.task, settings.reward_model, rng)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _ensure(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made by `make` in a scratch folder beside it and renamed; a concurrent maker's result is as good."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        make(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _rng(settings: DemoSettings, asset: str) -> random.Random:
    return random.Random(f"{settings.seed} {asset}")


@contextmanager
def _deterministic(settings: DemoSettings, asset: str) -> Iterator[random.Random]:
    """Seeds torch and computes on one thread (sums depend on the number of threads); restores both afterwards."""
    rng = _rng(settings, asset)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.getrandbits(63))
            yield rng
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's models and data if need be and print their paths.")
    parser.add_argument("--cache-dir", type=Path, default=None, help=f"default: ${CACHE_VARIABLE} or the user's cache")
    parser.add_argument("--seed", type=int, default=DemoSettings.seed)
    arguments = parser.parse_args()
    assets = ensure_assets(DemoSettings(seed=arguments.seed), arguments.cache_dir)
    print(json.dumps({name: str(path) for name, path in asdict(assets).items()}, indent=2))


if __name__ == "__main__":
    main()
