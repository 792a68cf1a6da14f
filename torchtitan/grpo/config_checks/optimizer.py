# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks settings of the optimizer."""

from torchtitan.grpo.config_checks.rules import check_read, require
from torchtitan.grpo.job_config import JobConfig, Optimizer

_READ_WITH = (
    (
        lambda optimizer: optimizer.name == "Muon",
        "optimizer.name = 'Muon'",
        (
            "muon_lr",
            "muon_momentum",
            "muon_nesterov",
            "muon_ns_steps",
            "muon_adjust_lr",
            "muon_dtype",
        ),
    ),
)


def check_optimizer(config: JobConfig) -> None:
    """Refuses settings that nothing would read, or that Muon cannot work with."""
    optimizer: Optimizer = config.optimizer
    check_read("optimizer", optimizer, _READ_WITH)
    if optimizer.name != "Muon":
        return
    require(
        not optimizer.early_step_in_backward,
        "optimizer.early_step_in_backward cannot be combined with optimizer.name = 'Muon', which "
        "gathers matrices of all ranks in one order. Leave it at false.",
    )
    require(
        optimizer.muon_adjust_lr != "original" or optimizer.muon_lr > 0,
        "optimizer.muon_lr must be set with optimizer.muon_adjust_lr = 'original', whose updates are "
        f"not as large as AdamW's, so that optimizer.lr ({optimizer.lr:g}) would not fit both. Set "
        "optimizer.muon_lr, or take 'match_rms_adamw'.",
    )
