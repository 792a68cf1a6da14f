# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Counts the work of a training step without a GPU, and predicts its time on an H100.

    python benchmarks/step_work.py [--json] [--sizes 0.6B 1.7B 8B] [--steps ours torchtitan trl]
    python benchmarks/step_work.py --steps ours --rows 16 -- --compile.enable --activation_checkpoint.mode none

The second line counts 32,768 tokens (16 rows of 2,048) with settings that replace those of the file.
The step is the product's own (:class:`Learner` with the model, head, losses, clipping, optimizer and
FSDP2 that a trainer builds), at real sizes, with the settings of the TOML file in :data:`CASES`. It
runs on fake CUDA tensors, so that it takes the paths that it takes on a GPU and computes nothing.
Beside it run torchtitan's own step over the same model and tokens, with its cross entropy on whole
logits, and the same with the arithmetic of TRL's GRPO loss.

What is counted, for each part:

- Kernels and bytes: of eager operations, one kernel each, with all operands read and all results
  written once (a list of tensors: as many kernels as torch's multi-tensor apply launches; lookups:
  the elements picked). Of compiled graphs, the Triton kernels that inductor schedules for an H100,
  and the bytes that it counts itself. Their code is written but never built.
- FLOPs: of matrix products and attention. Attention of every kind counts as a fused kernel that skips
  blocks outside of the mask: 2 products forward, 5 backward. What exceeds a forward and two
  backward passes' worth over all tokens is recomputation, and what the blocks compute for padding is
  listed as well.
- Waits of the host: values read from the device, and copies that block, with the line that does it.

A kernel takes ``max(FLOPs / rate, bytes / bandwidth)``; a step takes as long as the slowest of its
kernels one after the other, its collectives one after the other, and 5 microseconds of the host for
each launch. MFU is ``6 N + 6 L H Q T`` FLOPs a token (N parameters without the embedding; L layers, H
heads of Q channels, T the causal half taken, within each sequence; the head's part only for scored
tokens; padding not at all) against 989 TFLOP/s. ``MFU`` and its bounds are at the rates of the data sheet, so
that it is an upper bound; ``sustained`` is what remains, and the times of parts are, at the rates that
kernels reach (`step_work_parts/work.py`).

It cannot tell how well a kernel does on its sizes, what the host spends in FSDP's and autograd's own
code, waits of one stream for another, and memory. ``ok`` is true if MFU reaches the bound of each
size, the step fits by the estimate of ``--dry-run``, nothing costs more than torchtitan's own step and
the loss on top, and the host waits once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "step_work_parts"))


class Case(NamedTuple):
    """A model, and a run of it.

    Attributes:
        sizes: The keys of ``config.json``.
        ranks: Number of GPUs.
        bound: MFU that must be reached.
        arguments: Command line of the run.
    """

    sizes: dict[str, Any]
    ranks: int
    bound: float
    arguments: list[str]


def qwen3(dim: int, hidden: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151_936, "tie_word_embeddings": tied,
    }  # fmt: skip


TOML = ["--job.config_file", str(HERE.parent / "train_configs" / "gsm8k_qwen3_2gpu.toml")]
CASES = {
    "0.6B": Case(qwen3(1024, 3072, 28, 16, tied=True), 1, 0.40, TOML),
    "1.7B": Case(qwen3(2048, 6144, 28, 16, tied=True), 1, 0.45, TOML),
    "8B": Case(qwen3(4096, 12288, 36, 32, tied=False), 8, 0.50, TOML),
    "tiny": Case(qwen3(256, 512, 2, 16, tied=True) | {"vocab_size": 4096}, 1, 0.0, TOML),
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    sizes, steps, rows = ["0.6B", "1.7B", "8B"], ["ours", "torchtitan", "trl"], range(1, 1025)
    parser.add_argument(
        "--sizes", nargs="+", default=sizes, choices=list(CASES), help="all but tiny"
    )
    parser.add_argument("--steps", nargs="+", default=steps, choices=steps, help="all")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[4], choices=rows, metavar="N", help="of a rank (4)"
    )
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a row (2048)")
    parser.add_argument("--processes", type=int, default=2, help="cases counted at a time (2)")
    parser.add_argument("--kernels", type=int, default=0, help="show the costliest kernels as well")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="after --: further settings, as of a run")
    return parser.parse_args()


