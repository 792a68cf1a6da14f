"""A sharded reference model scores, follows the policy, moves, and is restored."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from build_model import Built, build
from sharded_model import rows_of

from torchtitan.grpo.models.hf_config import ModelError
from torchtitan.grpo.models.shards import local_tensor, named_parameters
from torchtitan.grpo.training.model_spec import build_reference, hf_train_spec
from torchtitan.grpo.training.reference import Reference

EMA = 0.75


def reference_of(built: Built, path: str) -> Reference:
    built.config.grpo.ref_model_path = path
    built.config.grpo.ref_model_ema = EMA
    trainer: Any = SimpleNamespace(
        job_config=built.config,
        parallel_dims=built.dims,
        train_spec=hf_train_spec(built.hf_model, built.config),
        model_args=built.hf_model.model_args,
        device=torch.device("cpu"),
    )
    return build_reference(trainer)


def shards(parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    return {name: local_tensor(p).clone() for name, p in named_parameters(parts)}


def unequal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys() and found
    return [name for name in found if not torch.equal(found[name], expected[name])]


def run_case(case: dict, arguments: dict, folder: Path) -> dict:
    built = build(case["policy"], arguments["seq_len"], **case["layout"])
    reference = reference_of(built, case["reference"])
    rows = rows_of(arguments)
    before = reference.forward(rows)
    policy, start = shards(built.parts), shards(reference.parts)
    reference.follow(built.parts)
    averaged = {name: start[name].lerp(policy[name], 1 - EMA) for name in start}
    wrongly_followed = unequal(shards(reference.parts), averaged)

    state = reference.checkpoint_state()
    move(reference)
    reference.follow(built.parts)
    kept, scores = shards(reference.parts), reference.forward(rows)
    dcp.save(dict(state), checkpoint_id=folder)
    move(reference)
    reference.follow(built.parts)
    changed = unequal(shards(reference.parts), kept)
    dcp.load(dict(state), checkpoint_id=folder)
    restored = reference.forward(rows)
    return {
        "has_output": reference.has_output,
        "logprobs": None if before is None else before[..., 0].tolist(),
        "mask": rows.loss_mask.tolist(),
        "wrongly_followed": wrongly_followed,
        "num_changed": len(changed),
        "wrongly_restored": unequal(shards(reference.parts), kept),
        "scores_as_saved": scores is None or torch.equal(scores, torch.as_tensor(restored)),
    }


def move(reference: Reference) -> None:
    for part in reference.parts:
        part._apply(torch.clone)


def refusal(policy: str, reference: str, seq_len: int) -> str:
    built = build(policy, seq_len, dp_shard=dist.get_world_size())
    try:
        reference_of(built, reference)
    except ModelError as error:
        return str(error)
    return ""


def main(arguments):
    folder = Path(arguments["folder"])
    results: dict[str, Any] = {
        case["name"]: run_case(case, arguments, folder / case["name"])
        for case in arguments["cases"]
    }
    results["refusals"] = [
        refusal(arguments["cases"][0]["policy"], path, arguments["seq_len"])
        for path in arguments["refused"]
    ]
    return results
