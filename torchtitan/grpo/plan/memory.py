# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whether a run fits into the memory of its devices. Needs torch, which the simulation does not."""

import math
from collections.abc import Iterator

from torchtitan.grpo.inference.gpu_shares import ASLEEP_BYTES, servers_per_gpu
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.plan.search import Split
from torchtitan.grpo.training.lent_memory import describe_lent_memory
from torchtitan.grpo.training.memory_choice import needed_bytes
from torchtitan.grpo.training.memory_estimate import available_bytes
from torchtitan.grpo.training.model_spec import build_without_memory, parameter_shapes
from torchtitan.grpo.weight_sync.memory_plan import predict_memory

_GIB, _BFLOAT16 = 1024**3, 2


def judge_memory(
    config: JobConfig, model: HFModel, split: Split, *, device_bytes: int, server_bytes: int
) -> Iterator[tuple[bool, str]]:
    """Yields whether each part fits, and a sentence.

    ``device_bytes`` are of a rank's device, and ``server_bytes`` what a server may fill on all of its
    devices. The push takes memory of the host, which is not known, so that it is told and not judged.
    """
    shapes = parameter_shapes(config, model)
    asleep = 0.0
    if split.num_lent:
        yield from ((True, line) for line in describe_lent_memory(config, model, split.num_ranks))
        asleep = ASLEEP_BYTES * servers_per_gpu(split.num_lent, split.num_ranks) / device_bytes
    available = available_bytes(device_bytes, asleep)
    needed = needed_bytes(config, model, split.num_ranks, available)
    yield _verdict("a training rank", needed, available, "training.local_batch_size")
    if split.num_servers:
        weights = _BFLOAT16 * sum(math.prod(shape) for shape in shapes.values())
        yield _verdict(
            "a server's weights", weights, server_bytes, "the number of servers on a device"
        )
    _, adapter_of = build_without_memory(config, model)
    push = predict_memory(
        config, shapes, adapter_of(str(model.path)), max(1, split.num_servers + split.num_lent),
        num_ranks=split.num_ranks, on_gpu=True,
    )  # fmt: skip
    yield True, f"the push: {_text(push.slots)} of host memory, on all ranks together"


def _verdict(name: str, needed: int, available: int, key: str) -> tuple[bool, str]:
    text = f"{name}: {_text(needed)} of {_text(available)}"
    if needed > available:
        return False, f"{text}, which do NOT fit. Lower {key}."
    return True, f"{text}, which fit"


def _text(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
