# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts SGLang's own server on a machine without a GPU, without changing a file of SGLang.

    python .../torchtitan/grpo/inference/sglang/cpu_main.py --model-path DIR --device cpu ...

It must be run by path, with the interpreter of SGLang's environment, and it imports nothing of
this package. SGLang imports two modules that do not load beside a CPU build of torch and that it
does not call on a CPU. This file puts stand-ins in their place first. It does so in the scheduler's
process as well, because a spawned process imports the main file again.
"""

import runpy
import sys
import types
from pathlib import Path

# A file that is run by path makes its folder importable, and modules in the folder would shadow
# other modules of the same name.
sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]

import torch  # noqa: E402

# Kept alive, because the schemas of a library end with the library object.
_TORCHVISION = torch.library.Library("torchvision", "DEF")


def install_stand_ins() -> None:
    """Declares torchvision's operators and an empty ``vllm``."""
    # torchvision's C extension, which declares the operators, needs the torch that it was built
    # with.
    _TORCHVISION.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _TORCHVISION.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # Without CUDA, SGLang imports a rotary embedding kernel from vLLM, which the attention
    # backend `torch_native` does not use.
    package = types.ModuleType("vllm")
    operators = types.ModuleType("vllm._custom_ops")
    operators.rotary_embedding = None  # type: ignore[attr-defined]
    package._custom_ops = operators  # type: ignore[attr-defined]
    sys.modules["vllm"] = package
    sys.modules["vllm._custom_ops"] = operators


install_stand_ins()

if __name__ == "__main__":
    sys.argv[0] = "sglang.launch_server"
    # Without alter_sys, so that this file stays the main module, which spawned children import.
    runpy.run_module("sglang.launch_server", run_name="__main__")
