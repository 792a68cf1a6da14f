"""Scatters plans and a signal; every rank returns what it received."""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from torchtitan.grpo.data.feed import Feed, Signal, TrainBatch
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.data.step_plan import SampleTable, StepPlan
from torchtitan.grpo.losses.loss_metrics import Metric, MetricTotals
from torchtitan.grpo.types import BatchPart, PromptProgress

NUM_SAMPLES = (2, 0, 3)
TOP_K = (0, 3, 2)
PARTS = (BatchPart.FIRST, BatchPart.MIDDLE, BatchPart.LAST)
# Neighbors in float64 and far-off ids: a table that went through float32 would lose them.
REWARDS = np.array([1 / 3, np.nextafter(1 / 3, 1), -0.0])
GROUP_IDS = np.array([7, 2**60 + 1, -3])


def rows(fill, num_rows, row_len, top_k):
    whole = torch.full((num_rows, row_len), fill) + torch.arange(num_rows)[:, None] * 100
    ints = {name: whole + i for i, name in enumerate(("tokens", "positions", "sequence_ids"))}
    floats = {
        name: whole / (3.0 + i)
        for i, name in enumerate(("generator_logprobs", "loss_weights", "ptx_weights"))
    }
    columns = {}
    if top_k:
        columns["teacher_top_ids"] = (whole[..., None] + torch.arange(top_k)).to(torch.int32)
        columns["teacher_top_logprobs"] = columns["teacher_top_ids"] / 7.0
        columns["teacher_logprobs"] = whole / 8.0
    return TrainRows(
        **ints,
        **floats,
        labels=whole + 3,
        loss_mask=whole % 2 == 0,
        advantages=whole / 4.0,
        sample_ids=whole % 3 - 1,
        columns=columns,
    )


def progress(step):
    """Returns progress with as many open prompts as there were steps."""
    return PromptProgress(7 + step, tuple(range(step)))


def plan(step):
    n = NUM_SAMPLES[step]
    table = SampleTable(REWARDS[:n], GROUP_IDS[:n], np.arange(n) + 1)
    # The number of rows changes from step to step.
    of_ranks = [rows(fill + step, 2 * (1 + step), 4, TOP_K[step]) for fill in (10, 20)]
    layout = [[[] for _ in range(dealt.num_rows)] for dealt in of_ranks]
    made = StepPlan([], layout, 4, [3 + step, 0], table, 6, 5, 9, {})
    shapes = {name: tensor.shape[2:] for name, tensor in of_ranks[0].columns.items()}
    vars(made).update(rows_of_rank=of_ranks, column_shapes=shapes)  # as if laid out
    return made


def is_as_sent(batch, step, batch_rank):
    expected = rows(10 * (1 + batch_rank) + step, 2 * (1 + step), 4, TOP_K[step])
    # Advantages do not travel: each rank computes its own.
    expected = replace(expected, advantages=torch.zeros_like(expected.advantages))
    table = plan(step).samples
    return all(
        minibatch.tensors().keys() == part.tensors().keys()
        and torch.equal(value, part.tensors()[name])
        and value.dtype == part.tensors()[name].dtype
        for minibatch, part in zip(batch.minibatches, expected.microbatches(1 + step), strict=True)
        for name, value in minibatch.tensors().items()
    ) and all(
        vars(batch.samples)[name].tobytes() == column.tobytes()
        for name, column in vars(table).items()
    )


def main(arguments):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Ranks 0 and 1 share a data-parallel coordinate, as tensor-parallel ranks do.
    feed = Feed(batch_rank=rank // 2, row_len=4, timeout_seconds=30)
    received = []
    for step in range(len(NUM_SAMPLES)):
        if rank == 0:
            batch = feed.send_step(
                plan(step),
                publish_slot=step,
                progress=progress(step),
                part=PARTS[step],
            )
        else:
            batch = feed.receive()
        assert isinstance(batch, TrainBatch)
        received.append([is_as_sent(batch, step, rank // 2), batch.num_trained_tokens,
                         batch.num_tokens, batch.publish_slot, batch.progress == progress(step),
                         batch.minibatch_tokens, batch.mass, int(batch.part)])  # fmt: skip
    if rank == 0:
        feed.send_signal(Signal.STOP)
        signal = Signal.STOP
    else:
        signal = feed.receive()
    total = feed.all_reduce_sum(torch.tensor([1.0 + rank]))
    result = {"received": received, "signal": signal.name, "total": total.item()}
    return result | {"metrics": combined_metrics(feed, rank)}


def combined_metrics(feed, rank):
    """Returns metrics to which each rank but the last has added one microbatch."""
    reductions = {"sum": "sum", "mean": "mean", "max": "max", "min": "min", "loss": "loss"}
    totals = MetricTotals(reductions)
    if rank < dist.get_world_size() - 1:
        one, value = torch.tensor(1.0), torch.tensor(-2.0 - rank)
        numbers = dict.fromkeys(reductions, (value,)) | {"mean": (value, one)}
        totals.add([{name: Metric(reductions[name], numbers[name]) for name in reductions}])
    norm = feed.all_reduce_metrics(totals, torch.tensor(5.0 + rank))
    return totals.values(num_optimizer_steps=2) | {"norm of rank 0": norm}
