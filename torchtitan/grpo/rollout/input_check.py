# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Opens everything that the rollout process would, without servers, and says what was found.

It runs in a separate process, as the rollout process does, so that it finds what that process
would find and can be ended if it takes too long. Its argument is a private directory that
contains `config.json` and receives `report.json`.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.input_report import describe_inputs
from torchtitan.grpo.rollout.link_messages import CONFIG_FILE
from torchtitan.grpo.rollout.session import RolloutSession
from torchtitan.grpo.system.child import adopt_orphans, end_descendants
from torchtitan.grpo.workers.owner import OUTPUT_HINT

REPORT_FILE = "report.json"
PROGRESS_FILE = "progress.txt"
"""Progress of a long check, as a sentence."""


class InputReport(msgspec.Struct):
    """Lines on what was opened, warnings, and the error that the run would end with, if any."""

    lines: list[str] = []
    warnings: list[str] = []
    error: str | None = None


async def check(config: RolloutProcessConfig, say: Callable[[str], object]) -> InputReport:
    """Opens and closes the inputs of a run. ``say`` is told the progress of long checks."""
    announced: list[str] = []
    session = RolloutSession(config, announced.append, say)
    try:
        await session.open_inputs()
        lines = describe_inputs(config, session.inputs)
        return InputReport(lines, [*announced, *session.inputs.warnings])
    except (ValueError, RuntimeError, TimeoutError) as error:
        message = str(error).replace(OUTPUT_HINT, "").strip()
        return InputReport(warnings=[*announced, *session.inputs.warnings], error=message)
    finally:
        await session.close()


def main() -> NoReturn:
    """Entry point: ``light_start.py torchtitan.grpo.rollout.input_check DIRECTORY``."""
    logging.basicConfig(level=logging.ERROR)
    folder = Path(sys.argv[1])
    config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=RolloutProcessConfig)
    adopt_orphans()
    report = asyncio.run(check(config, (folder / PROGRESS_FILE).write_text))
    end_descendants()
    # Written under another name first: a report that is there is whole.
    partial = folder / f"{REPORT_FILE}.partial"
    partial.write_bytes(msgspec.json.encode(report))
    partial.rename(folder / REPORT_FILE)
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that still reads a data set must not delay the end.
    os._exit(0)


if __name__ == "__main__":
    main()
