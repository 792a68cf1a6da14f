# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Counts small steps as `benchmarks/step_work.py` does, and writes what was found to a file.

It has an interpreter of its own: the counted device must exist before torch is imported.
"""

# ruff: noqa: E402  (the device must exist before torch)

import json
import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path += [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "benchmarks/step_work_parts")]

import counted_cuda

counted_cuda.load()
counted_cuda.stand_in()

import steps
import torch
import torch.distributed as dist
from step_work import CASES
from work import Shape

from torchtitan.grpo.training.scoring import MinibatchLoss


def counted(folder: Path, *overrides: str, num_rows: int = 4, step: str = "ours") -> dict[str, Any]:
    case = CASES["tiny"]
    arguments = [*case.arguments, "--model.hf_assets_path", str(folder), *overrides]
    ledger, shape, num_kernels, *_ = steps.count(step, arguments, case.sizes, num_rows)
    return {
        "parts": {part: asdict(work) for part, work in ledger.parts.items()},
        "total": asdict(ledger.total), "waits": dict(ledger.waits), "num_kernels": num_kernels,
        "needed": 3 * shape.forward(shape.padded, shape.scored),
        "forward": shape.forward(shape.padded, 0),
        "head": 3 * (shape.forward((), shape.scored)),
        "attention_backward": shape.sizes["num_hidden_layers"] * 2 * shape.mean_keys
        * shape.sizes["num_attention_heads"] * shape.sizes["head_dim"] * shape.num_tokens,
    }  # fmt: skip


def elementwise() -> dict[str, Any]:
    with steps.counting(Shape(CASES["tiny"].sizes, (8,), (8,), 8)) as (counter, _):
        x = torch.empty(8, 1000, dtype=torch.bfloat16, device="cuda")
        fused = torch.compile(lambda t: (t * 2).exp().sum(-1))
        fused(x)
        found = {}
        for name, run in {"add": lambda: x + x, "in place": lambda: x.add_(1), "fill": x.zero_,
                          "eager": lambda: (x * 2).exp().sum(-1), "compiled": lambda: fused(x)}.items():  # fmt: skip
            counter.ledger, counter.is_paused = type(counter.ledger)(), False
            run()
            counter.is_paused = True
            found[name] = asdict(counter.ledger.total)
    return found


def main() -> None:
    folder, result = map(Path, sys.argv[1:])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    dist.init_process_group("fake", rank=0, world_size=1)
    steps.write_model(folder, CASES["tiny"].sizes)
    none = ("--activation_checkpoint.mode", "none")
    eager = "--compile.no-enable"
    found = {
        "elementwise": elementwise(),
        "plain": counted(folder, *none, eager),
        "checkpointed": counted(folder, "--activation_checkpoint.mode", "full", eager),
        "compiled": counted(folder, *none, "--compile.enable"),
    }
    if version("torchtitan").startswith("0.2."):  # later releases have another trainer
        found["torchtitan"] = counted(folder, *none, "--compile.enable", step="torchtitan")
    call = MinibatchLoss.__call__

    def waiting(self: Any, output: Any, which: Any) -> Any:
        loss = call(self, output, which)
        float(loss.detach())
        return loss

    with mock.patch.object(MinibatchLoss, "__call__", waiting):
        found["waiting"] = counted(folder, *none, eager)
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
