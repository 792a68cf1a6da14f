# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What all benchmarks share: the command line with ``--json``, its last line, and the exit status."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchtitan.grpo.pipeline.schedules import AUTO, LAYER_SCHEDULES


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with ``--json``, described by the first line of a module's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    return parser


def finish(
    given: argparse.Namespace, name: str, ok: bool, figures: Mapping[str, Any] | object
) -> int:
    """Prints the figures as a JSON object if ``--json`` is given, and returns the exit status."""
    if given.json:
        record = {"benchmark": name, "ok": bool(ok), "figures": figures}
        print(json.dumps(record))
    return 0 if ok else 1


def say_bounds(missed: Sequence[str]) -> bool:
    """Prints which bounds are exceeded; returns whether none is."""
    print("\n" + ("All bounds hold." if not missed else "EXCEEDED: " + "; ".join(missed)))
    return not missed


def schedule_rows(
    degrees: Sequence[int], cell: Callable[[str, int], str], width: int = 16
) -> Iterator[str]:
    """Yields the lines of a table of ``cell(schedule, ranks)``, with a line for each schedule."""
    yield f"{'':22}" + "".join(f"{f'p = {p}':>{width}}" for p in degrees)
    for name in LAYER_SCHEDULES:
        if name != AUTO:
            yield f"{name:22}" + "".join(cell(name, p).rjust(width) for p in degrees)
