# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a run needs of its servers, from its configuration."""

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.evaluation import longest_answer
from torchtitan.grpo.inference.join_check import ServerNeeds
from torchtitan.grpo.rollout.prompts import PromptLimits


def server_needs(config: RolloutProcessConfig) -> ServerNeeds:
    """Returns what each server must be, and how long a sequence it must take."""
    longest = PromptLimits.of(config).max_tokens
    new = longest_answer(config.evaluation, config.rollout.max_new_tokens)
    source = f"training.seq_len = {config.seq_len}; prompts.max_prompt_tokens is not set"
    if config.prompts.max_prompt_tokens:
        source = f"prompts of {longest} tokens, completions of {new}"
    return ServerNeeds(
        kind=config.inference.kind,
        model_path=config.hf_assets_path,
        num_tokens=min(config.seq_len, longest + new),
        length_source=source,
        temperature=config.rollout.temperature,
        is_launched=config.inference.launch,
    )
