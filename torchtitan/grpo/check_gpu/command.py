# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo check-gpu [--only NAME] [--list] [--device cpu]``."""

import argparse
from collections.abc import Sequence

from torchtitan.grpo import strict_json
from torchtitan.grpo.check_gpu.owner import run_check
from torchtitan.grpo.check_gpu.report import NOTE, lines_of, machine, summary
from torchtitan.grpo.check_gpu.row import Row
from torchtitan.grpo.check_gpu.table import CHECKS, Check
from torchtitan.grpo.command_line.errors import ConfigError


def main(arguments: list[str], checks: Sequence[Check] = CHECKS) -> int:
    """Runs the checks; returns 0 if none failed, and 1 otherwise.

    Raises:
        ConfigError: If a GPU is needed and none is visible.
    """
    options = _parse(arguments, checks)
    if options.list:
        print("\n".join(f"{check.name:14} {check.question}" for check in checks))
        return 0
    facts = machine()
    if options.device == "cuda" and not facts["gpus"]:
        raise ConfigError(
            "check-gpu needs a GPU that torch can use, and none is visible. Install a torch with "
            "CUDA and set CUDA_VISIBLE_DEVICES, or try the command with --device cpu."
        )
    print(f"Up to {_minutes(checks, options.only):.0f} minutes. {NOTE}", flush=True)
    rows: list[Row] = []
    for check in checks:
        if options.only and check.name not in options.only:
            continue
        found = _rows_of(check, options.device)
        print("\n".join(lines_of(found)), flush=True)
        rows += found
    print(_what_to_send(facts))
    result = summary(rows, options.device, facts)
    print(strict_json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


def _rows_of(check: Check, device: str) -> list[Row]:
    if device == "cpu" and not check.on_cpu:
        return [Row("", "skipped", reason="It needs a GPU.", check=check.name)]
    return run_check(check, device)


def _minutes(checks: Sequence[Check], only: list[str] | None) -> float:
    return sum(c.limit_seconds for c in checks if not only or c.name in only) / 60


def _what_to_send(facts: dict) -> str:
    known = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"Machine: {known}.\nSend the whole output, with the line below, to the maintainers."


def _parse(arguments: list[str], checks: Sequence[Check]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("torchtitan-grpo check-gpu", description=__doc__)
    names = [check.name for check in checks]
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME",
        help=f"run this check; may be repeated ({', '.join(names)})",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the checks and end")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu tries the command itself, with small sizes",
    )  # fmt: skip
    return parser.parse_args(arguments)
