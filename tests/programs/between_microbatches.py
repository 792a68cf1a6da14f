"""Counts FSDP2's work in an optimizer step of several microbatches, and compares its results."""

from collections import Counter
from typing import Any

import torch
import torch.nn as nn
from build_model import build, build_stages
from sharded_model import picked_sum, rows_of, runner_of, whole
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.grpo.models.lora import begin_adapters
from torchtitan.grpo.training.model_spec import whole_model_runner

COUNTED = {
    "_allgather_base_": "gathers",
    "_reduce_scatter_base_": "reduce_scatters",
    "allreduce_": "all_reduces",
    "chunk_cat": "reductions",
}


class Work(TorchDispatchMode):
    """Counts collectives, and what FSDP2 does instead of them on one rank.

    Only FSDP2 casts flat parameters, and it copies gradients with ``chunk_cat`` before it reduces
    them, however many ranks there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in COUNTED:
            self.counts[COUNTED[name]] += 1
        dtype = (kwargs or {}).get("dtype")
        if name == "_to_copy" and dtype == torch.bfloat16 and args[0].ndim == 1:
            self.counts["casts"] += 1
        if name == "div" and isinstance(args[1], float) and args[0].ndim == 1:
            self.counts["divisions"] += 1
        return func(*args, **(kwargs or {}))


def state_of(model: nn.Module) -> dict[str, Any]:
    """Returns what FSDP2 holds beside shards: gathered bytes, and unreduced gradients."""
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    params = [param for group in set(groups) for param in group.fsdp_params]
    outputs = [out for param in params for out in param.all_gather_outputs]
    return {
        "num_groups": len([g for g in set(groups) if g.fsdp_params]),
        "num_params": len(params),
        "gathered": sum(out.untyped_storage().size() for out in outputs),
        "unreduced": sum(
            param.unsharded_accumulated_grad is not None
            or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
            for param in params
        )
        + sum(group._partial_reduce_output is not None for group in set(groups)),
    }


def trained(arguments: dict, layout: dict[str, Any], kept: str) -> dict[str, Any]:
    built = build(arguments["model"], arguments["seq_len"], kept=kept, **layout)
    model, rows = built.parts[0], rows_of(arguments)
    begin_adapters(built.parts, seed=0)
    built.config.training.local_batch_size = 1
    runner = whole_model_runner(model, built.config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(output, part):
        return -(output[..., 0] * rows.select(part).loss_mask).sum()

    result: dict[str, Any] = {"before": runner.forward(rows)[..., 0].tolist()}
    for _ in range(2):
        optimizer.zero_grad()
        with Work() as work:
            runner.forward(rows)
        result["forward_alone"] = dict(work.counts)
        with Work() as work:
            runner.forward_backward(rows, loss)
        gradients = [whole(p.grad) for p in model.parameters() if p.grad is not None]
        result.setdefault("gradients", [g.flatten()[:50].tolist() for g in gradients])
        result.setdefault("norm", float(torch.stack([g.norm() for g in gradients]).norm()))
        result["pass_alone"], result["state"] = dict(work.counts), state_of(model)
        optimizer.step()
    result["after"] = runner.forward(rows)[..., 0].tolist()
    result["state_after_pass"] = state_of(model)
    return result


def pipelined(arguments: dict, layout: dict[str, Any]) -> dict[str, Any]:
    built, stages = build_stages(arguments["model"], arguments["seq_len"], **layout)
    rows = rows_of(arguments)
    runner, loss = runner_of(built, stages), picked_sum(rows)
    runner.forward_backward(rows, loss)  # the first pass infers shapes
    with Work() as work:
        runner.forward_backward(rows, loss)
    states = [state_of(part) for part in built.parts]
    return {"counts": dict(work.counts), "num_groups": sum(s["num_groups"] for s in states)}


def main(arguments):
    layout = arguments["layout"]
    if "pp" in layout:
        return pipelined(arguments, layout)
    return {"cases": [trained(arguments, layout, kept) for kept in arguments["kept"]]}
