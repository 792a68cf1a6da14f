# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts SGLang's own server on a machine without a GPU; no file of SGLang is changed.

    python .../torchtitan/grpo/inference/sglang/cpu_main.py --model-path DIR --device cpu ...

Run it by path, with the interpreter of SGLang's environment: it needs nothing of ours.
Two things that SGLang imports and never calls on this path do not load beside a CPU
build of torch; they are put in their places first, in the scheduler's process as well
(which, being spawned, imports this file anew).
"""

import runpy
import sys
import types
from pathlib import Path

# Run by path, this file's folder would be importable, and its `http.py` would shadow the
# standard library's.
sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]

import torch  # noqa: E402

# Kept alive: a library that is collected takes its schemas with it.
_TORCHVISION = torch.library.Library("torchvision", "DEF")


def install_stand_ins() -> None:
    """Declares torchvision's operators and an empty ``vllm``."""
    # torchvision's C extension, which declares them, needs the torch of its own build.
    _TORCHVISION.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _TORCHVISION.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # SGLang takes a rotary embedding kernel from vLLM where there is no CUDA; torch's own
    # attention backend does without.
    package = types.ModuleType("vllm")
    operators = types.ModuleType("vllm._custom_ops")
    operators.rotary_embedding = None  # type: ignore[attr-defined]
    package._custom_ops = operators  # type: ignore[attr-defined]
    sys.modules["vllm"] = package
    sys.modules["vllm._custom_ops"] = operators


install_stand_ins()

if __name__ == "__main__":
    sys.argv[0] = "sglang.launch_server"
    # Without alter_sys: this file must stay the main module that spawned children import.
    runpy.run_module("sglang.launch_server", run_name="__main__")
