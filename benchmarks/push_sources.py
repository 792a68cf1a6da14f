# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares a push from all ranks with a push from one rank, for each kind of server.

    python benchmarks/push_sources.py [--json] [--runs 5] [--size 120M]
                                      [--only embedded vllm sglang]

Two training ranks push to one server, in turn with ``weight_sync.max_sources = 1`` and with the
default of 8, with which both ranks send. Each run starts a new pair of ranks, which push ten
versions to the same server. The figure of a run is the median time from publishing a version to its
confirmation. Real vLLM and SGLang need environments of their own (scripts/install_vllm.sh,
scripts/install_sglang.sh). Five runs take about twelve minutes. With ``--json`` the last line is a
JSON object.
"""

import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
from figures import finish, make_parser
from random_models import SIZES, make_model
from weight_push import KINDS, python_of, run_pushes, running_server

from torchtitan.grpo.types import ServerKind

MAX_SOURCES = (1, 8)
NUM_WARM_UP_PUSHES = 2
NUM_PUSHES = 10


def measure(
    kind: ServerKind, python: str, model: Path, folder: Path, num_runs: int
) -> dict[int, list[float]]:
    """Returns the milliseconds from publishing to confirmation of each run, by ``max_sources``."""
    milliseconds: dict[int, list[float]] = {sources: [] for sources in MAX_SOURCES}
    with running_server(kind, python, model, folder) as server:
        for run in range(num_runs):
            for sources in MAX_SOURCES:
                place = folder / f"{run}-{sources}"
                place.mkdir()
                result = run_pushes(
                    server, model, place,
                    rounds=NUM_WARM_UP_PUSHES + NUM_PUSHES, compares=True, max_sources=sources,
                )  # fmt: skip
                rounds = result["rounds"][NUM_WARM_UP_PUSHES:]
                milliseconds[sources].append(
                    1e3 * float(np.median([r["confirmed_seconds"] for r in rounds]))
                )
    return milliseconds


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--runs", type=int, default=5, help="number of runs for each value of max_sources"
    )
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="120M",
        help="size of the model; a small one is enough to try the script",
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures: dict[str, dict[int, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="push-sources-") as name:
        model, _ = make_model(Path(name), options.size)
        for kind in options.only:
            python = python_of(kind)
            if python is None:
                print(
                    f"{kind:9} is not installed: run scripts/install_{kind}.sh, or leave it out",
                    flush=True,
                )
                continue
            folder = Path(name) / kind
            folder.mkdir()
            figures[kind] = measure(kind, python, model, folder, options.runs)
            for sources, times in figures[kind].items():
                print(
                    f"{kind:9} max_sources = {sources}: from publishing to confirmation "
                    f"{np.median(times):7.1f} ms ({min(times):.1f} to {max(times):.1f})",
                    flush=True,
                )
    return finish(options, "push_sources", len(figures) == len(options.only), figures)


if __name__ == "__main__":
    sys.exit(main())
