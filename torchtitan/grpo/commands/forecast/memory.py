# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whether a run fits into the memory of its devices. Needs torch, which the simulation does not."""

import math
from collections.abc import Iterator

from torchtitan.grpo.commands.forecast.search import Split
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.inference.gpu_shares import ASLEEP_BYTES, servers_per_gpu
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.training.lent_memory import describe_lent_memory
from torchtitan.grpo.training.memory_choice import needed_bytes
from torchtitan.grpo.training.memory_estimate import available_bytes
from torchtitan.grpo.training.model_spec import build_without_memory, parameter_shapes
from torchtitan.grpo.weight_sync.memory_plan import predict_memory

_GIB, _BFLOAT16 = 1024**3, 2


def judge_memory(
    config: JobConfig, split: Split, *, device_bytes: int, server_bytes: int
) -> Iterator[str]:
    """Yields a sentence on each part.

    ``device_bytes`` are of a rank's device, and ``server_bytes`` what a server may fill on all of its
    devices. The push takes memory of the host, which is not known, so that it is told and not judged.
    """
    model = read_hf_model(config.model.hf_assets_path)
    shapes = parameter_shapes(config, model)
    asleep = 0.0
    if split.num_lent:
        yield from describe_lent_memory(config, model, split.num_ranks, gpu_bytes=device_bytes)
        asleep = ASLEEP_BYTES * servers_per_gpu(split.num_lent, split.num_ranks) / device_bytes
    available = available_bytes(device_bytes, asleep)
    needed = needed_bytes(config, model, split.num_ranks, available)
    yield _verdict("a training rank", needed, available, "training.local_batch_size")
    if split.num_servers:
        weights = _BFLOAT16 * sum(math.prod(shape) for shape in shapes.values())
        remedy = "the number of servers on a device"
        yield _verdict("a server's weights", weights, server_bytes, remedy)
    _, adapter_of = build_without_memory(config, model)
    adapter, ranks = adapter_of(str(model.path)), split.num_ranks
    push = predict_memory(config, shapes, adapter, split.all_servers, num_ranks=ranks, on_gpu=True)
    yield f"the push: {push.slots / _GIB:.2f} GiB of host memory, on all ranks together"


def _verdict(name: str, needed: int, available: int, remedy: str) -> str:
    fit = "fit" if needed <= available else f"do NOT fit. Lower {remedy}."
    return f"{name}: {needed / _GIB:.2f} GiB of {available / _GIB:.2f} GiB, which {fit}"
