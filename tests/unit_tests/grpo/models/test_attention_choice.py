"""The kernel of packed rows' attention is one that this GPU runs, and that computes what it should."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from varlen_kernel import dense_varlen, dense_varlen_backward

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models import attention_choice, tree_attention
from torchtitan.grpo.models.attention_choice import (
    choose_packed_attention,
    failure_of,
    try_packed_attention,
    varlen_problem,
)

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu(monkeypatch) -> Callable[[tuple[int, int] | None], None]:
    """Pretends that this machine has a GPU of a compute capability; None is no GPU."""
    monkeypatch.setattr(attention_choice, "_failed", {})

    def pretend(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)

    pretend((9, 0))
    return pretend


def settings(seq_len: int = 1024, kind: str = "auto", dtype: str = "bfloat16") -> JobConfig:
    config = JobConfig()
    config.training.seq_len = seq_len
    config.training.mixed_precision_param = dtype  # pyright: ignore[reportAttributeAccessIssue]
    config.grpo.packed_attention = kind  # pyright: ignore[reportAttributeAccessIssue]
    return config


@pytest.mark.parametrize(
    ("seq_len", "capability", "dtype", "head_dim", "kind"),
    [
        (16, (8, 0), "bfloat16", 128, "varlen"),
        (65536, (9, 0), "bfloat16", 256, "varlen"),
        (16, (12, 0), "bfloat16", 8, "varlen"),
        (2048, (7, 5), "bfloat16", 128, "flex"),
        (2047, (7, 5), "bfloat16", 128, "sdpa"),
        (2048, (9, 0), "float32", 128, "flex"),
        (2047, (9, 0), "float32", 128, "sdpa"),
        (2048, (9, 0), "bfloat16", 36, "flex"),
        (2048, (9, 0), "bfloat16", 264, "flex"),
        (2048, (9, 0), "bfloat16", None, "varlen"),
    ],
)
def test_a_gpu_gets_the_fastest_kernel_that_takes_the_model(
    gpu, seq_len, capability, dtype, head_dim, kind
):
    gpu(capability)
    assert choose_packed_attention(settings(seq_len, dtype=dtype), "cuda", head_dim) == kind


def test_a_setting_is_obeyed_and_a_cpu_uses_sdpa(gpu):
    for kind in ("varlen", "flex", "sdpa"):
        assert choose_packed_attention(settings(kind=kind), "cuda", 36) == kind
    gpu(None)
    assert choose_packed_attention(settings(seq_len=4096), "cpu", 128) == "sdpa"


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "problem"),
    [
        (None, "bfloat16", 128, "a CUDA GPU, and none is visible"),
        ((7, 5), "bfloat16", 128, "compute capability 8.0 or more, and this one has 7.5"),
        ((8, 0), "float32", 128, "training.mixed_precision_param = 'bfloat16', got 'float32'"),
        ((8, 0), "bfloat16", 264, "at most 256, and the model's have 264"),
        ((8, 0), "bfloat16", 36, "a multiple of 8 and at most 256, and the model's have 36"),
    ],
)
def test_what_varlen_lacks_is_named(gpu, capability, dtype, head_dim, problem):
    gpu(capability)
    assert problem in str(varlen_problem(settings(dtype=dtype), head_dim))


@pytest.fixture
def log(monkeypatch) -> list[str]:
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(attention_choice.logger, level, lines.append)
    return lines


@pytest.fixture
def tried(monkeypatch) -> Callable[..., list[str]]:
    """Lets kinds of attention fail, and returns those that are tried."""

    def let_fail(*broken: str) -> list[str]:
        kinds: list[str] = []

        def failure(kind, *_):
            kinds.append(kind)
            return f"{kind} is broken." if kind in broken else None

        monkeypatch.setattr(attention_choice, "failure_of", failure)
        return kinds

    return let_fail


USED = "Packed attention: {} is used, because {} fails: {} is broken."


@pytest.mark.parametrize(
    ("device", "broken", "tried_kinds", "lines"),
    [
        (CUDA, [], ["varlen"], []),
        (CUDA, ["varlen", "flex"], ["varlen", "flex", "sdpa"],
         [USED.format("flex", "varlen", "varlen"), USED.format("sdpa", "flex", "flex")]),
        (CPU, ["sdpa"], [], []),
    ],
)  # fmt: skip
def test_a_kernel_is_tried_and_replaced_by_the_next_if_it_fails(
    device, broken, tried_kinds, lines, tried, log
):
    config, kinds = settings(seq_len=4096), tried(*broken)
    try_packed_attention(config, device, 128)
    used = (tried_kinds or ["sdpa"])[-1]
    assert (kinds, log) == (tried_kinds, [*lines, f"Packed attention: {used}"])
    if broken:  # also for whoever asks later
        assert choose_packed_attention(config, device.type, 128) == "sdpa"


def test_a_slow_kernel_is_not_used_in_silence_and_a_setting_that_fails_is_an_error(tried, log):
    kinds = tried("sdpa", "varlen")
    try_packed_attention(settings(kind="sdpa"), CUDA, 128)
    assert kinds == ["sdpa"]
    assert log[0].endswith("slowest, which keeps all scores in memory: sdpa is broken.")
    with pytest.raises(RuntimeError, match=r"grpo\.packed_attention = 'varlen' must work .*broken"):
        try_packed_attention(settings(kind="varlen"), CUDA, 128)


@pytest.fixture
def kernel(monkeypatch) -> Iterator[Callable[..., None]]:
    """Replaces torch's varlen functions, which need a GPU."""

    def use(function: Callable[..., Any], backward: Callable[..., Any] = dense_varlen_backward):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        monkeypatch.setattr(tree_attention, "_backward_kernel", lambda: backward)

    yield use


