"""A training pass with other rows' forward passes in its gaps, compared with separate passes."""

import torch
import torch.distributed as dist
from build_model import build_stages
from deferred_gradients import gathered
from reference_ranks import reference_of
from sharded_model import picked_sum, rows_of, runner_of

from torchtitan.grpo.pipeline.table_schedule import GapStage
from torchtitan.grpo.training.runner import ForwardJob


def run_case(arguments: dict, case: dict) -> dict:
    built, stages = build_stages(arguments["policy"], arguments["seq_len"], **case)
    runner = runner_of(built, stages)
    reference = reference_of(built, arguments["reference"])
    rows = rows_of(arguments)
    models = {"old": runner, "ref": reference}
    weighted = picked_sum(rows)

    expected_outputs = {name: model.forward(rows) for name, model in models.items()}
    runner.forward_backward(rows, weighted)
    expected = gathered(built.parts)

    passes = [0]
    forward = GapStage.forward_one_chunk

    def counted(stage, *arguments, **named):
        passes[0] += 1
        return forward(stage, *arguments, **named)

    GapStage.forward_one_chunk = counted
    done, different, metrics = [], [], [runner.take_metrics()]
    for order in (("old", "ref"), ("ref", "old")):
        for part in built.parts:
            part.zero_grad()
        jobs = {name: ForwardJob(models[name], rows) for name in order}
        runner.forward_backward(rows, weighted, list(jobs.values()))
        metrics.append(runner.take_metrics())
        done.append([rows.num_rows - job.waiting.num_rows for job in jobs.values()])
        # Before the rest is computed, which must not change the gradients either.
        for name, job in jobs.items():
            logprobs, output = job.logprobs(), expected_outputs[name]
            if (logprobs is None) != (output is None):
                different.append(f"{name} is not there")
            elif logprobs is not None and not torch.equal(logprobs, output[..., 0]):
                different.append(name)
        found = gathered(built.parts)
        different += [name for name in found if not torch.equal(found[name], expected[name])]
    GapStage.forward_one_chunk = forward
    stages_of_rank = [*runner.schedule.stages, *(s for s in runner.schedule._stages)]
    return {
        "done": done,
        "metrics": [*metrics, runner.take_metrics()],
        "microbatch_rows": runner.microbatch_rows,
        "passes": passes[0],
        "different": different,
        "held": sum(len(s.args_recv_info) + len(s._leaving) for s in stages_of_rank),
    }


def main(arguments: dict) -> dict:
    results = [run_case(arguments, case) for case in arguments["cases"]]
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, results)
    return {"results": of_ranks}
