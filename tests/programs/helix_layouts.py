"""Losses and gradients of HelixPipe's parts in several layouts, against plain accumulation."""

import copy

import torch
from build_model import build_stages
from sharded_model import rows_of, runner_of, whole

from torchtitan.grpo.models.hf_weights import load_hf_weights
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.training.gradient_norm import GradientClipper
from torchtitan.grpo.training.model_spec import hf_train_spec
from torchtitan.grpo.training.runner import WholeModelRunner


class Losses:
    """Weighted sums of the logprobs and entropies of each microbatch."""

    def __init__(self, rows) -> None:
        self.rows, self.seen = rows, {}

    def __call__(self, output, part):
        mask = self.rows.select(part).loss_mask
        weights = torch.linspace(0.5, 1.5, mask.numel()).view(mask.shape)
        loss = (output[..., 0] * weights * mask).sum() + 0.1 * (output[..., 0] ** 2 * mask).sum()
        self.seen[part.start] = loss.detach()
        return loss


def plain(arguments, built, rows, rows_at_once):
    """Accumulates the microbatches' gradients in one process, without any parallelism."""
    model_args = copy.copy(built.hf_model.model_args)
    with torch.device("meta"):
        model = hf_train_spec(built.hf_model, built.config).model_cls(model_args)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    load_hf_weights([model], built.adapter, arguments["model"])
    losses = Losses(rows)
    runner = WholeModelRunner(model, rows_at_once)
    runner.forward_backward(rows, losses)
    return {n: p.grad for n, p in named_parameters([model])}, losses.seen, runner.forward(rows)


def largest(found, expected) -> float:
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in found)


def compare(arguments, layout):
    layout = dict(layout)
    rows = rows_of(arguments | {"rows": layout.pop("rows")})
    built, stages = build_stages(
        arguments["model"], arguments["seq_len"], schedule="Helix", **layout
    )
    runner = runner_of(built, stages)
    rows_at_once = built.config.parallelism.pipeline_parallel_microbatch_size
    expected, losses, outputs = plain(arguments, built, rows, rows_at_once)
    seen = Losses(rows)
    logprobs = runner.forward(rows)
    runner.forward_backward(rows, seen)
    norm = GradientClipper(built.parts, built.dims, 1e9).clip()
    # Every data-parallel rank had all rows, and gradients are summed.
    copies = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
    found = {n: whole(p.grad) / copies for n, p in named_parameters(built.parts)}
    whole_norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    return {
        "names": sorted(found),
        "gradients": largest(found, expected),
        "norm": abs(float(norm) / copies / float(whole_norm) - 1),
        "losses": largest(seen.seen, losses) if seen.seen else 0.0,
        "num_losses": len(seen.seen),
        "outputs": 0.0 if logprobs is None else float((logprobs - outputs).abs().max()),
        "all_names": sorted(expected),
    }


def main(arguments):
    return {"results": [compare(arguments, layout) for layout in arguments["layouts"]]}
