# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how fast a push is, and for how long it stops a server.

    python benchmarks/weight_push.py [--json] [--rounds N] [--size 120M]
                                     [--only embedded vllm sglang]

Two training ranks (FSDP2, gloo, CPU) hold a Qwen3 of 120 M parameters and push it with the trainer's
own publisher. The bandwidth is that of a push to an idle embedded server, from the sending of the
first bucket to the arrival of the last, while the other buckets are gathered from both ranks. It is
compared with a plain ``dist.broadcast`` of the same number of bytes from one rank to the other.
Both alternate, and the figures are medians. A second figure starts when the version is published,
and so includes the snapshot and the gathering of the first bucket. The pause is the time for which
each kind of server generated no token because of a push, while requests were in flight.

Real vLLM and SGLang need environments of their own (scripts/install_vllm.sh,
scripts/install_sglang.sh); ``--only`` leaves kinds out. The benchmark takes about ten minutes. The
exit status is 1 if a push has less than 0.8 of the bandwidth of the plain broadcast, or if a server
is missing or was lost. With ``--json`` the last line is a JSON object.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from boundary_stall import REPOSITORY, rank_environment, tail
from disturbed_servers import wait_for_server
from figures import finish, make_parser
from random_models import SIZES, VOCAB_SIZE, make_model

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.kinds import ServerSpec, make_client
from torchtitan.grpo.inference.local_servers import HeldPorts, LaunchedServer, start_server
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.types import GenerateRequest, ServerKind

KINDS: tuple[ServerKind, ...] = ("embedded", "vllm", "sglang")
WIRE = "float32"
BANDWIDTH_SHARE = 0.8
PAUSE_ROUNDS = 10
REST_SECONDS = 1.0
MAX_MODEL_LEN = 512
NUM_REQUESTS = 2
TOKENS_A_REQUEST = 64  # so few that many requests end between two pushes
STARTUP_SECONDS = 400.0
RUN_SECONDS = 900.0


def python_of(kind: ServerKind) -> str | None:
    """Returns the interpreter of the environment that has this kind of server, or None."""
    if kind == "embedded":
        return sys.executable
    named = os.environ.get(f"TORCHTITAN_GRPO_{kind.upper()}_PYTHON")
    path = Path(named) if named else REPOSITORY / f".venv-{kind}" / "bin" / "python"
    return str(path) if path.exists() else None


@contextmanager
def running_server(
    kind: ServerKind, python: str, model: Path, folder: Path
) -> Iterator[LaunchedServer]:
    """Yields one server that is up, and ends it."""
    with contextlib.closing(HeldPorts(1)) as held:
        (port,) = held.ports
        spec = ServerSpec(kind, str(model), port, "cpu", "float32", MAX_MODEL_LEN, 4, python=python)
        server = start_server(spec, folder / f"{kind}.log")
        try:
            wait_for_server(server, STARTUP_SECONDS)
            yield server
        finally:
            stop_children([server.process])


class Generating:
    """Keeps requests in flight from its own thread, and counts the received tokens.

    Attributes:
        num_tokens: Number of tokens of the completions that have ended.
        error: Message of the server error that ended the requests, or an empty string.
    """

    def __init__(self, kind: ServerKind, url: str) -> None:
        self.num_tokens = 0
        self.error = ""
        self._kind: ServerKind = kind
        self._url = url
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="generating", daemon=True)

    def __enter__(self) -> "Generating":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(60)

    def _run(self) -> None:
        asyncio.run(self._generate_all())

    async def _generate_all(self) -> None:
        client = make_client(self._kind, self._url)
        tasks = [asyncio.create_task(self._generate(client, i)) for i in range(NUM_REQUESTS)]
        while not self._ending.is_set() and not all(task.done() for task in tasks):
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await client.close()

    async def _generate(self, client: Any, index: int) -> None:
        count = 0
        while True:
            count += 1
            request = GenerateRequest(
                request_id=f"push-{index}-{count}",
                prompt_ids=[1 + index, 2, VOCAB_SIZE - 1],
                max_new_tokens=TOKENS_A_REQUEST,
                ignore_eos=True,
            )
            try:
                self.num_tokens += len((await client.generate(request)).token_ids)
            except ServerError as error:
                self.error = str(error)
                return


def make_settings(
    server: LaunchedServer, model: Path, folder: Path, max_sources: int
) -> dict[str, Any]:
    """Returns the settings of the ranks by their TOML keys."""
    return {
        "job.dump_folder": folder,
        "model.hf_assets_path": model,
        "training.seq_len": 64,
        "training.local_batch_size": 1,
        "training.mixed_precision_param": "float32",
        "optimizer.implementation": "foreach",
        "lr_scheduler.warmup_steps": 0,
        "optimizer.lr": 8e-4,
        "optimizer.beta2": 0.95,
        "optimizer.weight_decay": 0.1,
        "lr_scheduler.decay_ratio": 1.0,
        "activation_checkpoint.mode": "none",
        "prompts.path": REPOSITORY / "assets/reverse_digits/train.jsonl",
        "reward.functions": "exact_match",
        "rollout.max_new_tokens": 48,
        "grpo.prompts_per_step": 1,
        "grpo.group_size": 2,
        "inference.kind": server.kind,
        "inference.urls": server.url,
        "weight_sync.dtype": WIRE,
        "weight_sync.max_sources": max_sources,
        "observe.progress": "none",
        "observe.log_level": "warning",
        "observe.samples_per_step": 0,
        "debug.seed": 0,
    }