def see_one_more(mask: torch.Tensor) -> torch.Tensor:
    if len(mask) > 256:  # not that of contexts
        mask[101, 98:101] = True  # the end of the sequence before
    return mask


def changed(change: Callable[..., tuple], **settings: Any) -> Callable[..., tuple]:
    """The right kernel, of whose output and log-sum-exp ``change`` makes others."""

    def kernel(*args, **kwargs):
        is_context = kwargs["window_size"] == (-1, -1)
        return change(*dense_varlen(*args, **(kwargs | settings)), is_context)

    return kernel


def kept(out, lse, _):
    return out, lse


@pytest.mark.parametrize(
    ("wrong", "failure"),
    [
        (changed(kept, mend=see_one_more), "output differs by"),
        (changed(kept, mend=torch.ones_like), "output differs by"),
        (changed(kept, scale=0.2), "output differs by"),
        (changed(lambda out, lse, _: (out * float("nan"), lse)), "output differs by nan"),
        (changed(lambda out, lse, shared: (out, lse - 9 * shared)), "output differs by"),
    ],
)
def test_wrong_numbers_are_a_failure(kernel, wrong, failure):
    kernel(dense_varlen)
    assert failure_of("varlen", CPU, torch.bfloat16, 64) is None
    kernel(wrong)
    assert failure in str(failure_of("varlen", CPU, torch.bfloat16, 64))


def test_a_run_that_shares_nothing_needs_only_torchs_public_function(kernel):
    def no_backward(*_):
        raise AssertionError("a run that shares nothing has no tree")

    kernel(lambda *a, **kw: dense_varlen(*a, **kw), no_backward)
    assert failure_of("varlen", CPU, torch.bfloat16, 64, shares_contexts=False) is None
    assert "no tree" in str(failure_of("varlen", CPU, torch.bfloat16, 64))


def test_wrong_gradients_are_a_failure(kernel):
    def without_keys(*args):
        dq, dk, dv = dense_varlen_backward(*args)
        return dq, 0 * dk, dv

    kernel(dense_varlen, without_keys)
    assert "dk differs by 1 of" in str(failure_of("varlen", CPU, torch.bfloat16, 64))


def test_a_kernel_that_raises_fails_with_the_reason():
    found = str(failure_of("varlen", CPU, torch.bfloat16, 64))
    assert found.startswith("NotImplementedError: Could not run 'aten::_flash_attention_forward'")
    assert "\n" not in found
    # The only kernel of sdpa that counts does not exist on a CPU.
    assert "No viable backend" in str(failure_of("sdpa", CPU, torch.bfloat16, 64))


def test_missing_memory_is_no_failure_of_the_kernel(kernel):
    def runs_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernel(runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        failure_of("varlen", CPU, torch.bfloat16, 64)


def test_all_ranks_replace_a_kernel_that_fails_on_one_of_them(tried, log, monkeypatch):
    kinds = tried()

    def of_all_ranks(has_failed: torch.Tensor, op: dist.ReduceOp) -> None:
        assert op == dist.ReduceOp.MAX
        has_failed.fill_(int(kinds[-1] == "varlen"))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", of_all_ranks)
    monkeypatch.setattr(torch, "tensor", lambda value, device: torch.zeros(1))
    try_packed_attention(settings(seq_len=4096), CUDA, 128)
    assert kinds == ["varlen", "flex"]
    assert "flex is used, because varlen fails: It fails on another rank" in log[0]
