# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The configuration that rank 0 hands to the rollout process."""

from dataclasses import asdict, dataclass
from typing import Any

from torchtitan.grpo.config.evaluation import Evaluation
from torchtitan.grpo.config.grpo import GRPO
from torchtitan.grpo.config.inference import Inference
from torchtitan.grpo.config.prompts import Prompts
from torchtitan.grpo.config.reward import Reward
from torchtitan.grpo.config.rollout import Rollout
from torchtitan.grpo.types import PromptProgress


@dataclass
class RolloutProcessConfig:
    """What the rollout process is given by rank 0: the tables it needs, and some facts."""

    grpo: GRPO
    prompts: Prompts
    rollout: Rollout
    inference: Inference
    reward: Reward
    evaluation: Evaluation
    hf_assets_path: str
    """Directory of the model: tokenizer, and weights for launched servers."""
    vocab_size: int
    eos_token_ids: list[int]
    seq_len: int
    """``training.seq_len``: prompt plus completion fit into one row."""
    seed: int
    dump_folder: str
    server_gpus: list[str]
    """GPUs of launched servers, as in ``CUDA_VISIBLE_DEVICES``; empty without any."""
    start_version: int
    """Batches already trained on (a resumed run)."""
    progress: PromptProgress
    """Prompts already used up, and those to begin with (a resumed run)."""
    saved_rollouts: str | None = None
    """File with the rollouts that were finished when the checkpoint was written."""
    incarnation: int = 0
    """How many rollout processes the run has had before this one."""
    fetch_host: str = ""
    """Address under which ranks reach it, with ``prompts.single_rank_load = false``."""
    fetch_secret: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
