# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks settings of supervised training."""

from torchtitan.grpo.config_checks.rules import check_file, check_read, require
from torchtitan.grpo.job_config import JobConfig

_READ_WITH = (
    (
        lambda sft: sft.path is not None,
        "sft.path",
        ("examples_per_step", "max_example_tokens", "held_out_path", "held_out_interval"),
    ),
    (lambda sft: sft.held_out_path is not None, "sft.held_out_path", ("held_out_interval",)),
)
_FILES = (".jsonl", ".json", ".parquet")


def check_supervised(config: JobConfig) -> None:
    """Refuses supervised training with settings that need rollouts, or another temperature."""
    sft, grpo, rollout = config.sft, config.grpo, config.rollout
    check_read("sft", sft, _READ_WITH)
    if sft.path is None:
        return
    for key in ("path", "held_out_path"):
        path = getattr(sft, key)
        # Any other path may be the name of a data set, which is looked up when it is opened.
        if path is not None and path.endswith(_FILES):
            check_file(f"sft.{key}", path)
    excluded = {
        "rollout.replay": rollout.replay is not None,
        "rollout.record": rollout.record is not None,
        "rollout.stream = true": rollout.stream,
        "prompts.single_rank_load = false": not config.prompts.single_rank_load,
        "grpo.ptx_path": grpo.ptx_path is not None,
        "grpo.kl_coef above 0": grpo.kl_coef > 0,
        "grpo.entropy_coef above 0": grpo.entropy_coef > 0,
        "grpo.num_epochs above 1": grpo.num_epochs > 1,
    }
    for setting, is_set in excluded.items():
        require(
            not is_set,
            f"sft.path and {setting} cannot be combined: supervised training has examples and no "
            "rollouts, and passes over them again by itself. Leave one of them at its default.",
        )
    require(
        rollout.temperature == 1,
        f"sft.path needs rollout.temperature = 1, got {rollout.temperature}: the trainer computes the "
        "log-probabilities of all tokens at that temperature, and supervised training would fit the "
        "tempered distribution instead of the model's own.",
    )
    require(
        sft.examples_per_step >= grpo.num_minibatches,
        f"sft.examples_per_step must be at least grpo.num_minibatches ({grpo.num_minibatches}), "
        f"because each minibatch needs an example, got {sft.examples_per_step}.",
    )
