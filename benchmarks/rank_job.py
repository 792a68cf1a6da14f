# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The side of the ranks of `ranks.run_job`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def answer_job(work: Callable[[Any], Any], *, opens_group: bool = True) -> None:
    """Calls ``work`` with the job on each rank, in a gloo group; rank 0 writes what it returns.

    Without ``opens_group``, ``work`` opens the group, if it needs one.
    """
    job, result = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    if opens_group:
        dist.init_process_group("gloo")
    found = work(json.loads(job.read_text()))
    if not dist.is_initialized() or dist.get_rank() == 0:
        result.write_text(json.dumps(found, allow_nan=False))
    if dist.is_initialized():
        dist.destroy_process_group()
