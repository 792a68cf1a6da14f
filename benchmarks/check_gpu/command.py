# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo check-gpu [--budget-seconds N] [--only NAME] [--list] [--device cpu]``."""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from check_gpu.owner import Owner
from check_gpu.report import NOTE, lines_of, machine, summary, table
from check_gpu.row import Row
from check_gpu.table import CHECKS, Check
from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.run_folder.start_record import COMMIT_VARIABLE, source_commit
from torchtitan.grpo.system import strict_json


def main(arguments: list[str], checks: Sequence[Check] = CHECKS) -> int:
    """Runs the checks; returns 0 if none failed, and 1 otherwise.

    Raises:
        ConfigError: If a GPU is needed and none is visible, or if the folder cannot be made.
    """
    began = time.monotonic()
    options = _parse(arguments, checks)
    if options.list:
        print("\n".join(_description(check) for check in checks))
        return 0
    commit = source_commit() or f"unknown (no .git; {COMMIT_VARIABLE} may name it)"
    facts = machine(commit)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output must be a folder that can be written: {error}") from error
    print(f"At most {options.budget_seconds:g} s. Rows go to {options.output}. {NOTE}", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="check-gpu-cache-") as cache:
        deadline = began + options.budget_seconds
        owner = Owner(options.device, options.output, deadline, _empty_caches(cache))
        for check in _chosen(options, checks):
            for row in owner.run(check):
                print("\n".join(lines_of(row)), flush=True)
                rows.append(row)
    print("\n".join(["", *table(rows), *(f"{name}: {fact}" for name, fact in facts.items())]))
    print(
        f"{time.monotonic() - began:.0f} s. Send the output, with the line below, and the folder."
    )
    result = summary(rows, options.device, facts)
    print(strict_json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


def _empty_caches(folder: str) -> dict[str, str]:
    """Returns settings under which each run compiles anew, so that the times are those of a first run."""
    return {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}


def _description(check: Check) -> str:
    seconds = f"{check.needs_seconds:g} to {check.limit_seconds:g} s"
    return f"{check.name:14} {seconds:13} {check.question}"


def _parse(arguments: list[str], checks: Sequence[Check]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("torchtitan-grpo check-gpu", description=__doc__)
    names = [check.name for check in checks]
    parser.add_argument(
        "--budget-seconds", type=float, default=900.0, metavar="N",
        help="end after this time; checks run in their order until then (900)",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME",
        help=f"run this check; may be repeated ({', '.join(names)})",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER",
        default=Path("outputs", f"check-gpu-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"),
        help="folder for rows.jsonl and the output of each check",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the checks and end")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu tries the command itself, with small sizes",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    least = min(check.needs_seconds for check in _chosen(options, checks))
    if not least <= options.budget_seconds < math.inf:
        parser.error(
            f"--budget-seconds must be at least {least:g}, which the shortest check needs, got "
            f"{options.budget_seconds:g}"
        )
    return options


def _chosen(options: argparse.Namespace, checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if not options.only or check.name in options.only]
