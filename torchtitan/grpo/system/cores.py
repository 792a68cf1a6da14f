# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How processes that compute on CPUs share the cores of a machine."""

import os

import torch


def share_cores(num_processes: int) -> None:
    """Gives each of ``num_processes`` that will be started its share of this machine's cores.

    Processes beside them, such as the servers of training ranks, get the same number of threads.
    Threads therefore sleep while they wait for each other. What the environment says already is
    kept, and where there is a GPU, nothing is set.
    """
    if not torch.cuda.is_available():
        threads = max(1, torch.get_num_threads() // num_processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