# ---- in the child: one step of one size


def count_case(
    step: str, size: str, num_rows: int, seq_len: int, overrides: list[str]
) -> dict[str, Any]:
    """Returns the figures of a step. Torch must not have been imported before."""
    case = CASES[size]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(case.ranks)}
    os.environ["WORLD_SIZE"] = str(case.ranks)
    import counted_cuda

    counted_cuda.load()
    counted_cuda.stand_in()
    import torch.distributed as dist

    dist.init_process_group("fake", rank=0, world_size=case.ranks)
    from steps import count, write_model

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        write_model(Path(folder), case.sizes)
        arguments = [*case.arguments, "--model.hf_assets_path", folder, "--training.seq_len"]
        arguments += [str(seq_len), *overrides]
        counted = count(step, arguments, case.sizes, num_rows)
    return figures_of(counted.ledger, counted.shape) | {
        "generated_kernels": counted.num_kernels, "needed_gib": counted.needed_bytes / 2**30,
        "available_gib": counted.available_bytes / 2**30,
    }  # fmt: skip


def figures_of(ledger: Any, shape: Any) -> dict[str, Any]:
    from work import PARTS, PEAK_FLOPS

    tokens, total = shape.num_tokens, ledger.total
    processed = 3 * shape.forward(shape.padded, shape.scored)
    times = [ledger.step_seconds(sheet=sheet) for sheet in (False, True)]
    sustained, mfu = (shape.model_flops / seconds / PEAK_FLOPS[2] for seconds in times)
    return {
        "mfu": mfu, "mfu_sustained": sustained, "us_per_token": 1e6 * times[0] / tokens, "tokens": tokens,
        "launches": total.launches, "bytes_per_token": total.bytes / tokens,
        "flops_per_token": total.flops / tokens,
        "model_flops_per_token": shape.model_flops / tokens,
        # The products of attention's backward pass, five instead of four, count as recomputation too.
        "recomputed_flops_per_token": (total.flops - processed) / tokens,
        "padding_flops_per_token": shape.padding_flops / tokens,
        "scored_tokens": shape.scored, "waits": dict(ledger.waits),
        "parts": {
            part: {
                "launches": work.launches, "bytes_per_token": work.bytes / tokens,
                "flops_per_token": work.flops / tokens,
                "us_per_token": 1e6 * work.seconds / tokens,
            }
            for part in PARTS if (work := ledger.parts[part])
        },
        "kernels": [
            [name, work.launches, work.bytes / tokens, 1e6 * work.seconds / tokens]
            for name, work in sorted(ledger.kernels.items(), key=lambda pair: -pair[1].seconds)[:40]
        ],
    }  # fmt: skip


# ---- in the parent: all cases, the table and the verdict