def run_pushes(
    server: LaunchedServer,
    model: Path,
    folder: Path,
    *,
    rounds: int,
    compares: bool,
    max_sources: int = 8,
) -> dict[str, Any]:
    """Runs two ranks that push ``rounds`` versions; returns the measurements of rank 0."""
    settings = make_settings(server, model, folder, max_sources)
    out, job = folder / "out.json", folder / "job.json"
    job.write_text(
        json.dumps(
            {
                "args": [t for key, value in settings.items() for t in (f"--{key}", str(value))],
                "rounds": rounds,
                "compares": compares,
                "rest_seconds": 0.0 if compares else REST_SECONDS,
                "out": str(out),
            }
        )
    )
    program = Path(__file__).with_name("weight_push_run.py")
    ranks = start_child(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", str(program), str(job)),
        ],
        env=rank_environment(),
        log_file=folder / "ranks.log",
    )
    try:
        ranks.wait(RUN_SECONDS)
    except subprocess.TimeoutExpired:
        raise SystemExit(
            f"The ranks have not finished in {RUN_SECONDS:g} s:\n{tail(folder / 'ranks.log')}"
        ) from None
    finally:
        stop_children([ranks])
    if ranks.returncode != 0:
        raise RuntimeError(
            f"The ranks ended with status {ranks.returncode}:\n{tail(folder / 'ranks.log')}"
        )
    return json.loads(out.read_text())


def measure_bandwidth(model: Path, folder: Path, rounds: int) -> tuple[dict[str, float], bool]:
    with running_server("embedded", sys.executable, model, folder) as server:
        result = run_pushes(server, model, folder, rounds=rounds + 2, compares=True)
    counted = result["rounds"][2:]  # connections and memory are warm by then
    gigabytes = result["num_bytes"] / 1e9

    def median(key: str) -> float:
        return float(np.median([r[key] for r in counted]))

    figures = {
        "gigabytes": gigabytes,
        "push_gbps": gigabytes / median("transfer_seconds"),
        "from_publishing_gbps": gigabytes / median("arrived_seconds"),
        "broadcast_gbps": gigabytes / median("bare_seconds"),
        "gather_seconds": median("gather_seconds"),
        "confirmed_seconds": median("confirmed_seconds"),
        "share": median("bare_seconds") / median("transfer_seconds"),
        "share_from_publishing": median("bare_seconds") / median("arrived_seconds"),
    }
    print(
        f"{figures['gigabytes']:.3f} GB per push in {WIRE}, {counted[0]['num_buckets']} buckets, "
        f"{rounds} rounds: a push has {figures['push_gbps']:.2f} GB/s and a plain broadcast has "
        f"{figures['broadcast_gbps']:.2f} GB/s, a share of {figures['share']:.2f} (must be >= "
        f"{BANDWIDTH_SHARE}).\n"
        f"  measured from publishing: {figures['from_publishing_gbps']:.2f} GB/s, a share of "
        f"{figures['share_from_publishing']:.2f}; gathering takes "
        f"{figures['gather_seconds']:.3f} s, and publishing to confirmation takes "
        f"{figures['confirmed_seconds']:.3f} s",
        flush=True,
    )
    return figures, figures["share"] >= BANDWIDTH_SHARE


def measure_pause(
    kind: ServerKind, python: str, model: Path, folder: Path
) -> tuple[dict[str, float], bool]:
    with (
        running_server(kind, python, model, folder) as server,
        Generating(kind, server.url) as generating,
    ):
        result = run_pushes(server, model, folder, rounds=PAUSE_ROUNDS, compares=False)
    pauses = [1e3 * r["pause_seconds"] for r in result["rounds"]]
    failures = result["rounds"][-1]["failures"]
    figures = {
        f"{kind}/pause_p50_ms": float(np.median(pauses)),
        f"{kind}/pause_max_ms": max(pauses),
        f"{kind}/confirmed_p50_ms": float(
            1e3 * np.median([r["confirmed_seconds"] for r in result["rounds"]])
        ),
        f"{kind}/generated_tokens": generating.num_tokens,
    }
    print(
        f"{kind:9} pause per push: p50 {figures[f'{kind}/pause_p50_ms']:8.1f} ms, maximum "
        f"{max(pauses):8.1f} ms; from publishing to confirmation "
        f"{figures[f'{kind}/confirmed_p50_ms']:8.1f} ms; {generating.num_tokens} tokens generated "
        f"meanwhile; lost {failures:.0f} times {generating.error}",
        flush=True,
    )
    # A pause means something only if the server has generated tokens.
    return figures, not failures and not generating.error and generating.num_tokens > 0


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="number of counted pushes")
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="120M",
        help="size of the model; a small one is enough to try the script",
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures: dict[str, float] = {}
    ok = True
    with tempfile.TemporaryDirectory(prefix="weight-push-") as name:
        model, _ = make_model(Path(name), options.size)
        measurements = []
        if "embedded" in options.only:
            measurements.append(lambda folder: measure_bandwidth(model, folder, options.rounds))
        for kind in options.only:
            python = python_of(kind)
            if python is None:
                ok = False
                print(f"{kind:9} is not installed: run scripts/install_{kind}.sh, or leave it out")
                continue
            measurements.append(
                lambda folder, kind=kind, python=python: measure_pause(kind, python, model, folder)
            )
        for index, measure in enumerate(measurements):
            folder = Path(name) / str(index)
            folder.mkdir()
            try:
                measured, holds = measure(folder)
            except RuntimeError as error:
                measured, holds = {}, False
                print(f"FAIL {error}", flush=True)
            figures |= measured
            ok = ok and holds
    return finish(options, "weight_push", ok, figures)


if __name__ == "__main__":
    sys.exit(main())
