"""Scatters two plans and a signal; every rank returns what it received."""

import torch
import torch.distributed as dist

from torchtitan.grpo.data.feed import Feed, Signal, TrainBatch
from torchtitan.grpo.data.plan import StepPlan
from torchtitan.grpo.data.rows import TrainRows


def rows(fill, num_rows, row_len):
    whole = torch.full((num_rows, row_len), fill)
    return TrainRows(
        whole, whole + 1, whole + 2, whole + 3, whole % 2 == 0, whole / 2.0, whole / 4.0
    )


def main(arguments):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Ranks 0 and 1 share a data-parallel coordinate, as tensor-parallel ranks do.
    feed = Feed(batch_rank=rank // 2, row_len=4, timeout_seconds=30)
    received = []
    for step in range(2):
        if rank == 0:
            plan = StepPlan([rows(10 + step, 1 + step, 4), rows(20 + step, 1 + step, 4)], 5, 9, {})
            batch = feed.send_step(plan, publish_slot=step, prompt_position=7 + step)
        else:
            batch = feed.receive()
        assert isinstance(batch, TrainBatch)
        expected = rows(10 * (1 + rank // 2) + step, 1 + step, 4)
        equal = all(torch.equal(v, vars(expected)[k]) for k, v in vars(batch.rows).items())
        received.append([equal, batch.num_trained_tokens, batch.num_tokens, batch.publish_slot,
                         batch.prompt_position])  # fmt: skip
    if rank == 0:
        feed.send_signal(Signal.STOP)
        signal = Signal.STOP
    else:
        signal = feed.receive()
    total = feed.all_reduce_sum(torch.tensor([1.0 + rank]))
    return {"received": received, "signal": signal.name, "total": total.item()}
