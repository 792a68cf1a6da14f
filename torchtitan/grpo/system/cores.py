# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How processes that compute on CPUs share the cores of a machine."""

import os

import torch


def share_cores(num_processes: int) -> None:
    """Lets processes that are started from now on divide this machine's cores, if it has no GPU.

    Their threads sleep while they wait for each other, because servers, or a trainer, run beside
    them. What the environment says already is kept.
    """
    if not torch.cuda.is_available():
        threads = max(1, torch.get_num_threads() // num_processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
