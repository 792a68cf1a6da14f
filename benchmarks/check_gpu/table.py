# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The checks, in the order in which they run: the most valuable of a second first. Add one here."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """A check, which is the function ``run`` of a module and yields rows.

    Attributes:
        name: Name on the command line.
        module: Module that holds ``run(settings)``.
        needs_seconds: Time without which the check is skipped, because no row would be done.
        limit_seconds: Time after which the check is ended.
        question: What the check answers.
        cannot_tell: What its rows leave open, unless a row says it itself.
        on_cpu: Whether it can run with ``--device cpu``.
        environment: Environment of its process besides the command's.
    """

    name: str
    module: str
    needs_seconds: float
    limit_seconds: float
    question: str
    cannot_tell: str = ""
    on_cpu: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


_PACKAGE = "check_gpu"
_TORCHS_DEFAULTS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "LAZY"}
_STEPS_CANNOT_TELL = (
    "what several GPUs add: with one, no collective sends anything, and states take all the memory"
)
_PUSHES_CANNOT_TELL = "how much of the GPU NCCL takes: its kernel has up to 4 blocks of 640 threads, the one here 1 thread"

CHECKS = (
    Check(
        "machine", f"{_PACKAGE}.machine", 15, 60,
        "What is this machine, and how fast can it multiply and copy?",
        "the rates of a GPU that is hot or shared",
    ),
    Check(
        "flex", f"{_PACKAGE}.flex", 25, 200,
        "Does each kind of attention compile, how long and how often, and which kernel does it get?",
        "whether another version of torch compiles it",
    ),
    Check(
        "parity", f"{_PACKAGE}.parity", 30, 120,
        "Are log-probabilities, attention and losses as exact as float64 on the CPU?",
        "whether a whole run learns",
    ),
    Check(
        "allocator", f"{_PACKAGE}.allocator", 15, 70,
        "Are snapshots exact while training allocates and frees memory?",
        "copies beside NCCL's kernels",
    ),
    Check(
        "streams", f"{_PACKAGE}.streams", 15, 60,
        "Does a push share a stream with anything, and does joining a server start watchdogs?",
        "what a lost server does to NCCL: a group of one rank has no peer",
    ),
    Check(
        "train-0.6b", f"{_PACKAGE}.train", 40, 200,
        "How fast are training steps of a 0.6B model, and where does the time go?",
        _STEPS_CANNOT_TELL,
    ),
    Check(
        "train-1.7b", f"{_PACKAGE}.train", 40, 200,
        "How fast are training steps of a 1.7B model, and where does the time go?",
        _STEPS_CANNOT_TELL,
    ),
    Check(
        "isolation", f"{_PACKAGE}.isolation", 40, 150,
        "Does a push, to servers that never answer or to disk, slow down training steps?",
        _PUSHES_CANNOT_TELL,
    ),
    Check(
        "decode", f"{_PACKAGE}.decode", 25, 120,
        "How fast does the embedded server decode, with CUDA graphs, without, and beside a push?",
        "requests of mixed lengths that come and go",
    ),
    Check(
        "output-layer", f"{_PACKAGE}.output_layer", 15, 60,
        "How fast are the fused log-probabilities, and does the host wait for them?",
        "the errors, which parity measures",
    ),
    Check(
        "boundary", f"{_PACKAGE}.train", 30, 90,
        "What does publishing cost a training step, and how much memory?",
        "what waits for the gathered version: nothing reads the slots",
    ),
    Check(
        "pushes", f"{_PACKAGE}.pushes", 25, 60,
        "Do 16 pushes slow down steps, and does a kernel that is used first wait for a push?",
        _PUSHES_CANNOT_TELL, on_cpu=False,
    ),
    Check(
        "pushes-torch", f"{_PACKAGE}.pushes", 25, 60,
        "Do the pushes disturb more with torch's defaults for queues and for the loading of kernels?",
        _PUSHES_CANNOT_TELL, on_cpu=False, environment=_TORCHS_DEFAULTS,
    ),
    Check(
        "nccl", f"{_PACKAGE}.nccl", 25, 90,
        "Can a process leave an NCCL group at once?",
        "a broadcast under way: one rank sends nothing, so NCCL launches no kernel", on_cpu=False,
    ),
    Check(
        "end-to-end", f"{_PACKAGE}.end_to_end", 90, 270,
        "Does a run survive a server that stands still and is killed, at the same pace?",
        "pushes over NCCL: servers that share the GPU with training get weights over gloo",
    ),
)  # fmt: skip
