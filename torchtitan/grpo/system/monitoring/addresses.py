# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes files in the run's folder that tell at which addresses its processes can be monitored.

There is one file per process, in the format that Prometheus reads (``file_sd_configs``)::

    [{"targets": ["127.0.0.1:40123"], "labels": {"process": "rank0", "run": "quickstart"}}]
"""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torchtitan.grpo.system.files import write_whole

logger = logging.getLogger(__name__)

ADDRESSES_FOLDER = "monitoring"

KEY_VARIABLE = "TORCHTITAN_GRPO_MONITOR_KEY"
"""Environment variable with the key that ``/metrics`` and the facts of ``/healthz`` need."""


def write_address(
    dump_folder: str, process: str, targets: Sequence[tuple[str, int]], **labels: str
) -> None:
    """Writes ``<dump_folder>/monitoring/<process>.json``. A failure is only logged."""
    named = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in targets]
    labels = {"process": process, "run": Path(dump_folder).resolve().name, **labels}
    content = json.dumps([{"targets": named, "labels": labels}], allow_nan=False) + "\n"
    try:
        write_whole(Path(dump_folder) / ADDRESSES_FOLDER / f"{process}.json", content.encode())
    except OSError as error:
        logger.error("The addresses of %s could not be written: %s", process, error)


def remove_address(dump_folder: str, process: str) -> None:
    with suppress(OSError):
        (Path(dump_folder) / ADDRESSES_FOLDER / f"{process}.json").unlink()