def run_child(step: str, size: str, rows: int, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", step, size, str(rows)]
    command += ["--seq-len", str(arguments.seq_len), "--", *arguments.overrides]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    if done.returncode != 0:
        raise SystemExit(f"{step} at {size} failed:\n{done.stderr[-6000:]}")
    seconds = time.perf_counter() - begin
    print(f"counted {step} at {size}, {rows} rows, in {seconds:.0f} s", file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def problems_of(size: str, steps: dict[str, dict[str, Any]]) -> list[str]:
    """Returns what keeps a size from being right."""
    ours, found = steps["ours"], []
    if ours["mfu"] < CASES[size].bound:
        found.append(f"MFU {ours['mfu']:.3f} is below {CASES[size].bound}")
    if ours["needed_gib"] > ours["available_gib"]:
        found.append(f"{ours['needed_gib']:.1f} GiB do not fit into {ours['available_gib']:.1f}")
    if (waits := sum(ours["waits"].values())) != 1:
        found.append(f"the host waits {waits} times: {', '.join(ours['waits'])}")
    if titan := steps.get("torchtitan"):
        sizes = CASES[size].sizes
        # The logits are computed again in the backward pass instead of being kept.
        logits = 2 * sizes["hidden_size"] * sizes["vocab_size"] * ours["scored_tokens"]
        above = {
            "launches": 0.0,
            "bytes_per_token": 0.0,
            "flops_per_token": logits / ours["tokens"],
        }
        for key, more in above.items():
            bound = titan[key] + ours["parts"]["loss"].get(key, 0) + more
            if ours[key] > bound:
                found.append(
                    f"{key} {ours[key]:.4g} is above {bound:.4g}, torchtitan's and the loss"
                )
    return found


def print_case(title: str, steps: dict[str, dict[str, Any]], num_kernels: int) -> None:
    print(f"\n{title}")
    head = (
        "us/token",
        "MFU",
        "sustained",
        "launches",
        "kB/token",
        "GFLOP/token",
        "recomputed",
        "padding",
        "waits",
    )
    print(" " * 12 + "".join(f"{name:>12}" for name in head))
    for name, f in steps.items():
        cells = (f["us_per_token"], f["mfu"], f["mfu_sustained"], f["launches"], f["bytes_per_token"] / 1e3,
                 f["flops_per_token"] / 1e9, f["recomputed_flops_per_token"] / 1e9,
                 f["padding_flops_per_token"] / 1e9, sum(f["waits"].values()))  # fmt: skip
        print(f"{name:12}" + "".join(f"{cell:12.5g}" for cell in cells))
    print("  us/token (launches) of each part:")
    for part in next(iter(steps.values()))["parts"]:
        cells = (f["parts"].get(part, {"us_per_token": 0, "launches": 0}) for f in steps.values())
        print(
            f"  {part:18}"
            + "".join(f"{c['us_per_token']:10.3f} ({c['launches']:5})" for c in cells)
        )
    first = next(iter(steps.values()))
    costly = sorted(first["parts"], key=lambda part: -first["parts"][part]["us_per_token"])[:3]
    print(f"  estimated: {first['needed_gib']:.1f} of {first['available_gib']:.1f} GiB")
    print(
        f"  costliest: {', '.join(costly)}; the host waits at {', '.join(first['waits']) or 'nothing'}"
    )
    for name, launches, num_bytes, us in first["kernels"][:num_kernels]:
        print(f"    {name:52} {launches:6} {num_bytes / 1e3:10.2f} kB/token {us:8.3f} us/token")


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        step, size, rows = arguments.child
        print(json.dumps(count_case(step, size, int(rows), arguments.seq_len, arguments.overrides)))
        return 0
    keys = [(z, r, s) for z in arguments.sizes for r in arguments.rows for s in arguments.steps]
    # The largest first, so that the last to end is a small one.
    order = sorted(keys, key=lambda key: -CASES[key[0]].sizes["hidden_size"] * key[1])
    with ThreadPoolExecutor(arguments.processes) as pool:
        waiting = {key: pool.submit(run_child, key[2], key[0], key[1], arguments) for key in order}
        found = {key: future.result() for key, future in waiting.items()}
    figures: dict[str, Any] = {}
    ok = True
    for size, rows, step in keys:
        figures.setdefault(f"{size}, {rows} rows of {arguments.seq_len}", {})[step] = found[
            size, rows, step
        ]
    for title, steps in figures.items():
        print_case(title, steps, arguments.kernels)
        problems = problems_of(title.split(",")[0], steps) if "ours" in steps else []
        ok = ok and not problems
        for problem in problems:
            print(f"  FAIL {problem}")
    compared = "torchtitan" in arguments.steps
    beside = (
        "work beside torchtitan's own step" if compared else "nothing beside torchtitan's own step"
    )
    print(f"\n{'ok  ' if ok else 'FAIL'} MFU, memory, one wait a step, and {beside}")
    if arguments.json:
        print(json.dumps({"benchmark": "step_work", "ok": ok, "figures": figures}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
