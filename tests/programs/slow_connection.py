"""Lets ``auto`` choose a schedule where a tensor takes long from rank to rank."""

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
        arguments["model"], 12, pp=3, schedule="auto", folder=arguments["folder"]
    )
    return {"schedule": built.config.parallelism.pipeline_parallel_schedule}
