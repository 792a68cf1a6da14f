# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares what training computes with float64 on the CPU, gradients included."""

from collections.abc import Iterator
from typing import Any, get_args

import torch

from check_gpu.flex import AttentionCase, failure
from check_gpu.parts import device_of, relative_error
from check_gpu.row import Row, Settings, judged
from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.linear_logprobs import packed_linear_logprobs
from torchtitan.grpo.losses.objective import LossInputs, objective
from torchtitan.grpo.losses.policy_terms import BUILTIN
from torchtitan.grpo.models.packed_attention import PackedAttentionKind

_TEMPERATURE = 0.7
_LOGPROB_BOUNDS = {"logprob_nats": 1e-3, "entropy_nats": 2e-3}
_HALF, _FULL, _LOSS = 2e-2, 1e-4, 1e-4


def run(settings: Settings) -> Iterator[Row]:
    """Yields rows for log-probabilities, each kind of attention, and each policy loss."""
    # One slice of the whole vocabulary is narrower than a block, or has several blocks.
    sizes = [(512, 151_936, 1024), (3000, 32_000, 1024)] if settings.on_gpu else [(64, 997, 32)]
    for size in sizes:
        for dtype in (torch.bfloat16, torch.float32) if settings.on_gpu else (torch.float32,):
            yield _logprobs(settings, *size, dtype)
    for kind in get_args(PackedAttentionKind):
        try:
            yield _attention(kind, settings)
        except Exception as error:
            yield failure(f"{kind} attention", error, settings)
    for name in BUILTIN:
        yield _loss(name, device_of(settings))


def _judged(case: str, errors: dict[str, float], bounds: dict[str, float]) -> Row:
    holds = all(errors[name] <= bound for name, bound in bounds.items())  # False for NaN
    bound = ", ".join(f"{name} {bound:g}" for name, bound in bounds.items())
    return judged(case, holds, f"at most {bound}", errors)


def _logprobs(settings: Settings, tokens: int, vocab: int, dim: int, dtype: torch.dtype) -> Row:
    """Compares with entropy, temperature and two other ids; gradients go into all of them."""
    torch.manual_seed(1)
    device = device_of(settings)
    inputs = [torch.randn(tokens, dim), torch.randn(vocab, dim) * dim**-0.5]
    hidden, weight = (t.to(dtype).to(device).requires_grad_() for t in inputs)
    ids = torch.rand(tokens, min(vocab, 997)).topk(3, dim=1).indices  # of a token all different
    grad = torch.randn(tokens, 4)
    found = packed_linear_logprobs(
        hidden, weight, ids[:, 0].to(device), temperature=_TEMPERATURE, with_entropy=True,
        chunk_tokens=GRPO().logprob_chunk_tokens, other_ids=ids[:, 1:].to(device),
    )  # fmt: skip
    found.backward(grad.to(device))
    exact_hidden, exact_weight = (
        t.detach().cpu().double().requires_grad_() for t in (hidden, weight)
    )
    logprobs = torch.log_softmax(exact_hidden @ exact_weight.T / _TEMPERATURE, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(1, keepdim=True)
    label, others = logprobs.gather(1, ids).tensor_split((1,), dim=1)
    exact = torch.cat((label, entropy, others), dim=1)
    exact.backward(grad.double())
    nats = (found.detach().cpu().double() - exact.detach()).abs().amax(0)
    assert hidden.grad is not None and weight.grad is not None
    assert exact_hidden.grad is not None and exact_weight.grad is not None
    errors = {
        "logprob_nats": float(nats[[0, 2, 3]].max()),
        "entropy_nats": float(nats[1]),
        "hidden_gradient": relative_error(hidden.grad, exact_hidden.grad),
        "weight_gradient": relative_error(weight.grad, exact_weight.grad),
    }
    part = _HALF if dtype == torch.bfloat16 else _FULL
    bounds = _LOGPROB_BOUNDS | {"hidden_gradient": part, "weight_gradient": part}
    case = f"log-probabilities, {tokens} tokens, vocabulary {vocab}, {str(dtype)[6:]}"
    return _judged(case, errors, bounds)


def _attention(kind: PackedAttentionKind, settings: Settings) -> Row:
    case = AttentionCase(kind, settings, 2, 2048 if settings.on_gpu else 64)
    reach = case.reach(1)
    out = case.attend(reach)
    out.backward(case.grad)
    q, k, v = (t.detach()[:1].cpu().double().requires_grad_() for t in case.inputs)
    seq, row = reach.shape[1], reach[0].cpu()
    seen = (torch.arange(seq)[:, None] < row[None]) & torch.ones(seq, seq, dtype=torch.bool).tril()
    repeats = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeats, 1).mT * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    exact = weights @ v.repeat_interleave(repeats, 1)
    exact.backward(case.grad[:1].cpu().double())
    errors = {"output": relative_error(out[:1], exact)}
    for name, found, of in zip("qkv", case.inputs, (q, k, v), strict=True):
        assert found.grad is not None and of.grad is not None
        errors[f"{name}_gradient"] = relative_error(found.grad[:1], of.grad)
    part = _HALF if case.grad.dtype == torch.bfloat16 else _FULL
    return _judged(f"{kind} attention, {seq} tokens", errors, dict.fromkeys(errors, part))


def _loss(name: str, device: torch.device) -> Row:
    """Compares the whole loss of a microbatch with one policy term, in float32."""
    made = _loss_inputs()
    config = GRPO(policy_loss=name)
    results = []
    for to in ({"device": device}, {"dtype": torch.float64}):
        inputs = {
            n: t.to(**(to if t.is_floating_point() else {"device": to.get("device", "cpu")}))
            for n, t in made.items()
        }
        logprobs = inputs["logprobs"].requires_grad_()
        loss, _ = objective(LossInputs(**inputs, ref_logprobs=None), config)
        (grad,) = torch.autograd.grad(loss, logprobs)
        results.append((loss, grad))
    (loss, grad), (exact_loss, exact_grad) = results
    errors = {
        "loss": relative_error(loss, exact_loss), "gradient": relative_error(grad, exact_grad),
    }  # fmt: skip
    return _judged(f"loss {name}", errors, dict.fromkeys(errors, _LOSS))


def _loss_inputs() -> dict[str, Any]:
    """Returns rows of four sequences each, of which the first quarter is not trained."""
    torch.manual_seed(2)
    rows, seq = 8, 256
    logprobs, noise = -3 * torch.rand(rows, seq), torch.randn(2, rows, seq)
    ids = (torch.arange(seq) // (seq // 4)).expand(rows, seq).contiguous()
    advantages = torch.randn(rows, 4).gather(1, ids)
    return {
        "logprobs": logprobs, "entropy": torch.rand(rows, seq),
        "old_logprobs": logprobs + 0.2 * noise[0],
        "generator_logprobs": logprobs + 0.2 * noise[0] + 0.05 * noise[1],
        "advantages": advantages, "loss_mask": torch.arange(seq) % (seq // 4) >= seq // 16 + torch.zeros(rows, 1),
        "loss_weights": torch.full((rows, seq), 1.0 / (rows * seq)),
        "ptx_weights": torch.zeros(rows, seq), "sequence_ids": ids,
    }  # fmt: skip
