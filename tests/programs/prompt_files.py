# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Small tokenizers, and the settings with which a rollout process opens prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from torchtitan.grpo.config import (
    GRPO,
    Evaluation,
    Inference,
    Prompts,
    Reward,
    Rollout,
    RolloutProcessConfig,
)
from torchtitan.grpo.types import PromptProgress


def character_tokenizer(characters: str = "?abcdefghij 0123456789:") -> Tokenizer:
    vocabulary = {c: i for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=characters[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return tokenizer


def byte_tokenizer(marks: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark) for mark in marks])
    return tokenizer


def process_config(model: Path, prompts: Prompts, **settings: Any) -> RolloutProcessConfig:
    common: dict[str, Any] = {
        "grpo": GRPO(),
        "prompts": prompts,
        "rollout": Rollout(max_new_tokens=8),
        "inference": Inference(),
        "reward": Reward(),
        "evaluation": Evaluation(),
        "hf_assets_path": str(model),
        "vocab_size": 10_000,
        "eos_token_ids": [],
        "seq_len": 64,
        "seed": 7,
        "dump_folder": "",
        "gpus": [],
        "start_version": 0,
        "progress": PromptProgress(),
    }
    return RolloutProcessConfig(**common | settings)
