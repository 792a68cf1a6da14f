# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks which GPUs launched servers use: ``[cluster]``, and those that are lent to them."""

import os

from torchtitan.grpo.config.cluster import ClusterRow, lent_groups, server_groups
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import forbid, require


def check_cluster(config: JobConfig) -> None:
    """Checks ``[cluster]``, which replays and supervised training ignore because they have no servers."""
    if not (config.has_servers and config.cluster):
        return
    inference = config.inference
    require(
        inference.launch,
        "cluster needs inference.launch = true, got false: it describes servers that the run "
        "launches. Others keep the GPUs that they were started on, and cannot be lent, because "
        "nothing could end one that does not fall asleep. Set it, or remove cluster.",
    )
    why = "the tables in cluster give the number of servers, and lend with both tags. Remove "
    forbid(
        "cluster",
        {"inference.num_servers": inference.num_servers != 1},
        f"{why}inference.num_servers.",
    )
    forbid("cluster", {"inference.lend": inference.lend}, f"{why}inference.lend.")
    for name, row in config.cluster.items():
        _check_row(f"cluster.{name}", row, config)


def _check_row(key: str, row: ClusterRow, config: JobConfig) -> None:
    tags = row.tags
    require(
        sorted(tags) in (["rollout"], ["rollout", "train"]),
        f"{key}.tags must be ['rollout'], or ['train', 'rollout'] for servers that are lent the GPUs "
        f"of training ranks, got {tags}. Ranks need no table: remove it if it is not for servers.",
    )
    gpus = row.gpus
    require(
        len(gpus) == len(set(gpus)) and min(gpus, default=0) >= 0,
        f"{key}.gpus must be different numbers, at least 0, got {gpus}.",
    )
    require(
        not gpus or config.inference.device != "cpu",
        f"{key}.gpus needs servers on GPUs, got inference.device = 'cpu'. Remove one of them.",
    )


def check_lending(config: JobConfig) -> None:
    # Servers are launched on rank 0's machine. Without the variable, no rank is known yet.
    is_here = "LOCAL_WORLD_SIZE" in os.environ and os.environ.get("GROUP_RANK", "0") == "0"
    if config.has_servers and is_here:
        _check_gpus(config)
    if not config.lends_devices:
        return
    lent = _lent_by(config)
    require(
        config.grpo.async_weight_update,
        f"{lent} needs grpo.async_weight_update = true, got false, which waits after each "
        "step until servers have the new weights: lent servers sleep then. Set it to true; with "
        "rollout.max_head_offpolicyness = 0 each batch still comes from the newest weights.",
    )
    forbid(
        lent,
        {"rollout.stream": config.rollout.stream},
        "while a part of a batch is trained on, lent servers sleep, and the devices are not lent "
        "before the batch ends, so that these servers would never finish its other parts. Set "
        "rollout.stream = false.",
    )


def _lent_by(config: JobConfig) -> str:
    """Returns the setting because of which devices are lent, for messages."""
    key = lent_groups(config)[0].key
    return f"{key}.tags = ['train', 'rollout']" if config.cluster else "inference.lend"


def _check_gpus(config: JobConfig) -> None:
    # Imported here, because torch takes seconds.
    from torchtitan.grpo.system.device import num_training_gpus, visible_gpus

    names, num_training = visible_gpus(), num_training_gpus()
    for name, row in config.cluster.items():
        trains = "train" in row.tags
        own = range(num_training) if trains else range(num_training, len(names))
        require(
            set(row.gpus) <= set(own),
            f"cluster.{name}.gpus must be GPUs {'with' if trains else 'without'} a training rank, "
            f"here {list(own) or 'none'}, got {row.gpus}. Change it, or start other ranks (--gpus N).",
        )
    if not names or not (lent := lent_groups(config)):
        return
    key, idle = _lent_by(config), names[num_training:]
    are_all = lent == server_groups(config)
    require(
        not (are_all and idle),
        f"{key} lends the GPUs of training ranks, and no server is for the GPUs without a rank, here "
        f"{', '.join(idle)}. Start a rank on each GPU, or add servers on these GPUs: [cluster.NAME] "
        "with tags = ['rollout'], beside one with both tags.",
    )
    require(
        are_all or bool(idle),
        f"{key} lends the GPUs of training ranks, and the servers with the tag 'rollout' alone need "
        f"others, but each of the {len(names)} GPUs has a rank. Start fewer ranks (--gpus N), or remove "
        "the table without 'train'.",
    )
    require(
        config.inference.device != "cpu",
        f"{key} lends the GPUs of training ranks, got inference.device = 'cpu', with which servers "
        "need none. Lend nothing, or set inference.device = 'auto'.",
    )


def check_offload(config: JobConfig) -> None:
    optimizer = config.optimizer
    if not (config.lends_devices and optimizer.offload_while_lent):
        return
    import torch

    require(
        torch.cuda.is_available(),
        "optimizer.offload_while_lent needs a GPU, and none is visible: a rank on a CPU holds the "
        "optimizer's states in host memory already. Set it to false.",
    )
