"""The Triton kernels of the softmax equal float64, read a logit once, and compile for GPUs."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from light import LIGHT
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.grpo.losses import softmax_passes
from torchtitan.grpo.losses.linear_logprobs import packed_linear_logprobs
from torchtitan.grpo.losses.softmax_slices import slice_width

# Without triton, the project's dependency on Linux alone, the passes run everywhere.
triton = pytest.importorskip("triton", reason="the kernels need triton")


@pytest.fixture(scope="module")
def interpreted(repository, tmp_path_factory) -> dict:
    """What `tests/programs/softmax_kernel_cases.py` finds in Triton's interpreter."""
    program = repository / "tests/programs/softmax_kernel_cases.py"
    start = f"{LIGHT}import runpy, sys; sys.path.insert(0, {str(program.parent)!r})\n"
    start += f"runpy.run_path({str(program)!r}, run_name='__main__')"
    store = tmp_path_factory.mktemp("interpreted") / "store"
    # The variable counts when triton is imported, so that a process of its own is needed.
    process = subprocess.run(
        [sys.executable, "-c", start, "3", str(store)], capture_output=True, text=True, timeout=600,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-8000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_values_and_gradients_of_the_kernels_are_those_of_float64(interpreted):
    """Entropy or not, temperature, other ids, kept logits; and three dtypes."""
    bounds = {"float32": 1e-5, "float64": 1e-14, "bfloat16": 4e-3}
    for dtype, bound in bounds.items():
        assert max(interpreted["errors"][dtype].values()) < bound, interpreted["errors"]
    assert min(interpreted["used"]) > 5e5  # bytes that the kernels moved


def test_gradients_written_in_half_precision_are_rounded_once(interpreted):
    # The interpreter cuts bits off where a GPU rounds to nearest.
    assert interpreted["half"]["kernel"] < 3e-3
    assert interpreted["half"]["passes"] < 1e-3


def test_each_kernel_moves_the_bytes_that_it_must(interpreted):
    loaded_and_stored = interpreted["bytes"]
    assert loaded_and_stored["forward"] == pytest.approx([4, 0], abs=0.05)
    assert loaded_and_stored["forward with entropy"] == pytest.approx([4, 0], abs=0.05)
    assert loaded_and_stored["backward to torch.float32"] == pytest.approx([4, 4], abs=0.05)
    assert loaded_and_stored["backward to torch.bfloat16"] == pytest.approx([4, 2], abs=0.05)


def test_the_kernels_work_with_a_vocabulary_sharded_over_ranks(interpreted):
    assert len(interpreted["sharded"]) == 3
    for cases in interpreted["sharded"]:  # of four tokens, the last rank holds none
        for case in cases:
            assert max(case["errors"].values()) < 1e-5, case


class CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("with_entropy", "num_others"), [(False, 0), (True, 5)])
def test_a_slice_costs_one_operator_beside_its_matrix_products(with_entropy, num_others):
    tokens, vocab = 10, 1280

    def count(num_slices: int) -> Counter:
        hidden = torch.randn(tokens, 4, requires_grad=True)
        weight = torch.randn(vocab, 4, requires_grad=True)
        others = torch.rand(tokens, vocab).topk(num_others).indices if num_others else None
        chunk_tokens = tokens // num_slices
        assert slice_width(tokens, vocab, chunk_tokens) * num_slices == vocab
        with CountOperators() as counted:
            packed = packed_linear_logprobs(
                hidden, weight, torch.zeros(tokens, dtype=torch.int64), temperature=0.7,
                chunk_tokens=chunk_tokens, with_entropy=with_entropy, other_ids=others,
                keep_logits=False,
            )  # fmt: skip
            packed.sum().backward()
        return counted.found

    more = count(num_slices=10)
    more.subtract(count(num_slices=2))
    views = {"view", "slice", "t", "detach", "transpose"}
    work = {name: n for name, n in more.items() if n and name.split(".")[1] not in views}
    assert work == {
        "aten.mm.out": 3 * 8,  # logits, logits again, and the gradient of the weight
        "aten.addmm.out": 8,
        "torchtitan_grpo.sum_slice.default": 8,
        "torchtitan_grpo.write_grads.default": 8,
    }


def test_a_device_on_which_the_kernels_fail_is_served_by_the_passes_with_one_line(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the kernels run here")
    lines = []
    monkeypatch.setattr(softmax_passes.logger, "warning", lines.append)
    softmax_passes._triton_kernels.cache_clear()
    logits, ids = torch.randn(3, 200), torch.tensor([[7], [199], [200]])
    found = []
    for operator in (softmax_passes._sum_slice_on_gpu, softmax_passes.sum_slice):
        rows = [torch.zeros(3) for _ in range(3)]
        operator(logits, 0, ids, 1.0, True, *rows, picked := torch.zeros(3, 1), torch.empty(0))
        found.append((*rows, picked))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    grads = torch.empty(3, 200, dtype=torch.bfloat16)
    softmax_passes._write_grads_on_gpu(logits, 0, ids, 1.0, *found[0][:3], torch.ones(3, 1), grads)
    assert grads.isfinite().all()
    assert len(lines) == 1 and "Triton kernels do not run here" in lines[0]


FORWARD = {"logits": "x", "ids": "*i64", "maximum": "x", "exp_sum": "x", "weighted_sum": "x",
           "at_ids": "x", "start": "i32", "width": "i32", "num_ids": "i32"}  # fmt: skip
BACKWARD = {"logits": "x", "ids": "*i64", "normalizer": "x", "offset": "x", "slope": "x",
            "id_grads": "x", "out": "out", "start": "i32", "width": "i32",
            "num_ids": "i32"}  # fmt: skip


def compile_for(arch: int, kernel, signature, constants, types):
    """Compiles for a GPU that need not be here; widths are multiples of 16, as slices mostly are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(t, t) for n, t in signature.items()}
        | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in ("logits", "width")},
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32))


def stack_bytes(cubin: bytes, folder) -> int:
    """Local memory of a kernel, where the registers go that are spilled."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    report = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    usage = dict(field.split(":") for field in report.split() if field.startswith(("STACK", "LOC")))
    return int(usage["STACK"]) + int(usage["LOCAL"])


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_kernels_compile_for_gpus_without_spilled_registers(arch, tmp_path, monkeypatch):
    from torchtitan.grpo.losses.softmax_kernels import grads_kernel, sums_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for dtype, num_ids in (("*fp32", 1), ("*fp32", 128), ("*fp64", 1)):
        constants = {"SCALE": 0.7, "WITH_ENTROPY": True, "NUM_IDS": num_ids, "BLOCK": 1024}
        compiled = compile_for(arch, sums_kernel, FORWARD, constants, {"x": dtype})
        assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0
        if dtype == "*fp32":
            # The eight logits of a thread are loaded in two vector instructions, and nowhere else.
            assert compiled.asm["ptx"].count("ld.global.v4") == 2
    for dtype, out in (("*fp32", "*bf16"), ("*fp32", "*fp32"), ("*fp64", "*fp64")):
        constants = {"SCALE": 1.0, "BLOCK": 1024}
        compiled = compile_for(arch, grads_kernel, BACKWARD, constants, {"x": dtype, "out": out})
        assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0
        assert ("cvt.rn.bf16" in compiled.asm["ptx"]) == (out == "*bf16")
