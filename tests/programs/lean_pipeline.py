"""Passes of different lengths through one pipeline, and the memory that its stages then hold."""

import torch
from build_model import build_stages
from deferred_gradients import gathered
from sharded_model import picked_sum, rows_of, runner_of
from torch.distributed.pipelining import PipelineStage


def main(arguments):
    built, stages = build_stages(
        arguments["model"], arguments["seq_len"], pp=2, schedule=arguments["schedule"],
        compiled=arguments["compiled"], folder=arguments["folder"],
        layers_per_stage=arguments.get("layers_per_stage"),
    )  # fmt: skip
    runner = runner_of(built, stages)
    rows = rows_of(arguments)
    inferences = [0]
    infer = PipelineStage._forward_metadata_inference

    def counted(*args, **kwargs):
        inferences[0] += 1
        return infer(*args, **kwargs)

    PipelineStage._forward_metadata_inference = counted
    weighted = picked_sum(rows)

    whole: dict[str, torch.Tensor] = {}
    logprobs = []
    distances = []
    for cuts in arguments["cuts"]:
        for part in built.parts:
            part.zero_grad()
        outputs = []
        for begin, end in zip([0, *cuts], [*cuts, rows.num_rows], strict=True):
            some = rows.select(slice(begin, end))

            def loss_of(output, part, begin=begin):
                return weighted(output, slice(part.start + begin, part.stop + begin))

            runner.forward_backward(some, loss_of)
            output = runner.forward(some)
            outputs += [] if output is None else [output]
        found = gathered(built.parts)
        whole = whole or found
        distances.append(max(float((found[n] - g).norm() / g.norm()) for n, g in whole.items()))
        logprobs.append(torch.cat(outputs).tolist() if outputs else None)
    every = [*runner.schedule.stages, *runner.forward_schedule.stages]
    return {
        "inferences": inferences[0],
        "schedule": built.config.parallelism.pipeline_parallel_schedule,
        "num_stages": len(every),
        "distances": distances,
        "logprobs": logprobs,
        "held": [len(s.args_recv_info) + len(s.grad_recv_info) + len(s._leaving) for s in every],
    }
