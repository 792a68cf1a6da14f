# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the attention kernel for packed rows, and tries it before a run depends on it."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.packed_attention import (
    PackedAttention,
    PackedAttentionKind,
    flex_pays,
    packed_mask,
)
from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.system.logs import logger

_VARLEN_CAPABILITY = (8, 0)
_VARLEN_DTYPE = "bfloat16"
_VARLEN_MAX_HEAD_DIM, _VARLEN_HEAD_DIM_MULTIPLE = 256, 8

# Far above what 16 bits lose, and far below what one token of another sequence adds.
_TOLERANCE = 0.05
# Number of tokens of each span, and its reach. In the second row three sequences share a context, and
# two of them another one.
_TRIED = (
    ((100, 100), (28, 128), (128, 256)),
    ((1, 1), (55, 256), (20, 156), (30, 106), (50, 156), (100, 256)),
)
_TRIED_HEADS = (4, 2, 2)

_failed: dict[PackedAttentionKind, str] = {}


def choose_packed_attention(
    config: JobConfig, device_type: str, head_dim: int | None = None
) -> PackedAttentionKind:
    """Returns the kernel that ``grpo.packed_attention`` names or ``auto`` chooses, for heads of ``head_dim``."""
    if config.grpo.packed_attention != "auto":
        return config.grpo.packed_attention
    return next(
        kind
        for kind in _candidates(config, device_type, head_dim)
        if kind not in _failed or kind == "sdpa"
    )


def _candidates(
    config: JobConfig, device_type: str, head_dim: int | None
) -> Iterator[PackedAttentionKind]:
    """Yields the choices of ``auto``, the fastest first."""
    if device_type == "cuda":
        if varlen_problem(config, head_dim) is None:
            yield "varlen"
        if flex_pays(config.training.seq_len):
            yield "flex"
    yield "sdpa"


def varlen_problem(config: JobConfig, head_dim: int | None = None) -> str | None:
    """Returns which requirement of ``varlen`` is not met, as the end of a sentence, or None if all are."""
    if not torch.cuda.is_available():
        return "a CUDA GPU, and none is visible"
    if (found := torch.cuda.get_device_capability()) < _VARLEN_CAPABILITY:
        return f"a GPU of compute capability 8.0 or more, and this one has {found[0]}.{found[1]}"
    if (dtype := config.training.mixed_precision_param) != _VARLEN_DTYPE:
        return f"training.mixed_precision_param = {_VARLEN_DTYPE!r}, got {dtype!r}"
    if head_dim and (head_dim > _VARLEN_MAX_HEAD_DIM or head_dim % _VARLEN_HEAD_DIM_MULTIPLE):
        return (
            f"attention heads whose size is a multiple of {_VARLEN_HEAD_DIM_MULTIPLE} and at most "
            f"{_VARLEN_MAX_HEAD_DIM}, and the model's have {head_dim}"
        )
    return None


def try_packed_attention(config: JobConfig, device: torch.device, head_dim: int) -> None:
    """On CUDA, tries the run's attention kernel before the model is built. Collective over all ranks.

    If the kernel fails, ``auto`` takes another one. Raises RuntimeError if the user has named the kernel.
    """
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    kind = choose_packed_attention(config, device.type, head_dim)
    shares = config.prompts.share_contexts
    while device.type == "cuda" and (
        failure := _failure_anywhere(kind, device, dtype, head_dim, shares)
    ):
        _failed[kind] = failure
        if kind == "sdpa":
            logger.warning(
                "Packed attention: no kernel of sdpa takes a mask here but its slowest, which keeps "
                f"all scores in memory: {failure}"
            )
            break
        if config.grpo.packed_attention != "auto":
            raise RuntimeError(
                f"grpo.packed_attention = {kind!r} must work on this GPU with torch "
                f"{torch.__version__}, and does not: {failure} Use 'auto'."
            )
        failed, kind = kind, choose_packed_attention(config, device.type, head_dim)
        logger.warning(f"Packed attention: {kind} is used, because {failed} fails: {failure}")
    logger.info(f"Packed attention: {kind}")


def _failure_anywhere(
    kind: PackedAttentionKind,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    shares_contexts: bool,
) -> str | None:
    """Returns why the kernel fails here or that it fails on another rank, or None if it fails on no rank."""
    failure = failure_of(kind, device, dtype, head_dim, shares_contexts)
    if dist.is_initialized():
        has_failed = torch.tensor(int(failure is not None), device=device)
        dist.all_reduce(has_failed, dist.ReduceOp.MAX)
        if failure is None and has_failed.item():
            return "It fails on another rank, whose log says how."
    return failure


def failure_of(
    kind: PackedAttentionKind,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    shares_contexts: bool = True,
) -> str | None:
    """Returns how a kernel fails on small packed rows, or None if it gives the right numbers.

    Compares attention and its gradients with float32 on the CPU. With ``shares_contexts``, the rows share
    contexts, which uses another function of torch. Of ``sdpa``, only the memory-efficient kernel is tried.
    """
    seq_len, generator = _TRIED[0][-1][1], torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, heads, seq_len, head_dim, generator=generator) for heads in _TRIED_HEADS
    ]
    inputs = [tensor.to(dtype) for tensor in inputs]
    expected = _with_gradients("sdpa", [tensor.float() for tensor in inputs], shares_contexts)
    backend = contextlib.nullcontext()
    if kind == "sdpa":
        backend = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    try:
        with backend:
            on_device = [tensor.to(device) for tensor in inputs]
            found = _with_gradients(kind, on_device, shares_contexts)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or a kernel raises
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else 'no message'}"
    for name, wrong, right in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        error = float((wrong.cpu().float() - right).abs().max() / right.abs().max())
        if not error <= _TOLERANCE:  # NaN is an error, too
            return f"{name} differs by {error:.2g} of its largest value from float32 on the CPU."
    return None


@torch.enable_grad()
def _with_gradients(
    kind: PackedAttentionKind, inputs: list[torch.Tensor], shares_contexts: bool
) -> tuple[torch.Tensor, ...]:
    lengths, reaches = torch.tensor(_TRIED[0] + _TRIED[1]).unbind(1)
    if not shares_contexts:
        reaches = (lengths.cumsum(0) - 1) % inputs[0].shape[2] + 1
    reach = reaches.repeat_interleave(lengths).view(2, -1)
    # As for compiled blocks: a fixed number of borders, most of them empty, and a greater length.
    mask = packed_mask(
        reach.to(inputs[0].device), kind, compiled=kind == "varlen", may_share=shares_contexts
    )
    # The order of the projections' dimensions, whose strides the kernels get.
    q, k, v = (t.transpose(1, 2).contiguous().requires_grad_() for t in inputs)
    heads = (t.transpose(1, 2) for t in (q, k, v))
    out = PackedAttention()(*heads, mask)
    # With different weights, a gradient that reaches another token is found.
    weights = torch.linspace(0.5, 2, out.numel(), device=out.device).view_as(out)
    gradients = torch.autograd.grad((out * weights.to(out.dtype)).sum(), (q, k, v))
    return out.detach(), *gradients
