# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks ``inference.lend``, with which servers use the training devices while these wait."""

import os

from torchtitan.grpo.config_checks.rules import forbid, require
from torchtitan.grpo.job_config import JobConfig


def check_lending(config: JobConfig) -> None:
    """A replay and supervised training have no servers, and ignore all of ``[inference]``."""
    if not (config.has_servers and config.inference.lend):
        return
    require(
        config.grpo.async_weight_update,
        "inference.lend needs grpo.async_weight_update = true, got false, which waits after each "
        "step until servers have the new weights: lent servers sleep then. Set it to true; with "
        "rollout.max_head_offpolicyness = 0 each batch still comes from the newest weights.",
    )
    forbid(
        "inference.lend",
        {"rollout.stream": config.rollout.stream},
        "while a part of a batch is trained on, all launched servers sleep, and the devices are not "
        "lent before the batch ends, so that its other parts would never be generated. Set "
        "rollout.stream = false.",
    )
    _check_devices(config)
    _check_offload(config)


def _check_devices(config: JobConfig) -> None:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return  # a check without ranks
    # Imported here, because torch takes seconds.
    from torchtitan.grpo.system.device import are_gpus_shared, gpus_for_servers

    gpus = gpus_for_servers()
    require(
        not gpus or are_gpus_shared(),
        "inference.lend lends the GPUs of training ranks, but launched servers take the GPUs without "
        f"a rank first, here {', '.join(gpus)}. Start a rank on each GPU, or set inference.lend = "
        "false.",
    )
    require(
        not gpus or config.inference.device != "cpu",
        "inference.lend lends the GPUs of training ranks, got inference.device = 'cpu', with which "
        "servers need none. Set inference.lend = false, or inference.device = 'auto'.",
    )


def _check_offload(config: JobConfig) -> None:
    optimizer = config.optimizer
    if not optimizer.offload_while_lent:
        return
    import torch

    require(
        torch.cuda.is_available(),
        "optimizer.offload_while_lent needs a GPU, and none is visible: a rank on a CPU holds the "
        "optimizer's states in host memory already. Set it to false.",
    )
    require(
        not optimizer.early_step_in_backward,
        "optimizer.offload_while_lent and optimizer.early_step_in_backward cannot be combined: the "
        "latter needs the states in the backward pass, while they are still copied back. Set "
        "optimizer.early_step_in_backward = false.",
    )
