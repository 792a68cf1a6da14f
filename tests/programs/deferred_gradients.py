"""Gradients of a pipeline under several schedules, compared with those of the first case."""

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from build_model import build_stages
from sharded_model import picked_sum, rows_of, runner_of, whole

from torchtitan.grpo.models.blocks.layer import Block
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.models.split_compile import SplitBackend
from torchtitan.grpo.models.weight_grads import WeightGradients
from torchtitan.grpo.pipeline.lean_stage import DeferredStage, LeanStage


def gathered(parts) -> dict[str, torch.Tensor]:
    mine = {}
    for name, parameter in named_parameters(parts):
        assert parameter.grad is not None, name
        mine[name] = whole(parameter.grad).clone()
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return {name: grad for of_rank in everyones for name, grad in of_rank.items()}


def run(arguments: dict, case: dict) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    case = dict(case)
    torch_split, bound = case.pop("torch_split", False), case.pop("bound", None)
    early, steps = case.pop("early", 1), case.pop("steps", 2)
    # InterleavedZeroBubble keeps no logits, and logits that are computed again round differently.
    case["keeps_logits"] = False
    built, stages = build_stages(
        arguments["model"], arguments["seq_len"], early_blocks=early, **case
    )
    split_graphs = []
    note = SplitBackend._note

    def noted(backend, *arguments):
        note(backend, *arguments)
        split_graphs.append(backend.graphs[-1])

    SplitBackend._note = noted
    store = None
    for stage in stages:
        if isinstance(stage, DeferredStage):
            store = stage.store
            store.max_pending_bytes = bound
    if torch_split:
        for stage in stages:
            stage.dw_builder = None
            stage.store = WeightGradients()
            stage.forward_maybe_with_nosync = partial(
                super(DeferredStage, stage).forward_maybe_with_nosync
            )
            stage.backward_maybe_with_nosync = partial(
                super(DeferredStage, stage).backward_maybe_with_nosync
            )
    torch._dynamo.utils.counters.clear()
    runner = runner_of(built, stages)
    rows = rows_of(arguments)
    calls, before_gradient = [0], [0]
    blocks = [m for part in built.parts for m in part.modules() if isinstance(m, Block)]
    # Inside compiled blocks, a hook that counts would compile them again for each number.
    for block in [] if case.get("compiled") else blocks:
        block.attention.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    await_gradient = LeanStage._await_gradient

    def counted(stage, microbatch):
        waits, before = bool(stage._arriving.get(microbatch)), calls[0]
        group = await_gradient(stage, microbatch)
        before_gradient[0] += calls[0] - before if waits else 0
        return group

    LeanStage._await_gradient = counted
    weighted = picked_sum(rows)

    if stages[0].offload is not None:
        stages[0].offload.memory._least_bytes = 0
    for _ in range(steps):  # the first step also infers shapes
        for part in built.parts:
            part.zero_grad()
        calls[0] = before_gradient[0] = 0
        runner.forward_backward(rows, weighted)
    LeanStage._await_gradient = await_gradient
    SplitBackend._note = note
    torch.compiler.reset()
    return gathered(built.parts), {
        "recomputed_before_gradient": before_gradient[0],
        "forwards": calls[0] / len(blocks) / rows.num_rows,
        "peak_bytes": store.peak_bytes if store else 0,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "split": [asdict(graph) for graph in split_graphs],
        "pending_bytes": store.pending_bytes if store else 0,
        "offload": offload_figures(stages),
        "metrics": runner.take_metrics(),
    }


def offload_figures(stages: list) -> dict[str, float] | None:
    plan = stages[0].offload
    if plan is None:
        return None
    memory = plan.memory
    return {
        "peak_bytes": memory.peak_host_bytes,
        "left_bytes": memory.host_bytes,
        "bandwidth": plan._bandwidth,
    }


def main(arguments):
    return {"groups": [compare(arguments, cases) for cases in arguments["groups"]]}


def compare(arguments: dict, cases: list[dict]) -> list[dict[str, Any]]:
    expected: dict[str, torch.Tensor] = {}
    results = []
    for case in cases:
        found, figures = run(arguments, case)
        expected = expected or found
        assert found.keys() == expected.keys()
        different = [name for name, grad in found.items() if not torch.equal(grad, expected[name])]
        distance = max(
            float((grad - expected[name]).norm() / expected[name].norm())
            for name, grad in found.items()
        )
        results.append({"different": different, "distance": distance, **figures})
    return results
