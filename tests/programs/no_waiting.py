"""Finds operations in a training microbatch that would make the host wait for a device."""

from typing import Any

import torch
from build_model import build_stages
from sharded_model import rows_of, runner_of
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.grpo.training.scoring import MinibatchLoss
from torchtitan.grpo.training.trainee import ScoredRows

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")
"""Operations whose result, or its shape, the host must know."""


class Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        is_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if name in WAITING or is_mask:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def waits_of(arguments: dict, case: dict) -> dict[str, list[str]]:
    case = dict(case)
    entropy, kl, ends_in_item = (case.pop(k, 0.0) for k in ("entropy_coef", "kl_coef", "item"))
    built, stages = build_stages(arguments["model"], arguments["seq_len"], **case)
    settings: Any = built.config.grpo
    settings.entropy_coef, settings.kl_coef = entropy, kl
    rows = rows_of(arguments)
    rows = rows.with_advantages(torch.linspace(-1, 1, len(arguments["sequences"])).numpy())
    others = torch.where(rows.loss_mask, -3.0, 0.0)
    scored = ScoredRows(rows, others, others if kl else None)
    loss = MinibatchLoss(scored, settings)

    def loss_of(output, part):
        value = loss(output, part)
        return value * float(value.detach()) if ends_in_item else value

    runner = runner_of(built, stages, rows_at_once=1)
    runner.forward_backward(rows, loss_of)  # the first pass infers shapes
    with Waits() as waits:
        runner.forward_backward(rows, loss_of)
    return {"waits": waits.found}


def main(arguments):
    return {"cases": [waits_of(arguments, case) for case in arguments["cases"]]}
