# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how the trainer's log-probabilities differ from those of each kind of server on a real model.

    bash scripts/get_smollm2.sh
    bash scripts/install_vllm.sh --cpu && bash scripts/install_sglang.sh --cpu
    python benchmarks/server_mismatch.py [--json] [--servers embedded vllm sglang] [--dtypes float32 bfloat16]

For each server and data type, a synchronous run of two steps with a learning rate of 0 samples 8 prompts of
the arithmetic task in the model's chat format, 8 completions each, at temperature 1. Trainer and server compute
in the same type, and attest each version. Each recorded token is then scored again with the trainer's model, and
``r`` is the trainer's log-probability minus that with which the token was sampled:

    run kl       mismatch/kl of the run, the mean of its steps
    kl           the same estimate over all tokens, mean of exp(r) - 1 - r
    mean, max    of |r|
    ratios       the smallest and the largest exp(r)
    ESS          effective sample size of the weights exp(r), as a fraction of the tokens
    attested     mean difference of the probe's 48 random tokens, with which the run set its bound

The exit status is 1 unless the largest |r| is at most 1e-3 in float32, and the effective sample size is at
least 0.99 in bfloat16. With ``--json``, the last line is a JSON object.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from figures import finish, make_parser
from ranks import run_ranks

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "programs"))

ROOT = Path(__file__).resolve().parents[1]
MODEL, PROMPTS = ROOT / "assets/smollm2/model", ROOT / "assets/arithmetic/train.jsonl"
SERVERS, DTYPES = ("embedded", "vllm", "sglang"), ("float32", "bfloat16")
COLUMNS = ("tokens", "run kl", "kl", "mean", "max", "min ratio", "max ratio", "ESS", "attested")
ROW_LEN, ROWS_AT_ONCE, TIMEOUT_SECONDS = 128, 8, 1800
MAX_FLOAT32, MIN_ESS = 1e-3, 0.99
_MEASURED = re.compile(r"is attested within .* \((\S+) was measured")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    arguments = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} must exist: call `bash scripts/get_smollm2.sh` first.")
    figures, is_ok = {}, True
    print(f"{'server':8}  {'dtype':8}" + "".join(f"  {column:>9}" for column in COLUMNS))
    for server in arguments.servers:
        for dtype in arguments.dtypes:
            row = measure(server, dtype)
            print(
                f"{server:8}  {dtype:8}" + "".join(f"  {row[c]:9.3g}" for c in COLUMNS), flush=True
            )
            figures |= {f"{server} {dtype} {column}": row[column] for column in COLUMNS}
            is_exact = row["max"] <= MAX_FLOAT32 if dtype == "float32" else row["ESS"] >= MIN_ESS
            is_ok = is_ok and is_exact
    return finish(arguments, "server_mismatch", is_ok, figures)


def measure(server: str, dtype: str) -> dict[str, float]:
    """Returns one row of the table."""
    from torchtitan.grpo import run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record, job, result = (folder / f for f in ("record.jsonl", "job.json", "result.json"))
        tables = settings(server, dtype, folder / "run", record)
        steps = list(run(tables, reward=length, ranks=1, quiet=True))
        console = (folder / "run/from_python/console.log").read_text()
        measured = _MEASURED.search(console)
        if measured is None:
            raise SystemExit(f"The run must say what its attestation measured:\n{console[-4000:]}")
        job.write_text(json.dumps({"record": str(record), "dtype": dtype}))
        run_ranks(1, "server_mismatch.py", job, result, timeout_seconds=TIMEOUT_SECONDS)
        return json.loads(result.read_text()) | {
            "run kl": sum(step["mismatch/kl"] for step in steps) / len(steps),
            "attested": float(measured[1]),
        }


def length(completions: list[Any], **columns: Any) -> list[float]:
    """The reward, which trains nothing at a learning rate of 0."""
    return [float(len(str(completion))) for completion in completions]


def settings(server: str, dtype: str, folder: Path, record: Path) -> dict[str, Any]:
    chat = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return {
        "job": {"dump_folder": str(folder)},
        "model": {"hf_assets_path": str(MODEL)},
        "training": {
            "steps": 2, "seq_len": ROW_LEN, "local_batch_size": ROWS_AT_ONCE,
            "mixed_precision_param": dtype,
        },
        "optimizer": {"lr": 0.0},
        "activation_checkpoint": {"mode": "none"},
        "checkpoint": {"enable": False},
        "metrics": {"log_freq": 1},
        "debug": {"seed": 0},
        "grpo": {"group_size": 8, "prompts_per_step": 8},
        "prompts": {"path": str(PROMPTS), "template": chat},
        "rollout": {
            "max_head_offpolicyness": 0, "max_new_tokens": 32, "max_concurrent_rollouts": 64,
            "temperature": 1.0, "record": str(record), "request_timeout_seconds": 600.0,
        },
        "inference": {
            "kind": server, "launch": True, "dtype": dtype, "max_model_len": ROW_LEN,
            "startup_timeout_seconds": 900.0,
            **({"python": str(ROOT / f".venv-{server}/bin/python")} if server != "embedded" else {}),
        },
        "weight_sync": {"attest_every": 1},
    }  # fmt: skip


def score(record: str, dtype: str) -> dict[str, float]:
    """Compares each recorded token with the trainer's model; runs on a rank."""
    from build_model import build

    from torchtitan.grpo.data.record import RecordReader
    from torchtitan.grpo.data.rows import Sample, build_rows
    from torchtitan.grpo.training.runner import WholeModelRunner

    built = build(str(MODEL), ROW_LEN, local_batch_size=ROWS_AT_ONCE, precision=dtype)
    reader = RecordReader(record, built.hf_model.vocab_size, 1.0, "record")
    samples = [
        Sample(rollout.prompt_ids, rollout.token_ids, rollout.logprobs)
        for _, batch in reader
        for group in batch.groups
        for rollout in group.rollouts
    ]
    rows = build_rows(samples, [[index] for index in range(len(samples))], ROW_LEN)
    logprobs = WholeModelRunner(built.parts[0], ROWS_AT_ONCE).forward(rows)[..., 0]
    r = (logprobs - rows.generator_logprobs)[rows.loss_mask].double()
    return dict(figures_of(r))


def figures_of(r: torch.Tensor) -> Iterator[tuple[str, float]]:
    """``r`` are [tokens] float64 differences of log-probabilities."""
    ratio = r.exp()
    yield "tokens", float(len(r))
    yield "kl", (r.expm1() - r).mean().item()
    yield "mean", r.abs().mean().item()
    yield "max", r.abs().max().item()
    yield "min ratio", ratio.min().item()
    yield "max ratio", ratio.max().item()
    yield "ESS", (ratio.sum() ** 2 / ratio.square().sum() / len(r)).item()


if __name__ == "__main__":
    if sys.argv[1:2] and Path(sys.argv[1]).suffix == ".json":  # the rank that scores
        job = json.loads(Path(sys.argv[1]).read_text())
        Path(sys.argv[2]).write_text(json.dumps(score(**job)))
    else:
        sys.exit(main())
