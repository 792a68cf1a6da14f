"""Values, gradients and the gradient norm of a critic under several layouts."""

from types import SimpleNamespace
from typing import Any

import torch
from build_model import Built, build
from safetensors.torch import load_file
from sharded_model import rows_of, whole

from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.models.hf_names import ValueAdapter
from torchtitan.grpo.models.packed_model import ValueHead
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.training.critic import Critic, ValueTargets, build_critic
from torchtitan.grpo.training.model_spec import critic_args, hf_train_spec


def critic_of(built: Built, path: str | None) -> Critic:
    config = built.config
    config.grpo.advantage, config.critic.path, config.critic.value_clip = "gae", path, 0.0
    config.training.max_norm = 1e9
    trainer: Any = SimpleNamespace(
        job_config=config,
        parallel_dims=built.dims,
        train_spec=hf_train_spec(built.hf_model, config, 10),
        model_args=built.hf_model.model_args,
        device=torch.device("cpu"),
    )
    return build_critic(trainer)


def targets_of(rows: TrainRows) -> ValueTargets:
    """Every trained token has the weight 1 and the return 0.5, which gives a loss worked out easily."""
    weights = rows.loss_mask.float()
    return ValueTargets(torch.zeros_like(weights), 0.5 * weights, weights)


def gradient_errors(
    critic: Critic, built: Built, expected: dict[str, torch.Tensor], num_copies: int
) -> dict[str, float]:
    adapter = ValueAdapter(critic_args(built.hf_model.model_args), None)
    errors = {}
    for name, parameter in named_parameters(critic.parts):
        assert parameter.grad is not None, name
        found = adapter.to_hf({name: whole(parameter.grad) / num_copies})
        distance = torch.stack([(found[key] - expected[key]).norm() for key in found]).norm()
        errors[name] = float(distance / torch.stack([expected[k].norm() for k in found]).norm())
    return errors


def run_case(arguments: dict, case: dict) -> dict:
    built = build(case["policy"], arguments["seq_len"], **case["layout"])
    critic, rows = critic_of(built, case["critic"]), rows_of(arguments)
    values = critic.values(rows).logprobs()
    critic.runner.forward_backward(rows, critic.loss(targets_of(rows)))
    heads = [m for part in critic.parts for m in part.modules() if isinstance(m, ValueHead)]
    # Every data-parallel rank had all rows, and gradients are summed.
    num_copies = case["layout"].get("dp_shard", 1) * case["layout"].get("dp_replicate", 1)
    errors = gradient_errors(critic, built, load_file(case["gradients"]), num_copies)
    result = {
        "values": None if values is None else values[rows.loss_mask].tolist(),
        "elsewhere": 0.0 if values is None else float(values[~rows.loss_mask].abs().max()),
        "gradient_errors": errors,
        "norm": float(critic.clipper.clip()) / num_copies,
        "head_dtypes": [str(head.weight.dtype) for head in heads],
    }
    critic.optimizers.step()
    copies = [whole(p.detach()) for name, p in named_parameters(critic.parts) if "output" in name]
    result["stepped_head"] = [float(head.double().sum()) for head in copies]
    return result


def main(arguments):
    return {case["name"]: run_case(arguments, case) for case in arguments["cases"]}
