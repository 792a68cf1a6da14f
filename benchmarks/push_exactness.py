# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What arrives at a server is bit by bit what an export holds, under every parallel layout.

    python benchmarks/push_exactness.py [--json] [--quick]

Builds tiny Llama 3, Qwen3 and Qwen3-MoE models under each layout of `layout_parity.py` (gloo,
up to 8 ranks) and publishes versions with the trainer's own publisher to a server in float32:
two with float32 on the wire, two with bfloat16, each of other weights. While a version is
pushed, the training thread collects an export over its own process groups. The SHA-256 of each
parameter, asked of the server, must equal that of the export, cast to the wire's dtype and
then to the server's; and that of the model's file with the same arithmetic applied to it,
which knows nothing of layouts. Layouts that differ in the number of updates alone hold the
same shards, and come once.

The embedded server takes Llama 3 and Qwen3. It does not serve experts: those go to
`push_receiver.py`, the same server around a table of the file's tensors. Prints a row a
layout; the exit status is 1 where one differs.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from layout_parity import Layout, layouts_of, make_models, record_batch
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.inference.local_servers import (
    LaunchedServer,
    free_ports,
    start_server,
    wait_until_up,
)
from torchtitan.grpo.inference.server_spec import ServerSpec
from torchtitan.grpo.system.child import start_child

TIMEOUT_SECONDS = 900
# Each layout's process groups and their threads stay to the end of a start.
JOBS_PER_START = 6
START_SECONDS = 180
# One start of four ranks: pipeline stages with shards, replicas, tensors and sequences cut.
QUICK = {
    "llama3": ("HSDP 2x2",),
    "qwen3": ("FSDP2 x2, PP x2, ZBVZeroBubble", "FSDP2 x2, TP x2", "TP x2, CP x2"),
    "qwen3_moe": ("PP x2, ZBVZeroBubble, FSDP2 x2, EP x2",),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    parser.add_argument("--quick", action="store_true", help="some layouts of 4 ranks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = make_models(folder)
        for path in models.values():
            scatter_vectors(path)
        record_batch(folder / "batch.jsonl", steps=1)
        with running_servers(models, folder) as urls:
            rows = run_layouts(models, urls, folder, options.quick)
    print(f"{'model':11}{'layout':46}{'ranks':>5}  {'source ranks':13}{'pushes':>7}  at")
    for row in rows:
        at = "receiver" if row["model"] == "qwen3_moe" else "embedded server"
        told = "ok" if row["ok"] else f"DIFFERS: {row['problems'][:4]}"
        sources = " ".join(map(str, row["sources"]))
        print(
            f"{row['model']:11}{row['layout']:46}{row['ranks']:>5}  {sources:13}"
            f"{row['pushes']:>7}  {at:16} {told}"
        )
    ok = bool(rows) and all(row["ok"] for row in rows)
    if options.json:
        figures = {f"{row['model']}/{row['layout']}": row for row in rows}
        print(json.dumps({"benchmark": "push_exactness", "ok": ok, "figures": figures}))
    return 0 if ok else 1


def scatter_vectors(path: Path) -> None:
    """Draws the norms anew, which are all ones: one could pass for another."""
    generator = torch.Generator().manual_seed(1)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            if tensor.ndim == 1:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        save_file(tensors, file, metadata={"format": "pt"})


@contextmanager
def running_servers(models: dict[str, Path], folder: Path) -> Iterator[dict[str, str]]:
    """A server of each model, all in float32; yields their URLs."""
    servers: list[LaunchedServer] = []
    try:
        for model, path in models.items():
            spec = ServerSpec("embedded", str(path), free_ports(1)[0], "cpu", "float32", 128, 4)
            start = start_receiver if model == "qwen3_moe" else start_server
            servers.append(start(spec, folder / f"{model}.log"))
        asyncio.run(_wait_until_up(servers))
        yield {model: server.url for model, server in zip(models, servers, strict=True)}
    finally:
        for server in servers:
            server.stop()


def start_receiver(spec: ServerSpec, log_file: Path) -> LaunchedServer:
    """`push_receiver.py` for a server."""
    command = [sys.executable, str(Path(__file__).with_name("push_receiver.py"))]
    command += ["--model-path", spec.model_path, "--port", str(spec.port), "--device", spec.device]
    command += ["--dtype", spec.dtype, "--max-model-len", str(spec.max_model_len)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return LaunchedServer(spec, start_child(command, env=environment, log_file=log_file), log_file)


async def _wait_until_up(servers: list[LaunchedServer]) -> None:
    clients = [make_client("embedded", server.url) for server in servers]
    try:
        await wait_until_up(clients, servers, timeout_seconds=START_SECONDS)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


def run_layouts(
    models: dict[str, Path], urls: dict[str, str], folder: Path, is_quick: bool
) -> list[dict[str, Any]]:
    """Publishes under all layouts, in few starts of torchrun; returns a row for each."""
    layouts = [
        (model, layout)
        for model in models
        for layout in layouts_of(model, is_quick=False)
        if (layout.name in QUICK[model] if is_quick else "minibatches" not in layout.settings)
    ]
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for ranks in sorted({layout.ranks for _, layout in layouts}):
        jobs = [
            {
                "model": model,
                "layout": layout.name,
                "url": urls[model],
                "args": _arguments(layout, models[model], folder),
            }
            for model, layout in layouts
            if layout.ranks == ranks
        ]
        for begin in range(0, len(jobs), JOBS_PER_START):
            for job, result in _torchrun(ranks, jobs[begin : begin + JOBS_PER_START], folder):
                results[job["model"], job["layout"]] = result
    return [
        {"model": model, "layout": layout.name, "ranks": layout.ranks} | results[model, layout.name]
        for model, layout in layouts
    ]


def _arguments(layout: Layout, model: Path, folder: Path) -> list[str]:
    settings = {
        "job.dump_folder": folder / "dump",
        "model.hf_assets_path": model,
        "training.steps": 1,
        "training.seq_len": 96,
        "training.local_batch_size": 4,
        "training.mixed_precision_param": "float32",
        "optimizer.implementation": "foreach",
        "activation_checkpoint.mode": "none",
        "activation_checkpoint.selective_ac_option": "op",
        # Nothing is trained; a replay asks for no prompts, rewards or servers.
        "rollout.replay": folder / "batch.jsonl",
        "rollout.max_new_tokens": 48,
        "grpo.prompts_per_step": 6,
        "grpo.group_size": 4,
        "observe.progress": "none",
        "observe.log_level": "warning",
        "debug.seed": 0,
    }
    plain = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return plain + layout.arguments


def _torchrun(
    ranks: int, jobs: list[dict[str, Any]], folder: Path
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    file, out = folder / "jobs.json", folder / "results.json"
    file.write_text(json.dumps(jobs))
    run_ranks(ranks, "push_run.py", file, out, timeout_seconds=TIMEOUT_SECONDS)
    return list(zip(jobs, json.loads(out.read_text()), strict=True))


if __name__ == "__main__":
    sys.exit(main())
