# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that servers receive the exported weights bit for bit, under every parallel layout.

    python benchmarks/push_exactness.py [--json] [--quick | --all]

The benchmark builds tiny Llama 3, Qwen2, Qwen3 and Qwen3-MoE models under layouts of
`layout_parity.py` (gloo, up to 8 ranks). Under each layout the trainer's own publisher sends
four versions with different weights to a server in float32: two versions in float32 and two in
bfloat16. While a version is sent, the training thread collects an export over its own process
groups. The SHA-256 of each parameter on the server must equal two others: that of the export,
cast to the dtype of the transfer and then to the server's, and that of the model's file after
the same arithmetic, which does not depend on the layout. Layouts that differ only in the number
of updates hold the same shards; only one of them is run.

The weights are sent to embedded servers. An embedded server does not serve mixtures of experts, so
their weights are sent to `push_receiver.py`, which wraps the same server around a table of the
tensors of the model's files.

By default each kind of layout is run for at least one model, which takes about five minutes on
two cores. ``--quick`` runs six layouts of four ranks, and ``--all`` runs all 215 layouts, which
takes about twenty minutes. The benchmark prints one row for each layout, and exits with status 1 if
a layout differs. With ``--json`` the last line is a JSON object.
"""

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
from figures import finish, make_parser
from layout_parity import add_choice, make_models, record_batch
from layouts import Choice, Layout, layouts_of
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from torchtitan.grpo.inference.kinds import ServerSpec, make_client
from torchtitan.grpo.inference.local_servers import (
    HeldPorts,
    LaunchedServer,
    start_server,
)
from torchtitan.grpo.inference.waiting import wait_until_up
from torchtitan.grpo.system.child import start_child

TIMEOUT_SECONDS = 900
# The process groups of each layout and their threads stay until the ranks of a start end.
JOBS_PER_START = 6
START_SECONDS = 180
# These layouts need one start of four ranks. They combine pipeline stages, shards, replicas, tensor
# parallelism and context parallelism.
QUICK = {
    "llama3": ("HSDP 2x2",),
    "qwen3": ("FSDP2 x2, PP x2, ZBVZeroBubble", "FSDP2 x2, TP x2", "TP x2, CP x2"),
    "qwen2": ("TP x2, PP x2, Interleaved1F1B",),
    "qwen3_moe": ("PP x2, ZBVZeroBubble, FSDP2 x2, EP x2",),
}


def main() -> int:
    parser = make_parser(__doc__)
    add_choice(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = make_models(folder)
        for path in models.values():
            scatter_vectors(path)
        record_batch(folder / "batch.jsonl", steps=1)
        with running_servers(models, folder) as urls:
            rows = run_layouts(models, urls, folder, options.choice)
    print(f"{'model':11}{'layout':46}{'ranks':>5}  {'source ranks':13}{'pushes':>7}  at")
    for row in rows:
        at = "receiver" if row["model"] == "qwen3_moe" else "embedded server"
        verdict = "ok" if row["ok"] else f"DIFFERS: {row['problems'][:4]}"
        sources = " ".join(map(str, row["sources"]))
        print(
            f"{row['model']:11}{row['layout']:46}{row['ranks']:>5}  {sources:13}"
            f"{row['pushes']:>7}  {at:16} {verdict}"
        )
    ok = bool(rows) and all(row["ok"] for row in rows)
    figures = {f"{row['model']}/{row['layout']}": row for row in rows}
    return finish(options, "push_exactness", ok, figures)


def scatter_vectors(path: Path) -> None:
    """Makes the norms random, because norms of ones could be confused without a difference."""
    generator = torch.Generator().manual_seed(1)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            if tensor.ndim == 1:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        save_file(tensors, file, metadata={"format": "pt"})


@contextmanager
def running_servers(models: dict[str, Path], folder: Path) -> Iterator[dict[str, str]]:
    """Starts a float32 server for each model; yields their URLs by the name of the model."""
    servers: list[LaunchedServer] = []
    held = HeldPorts(len(models))
    try:
        for (model, path), port in zip(models.items(), held.ports, strict=True):
            spec = ServerSpec("embedded", str(path), port, "cpu", "float32", 128, 4)
            start = start_receiver if model == "qwen3_moe" else start_server
            servers.append(start(spec, folder / f"{model}.log"))
        asyncio.run(_wait_until_up(servers))
        yield {model: server.url for model, server in zip(models, servers, strict=True)}
    finally:
        for server in servers:
            server.stop()
        held.close()


def start_receiver(spec: ServerSpec, log_file: Path) -> LaunchedServer:
    """Starts `push_receiver.py` in place of a server."""
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
    models: dict[str, Path], urls: dict[str, str], folder: Path, choice: Choice
) -> list[dict[str, Any]]:
    """Publishes under the chosen layouts, with few starts of ranks; returns a row for each."""
    layouts = [
        (model, layout)
        for model in models
        for layout in layouts_of(model, "all" if choice == "quick" else choice)
        if (
            layout.name in QUICK[model]
            if choice == "quick"
            else "minibatches" not in layout.settings
        )
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
        "job.overwrite": True,
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
