"""Lets ``auto`` choose a schedule where a tensor takes long from rank to rank, with checkpoints."""

import time

import torch.distributed as dist
from build_model import build_stages


def main(arguments):
    send = dist.send

    def send_late(*args, **kwargs):
        time.sleep(arguments["seconds"])
        return send(*args, **kwargs)

    dist.send = send_late
    built, _ = build_stages(
        arguments["model"], 12, pp=3, schedule="auto", ac="full", folder=arguments["folder"]
    )
    assert built.measured is not None
    return {
        "schedule": built.config.parallelism.pipeline_parallel_schedule,
        "recompute": [stage.recompute for stage in built.measured.stages],
        "input_grad": [stage.input_grad for stage in built.measured.stages],
    }
