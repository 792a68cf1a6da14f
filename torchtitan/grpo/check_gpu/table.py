# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The checks, in the order in which they run. Add a check here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A check, which is the function ``run`` of a module and yields rows.

    Attributes:
        name: Name on the command line.
        module: Module that holds ``run(settings)``.
        limit_seconds: Time after which the check is ended. Together they stay below 20 minutes.
        question: What the check answers.
        on_cpu: Whether it can run with ``--device cpu``.
    """

    name: str
    module: str
    limit_seconds: float
    question: str
    on_cpu: bool = True


_PACKAGE = "torchtitan.grpo.check_gpu"
CHECKS = (
    Check(
        "isolation", f"{_PACKAGE}.isolation", 220,
        "Does a push, to a server that never answers or to disk, slow down training steps?",
    ),
    Check(
        "allocator", f"{_PACKAGE}.allocator", 90,
        "Are snapshots exact while training allocates and frees memory?",
    ),
    Check(
        "boundary", f"{_PACKAGE}.boundary", 140,
        "What do fence and publish cost at the step boundary, and how much memory?",
    ),
    Check(
        "output-layer", f"{_PACKAGE}.output_layer", 120,
        "How fast and how exact are the fused log-probabilities?",
    ),
    Check(
        "flex", f"{_PACKAGE}.flex", 250,
        "How often is FlexAttention compiled?", on_cpu=False,
    ),
    Check(
        "end-to-end", f"{_PACKAGE}.end_to_end", 270,
        "Does a run survive a server that stands still and is killed, at the same pace?",
    ),
    Check(
        "nccl", f"{_PACKAGE}.nccl", 100,
        "Can a process leave an NCCL group at once while a kernel is in flight?", on_cpu=False,
    ),
)  # fmt: skip
