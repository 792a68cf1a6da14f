# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares the peak extra memory and the time of fused log-probabilities with those of full logits.

    python benchmarks/logprob_memory.py [--json] [--device cuda] [--dtype bfloat16]

The benchmark measures one forward and backward pass over 4,096 tokens with a vocabulary of
151,936 and a hidden size of 1,024, with gradients of the hidden states and of the weight. Extra
memory is everything beyond the two inputs, including the gradients. Each pass runs in a process
of its own. The order alternates from round to round, and a ratio is the median over the rounds
of the ratios of neighboring passes. The claim compares `fused` with `naive`; torch's own fused
function is measured once for comparison. The exit status is 1 if `fused` needs more memory or
time than the claim allows or computes other numbers. With ``--json`` the last line is a JSON
object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from figures import finish, make_parser

LIGHT_START = Path(__file__).resolve().parents[1] / "torchtitan/grpo/system/light_start.py"
MEMORY_BOUND, TIME_BOUND, DIFFERENCE_BOUND = 1 / 8, 1.0, 1e-4
SIZES = {"full": (4096, 151_936, 1024), "quick": (512, 8192, 256)}
MIB = 2**20


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--quick", action="store_true", help="use a small size, to try the script")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--chunk-tokens", type=int, help="chunk size; default: that of grpo.logprob_chunk_tokens"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- in the child: measuring one pass


def passes(arguments: argparse.Namespace) -> dict:
    """Maps a row's name to a function from (hidden, weight, labels) to [tokens] logprobs."""
    import torch.nn.functional as F
    from torch.nn import LinearCrossEntropyOptions

    from torchtitan.grpo.config import GRPO
    from torchtitan.grpo.losses.linear_logprobs import packed_linear_logprobs

    chunk_tokens = arguments.chunk_tokens or GRPO().logprob_chunk_tokens

    def naive(hidden, weight, labels):
        return -F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none")

    def fused(with_entropy):
        return lambda hidden, weight, labels: packed_linear_logprobs(
            hidden, weight, labels, temperature=1.0, chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
        )[..., 0]  # fmt: skip

    def torch_fused(options):
        return lambda hidden, weight, labels: (
            -F.linear_cross_entropy(hidden, weight, labels, reduction="none", options=options)
        )

    return {
        "naive": naive,
        "fused": fused(False),
        "fused_entropy": fused(True),
        "torch": torch_fused(LinearCrossEntropyOptions()),
        "torch_chunked": torch_fused(LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens)),
    }


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Returns the seconds and the extra MiB of a pass, and numbers that are equal in all passes."""
    import torch

    run = passes(arguments)[arguments.child]
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)

    def make(tokens: int, vocab: int, dim: int):
        torch.manual_seed(0)
        hidden = torch.randn(tokens, dim, device=device, dtype=dtype).requires_grad_()
        weight = torch.randn(vocab, dim, device=device, dtype=dtype).mul_(dim**-0.5)
        labels = torch.randint(0, vocab, (tokens,), device=device)
        return hidden, weight.requires_grad_(), labels, torch.randn(tokens, device=device)

    def once(hidden, weight, labels, grads):
        logprobs = run(hidden, weight, labels)
        logprobs.backward(grads.to(logprobs.dtype))
        return logprobs

    size = SIZES["quick" if arguments.quick else "full"]
    # Libraries start their threads, and a GPU selects its kernels, before the measurement.
    once(*make(*(size if arguments.device == "cuda" else SIZES["quick"])))
    case = make(*size)
    before, start, cpu_start = (
        memory_now(arguments.device),
        time.perf_counter(),
        time.process_time(),
    )
    logprobs = once(*case)
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    hidden_grad, weight_grad = case[0].grad, case[1].grad
    assert hidden_grad is not None and weight_grad is not None
    return {
        "seconds": seconds,
        # The time of all threads, which stays comparable on a machine that others use as well.
        "cpu_seconds": cpu_seconds,
        "extra_mib": (memory_peak(arguments.device) - before) / MIB,
        "logprob": float(logprobs.detach().double().mean()),
        "hidden_grad": float(hidden_grad.norm(dim=1).double().norm()),
        "weight_grad": float(weight_grad.norm(dim=1).double().norm()),
    }


def memory_now(device: str) -> int:
    """Returns the number of bytes in use; on a GPU, also resets the peak to this number."""
    if device == "cpu":
        return process_memory("VmRSS")
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def memory_peak(device: str) -> int:
    """Returns the highest number of bytes in use."""
    if device == "cpu":
        return process_memory("VmHWM")
    import torch

    return torch.cuda.max_memory_allocated()


def process_memory(field: str) -> int:
    """Returns a memory size of this process in bytes, as counted (not sampled) by Linux."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


