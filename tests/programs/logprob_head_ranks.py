"""Compares a parallelised model with a LogprobHead with the same model in one process."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    SequenceParallel,
    parallelize_module,
)

from torchtitan.grpo.models.packed_model import ScoringSettings, replace_output
from torchtitan.grpo.system.device import prepare_fsdp_for_gloo

DIM, VOCAB = 8, 301
SETTINGS = ScoringSettings(
    attention="sdpa",
    compiled=False,
    temperature=0.8,
    chunk_tokens=2,
    with_entropy=True,
    trains_entropy=True,
    keep_logits=True,
)


class Tail(nn.Module):
    """The end of a model: norm and output layer with upstream's names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)
        replace_output(self, SETTINGS)

    def forward(self, hidden):
        return self.output(self.norm(hidden))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    return float((ours - theirs).norm() / theirs.norm())


def data(rows: int):
    torch.manual_seed(7)
    shape = (rows, 6)
    others = torch.rand(*shape, VOCAB).topk(9).indices
    labels = torch.randint(0, VOCAB, shape), others
    return torch.randn(*shape, DIM), labels, torch.randn(*shape, 2 + 9)


def score(model: nn.Module, hidden, labels, grads):
    hidden, (labels, others) = hidden.clone().requires_grad_(), labels
    with model.output.labeled(labels, other_ids=others):
        packed = model(hidden)
    (packed * grads).sum().backward()
    return packed.detach(), hidden.grad


def apply_tensor_parallel(model: nn.Module, mesh) -> None:
    plan = {
        # Whole hidden states in, cut along the sequence; upstream's embedding does that.
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=True
        ),
    }
    parallelize_module(
        model, mesh,
        PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
    )  # fmt: skip
    parallelize_module(model, mesh, plan)


def tensor_parallel(arguments):
    degree, world = arguments["tp"], dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // degree, degree), mesh_dim_names=("dp", "tp"))
    hidden, labels, grads = data(4)
    one = Tail()
    expected, expected_hidden = score(one, hidden, labels, grads)

    model = Tail()
    apply_tensor_parallel(model, mesh["tp"])
    mine = slice(0, 4)
    if world > degree:
        for part in (model.norm, model.output, model):
            fully_shard(part, mesh=mesh["dp"])
        for part in (model.norm, model.output, model):
            part.set_gradient_divide_factor(1.0)
        prepare_fsdp_for_gloo(model)
        half = mesh.get_local_rank("dp") * 2
        mine = slice(half, half + 2)
    packed, hidden_grad = score(model, hidden[mine], [x[mine] for x in labels], grads[mine])
    return {
        "names": [name for name, _ in model.named_parameters()],
        "errors": {
            "packed": relative(packed, expected[mine]),
            "hidden": relative(hidden_grad, expected_hidden[mine]),
            "norm": relative(model.norm.weight.grad, one.norm.weight.grad),
            "output": relative(model.output.weight.grad, one.output.weight.grad),
        },
    }


def mixed_precision(arguments):
    hidden, labels, grads = data(2)
    one = Tail()
    expected, _ = score(one, hidden, labels, grads)
    model = Tail()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.norm, model.output, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
        part.set_gradient_divide_factor(1.0)
    prepare_fsdp_for_gloo(model)
    packed, _ = score(model, hidden, labels, grads / dist.get_world_size())
    return {
        "dtypes": [str(packed.dtype), str(model.output.weight.grad.dtype)],
        "errors": {
            "packed": relative(packed, expected),
            "norm": relative(model.norm.weight.grad, one.norm.weight.grad),
            "output": relative(model.output.weight.grad, one.output.weight.grad),
        },
    }


def main(arguments):
    dist.init_process_group("gloo")
    cases = {
        "tensor_parallel": tensor_parallel,
        "mixed_precision": mixed_precision,
    }
    return {name: cases[name](arguments) for name in arguments["cases"]}