# ---- in the parent: rounds, ratios and the verdict


def run_child(name: str) -> dict[str, float]:
    # A child imports torch, and of torchtitan only what it uses.
    command = [sys.executable, str(LIGHT_START), Path(__file__).stem]
    command += [*sys.argv[1:], "--child", name]
    result = subprocess.run(
        command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True,
        timeout=1800,
    )  # fmt: skip
    return json.loads(result.stdout.splitlines()[-1])


def run_rounds(rounds: int) -> dict[str, list[dict[str, float]]]:
    """Returns the measurements of each row.

    The two rows of the claim are measured in every round, and the others once.
    """
    measured: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        names = ["naive", "fused"] if number % 2 == 0 else ["fused", "naive"]
        for name in [*names, *(["fused_entropy", "torch", "torch_chunked"] * (number == 0))]:
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            measured.setdefault(name, []).append(run_child(name))
    return measured


def figures_of(measured: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Returns the medians of each row, and their ratios to those of the row `naive`."""
    figures = {}
    for name, runs in measured.items():
        for key, kind in (("seconds", "time"), ("cpu_seconds", "cpu"), ("extra_mib", "memory")):
            figures[f"{name}_{key}"] = statistics.median(run[key] for run in runs)
            pairs = zip(runs, measured["naive"], strict=False)
            ratio = statistics.median(ours[key] / naive[key] for ours, naive in pairs)
            figures[f"{name}_{kind}_ratio"] = ratio
        # All rows have the same inputs, so they must have the same results.
        figures[f"{name}_difference"] = max(
            abs(runs[0][key] / measured["naive"][0][key] - 1)
            for key in ("logprob", "hidden_grad", "weight_grad")
        )
    return figures


def print_table(figures: dict[str, float], names: list[str]) -> None:
    columns = {
        "seconds": "9.2f", "time_ratio": "12.2f", "cpu_seconds": "13.2f", "cpu_ratio": "11.2f",
        "extra_mib": "11.0f", "memory_ratio": "14.3f", "difference": "12.1e",
    }  # fmt: skip
    widths = {column: int(style.split(".")[0]) for column, style in columns.items()}
    print(" " * 14 + "".join(f"{column:>{width}}" for column, width in widths.items()))
    for name in names:
        cells = (format(figures[f"{name}_{column}"], style) for column, style in columns.items())
        print(f"{name:14}" + "".join(cells))


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        print(json.dumps(measure(arguments)))
        return 0
    measured = run_rounds(arguments.rounds)
    figures = figures_of(measured)
    # In half precision, the rows round differently by design. In float32 they must agree.
    difference_bound = DIFFERENCE_BOUND if arguments.dtype == "float32" else 1e-2
    ok = (
        figures["fused_memory_ratio"] <= MEMORY_BOUND
        and figures["fused_time_ratio"] <= TIME_BOUND
        and figures["fused_difference"] <= difference_bound
    )
    print_table(figures, list(measured))
    print(
        f"{'ok  ' if ok else 'FAIL'} fused must take at most {MEMORY_BOUND} of the memory and "
        f"{TIME_BOUND} of the time of naive, and compute the same numbers"
    )
    return finish(arguments, "logprob_memory", ok, figures)


if __name__ == "__main__":
    sys.exit(main())
