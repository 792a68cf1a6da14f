# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The first lines of the console script ``torchtitan-grpo``.

They stand outside of the package ``torchtitan``, whose ``__init__`` takes seconds: it imports torch,
the compiler and the quantization packages, which ``--help`` and ``train`` itself do not need.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


def end_at_start(signum: int, frame: FrameType | None = None) -> None:
    """Handles a signal to a process that starts a run, until a rank has begun its work."""
    text = "Stopped before the first step. The checkpoints of earlier starts are kept."
    print(text, file=sys.stderr, flush=True)
    os._exit(128 + signum)


def main() -> None:
    """Runs the command that the command line names."""
    # Until a command handles signals itself, Ctrl-C needs no traceback.
    starts_run = sys.argv[1:2] in (["train"], ["sft"])
    signal.signal(signal.SIGINT, end_at_start if starts_run else signal.SIG_DFL)
    _light_start().install_bare_package()
    from torchtitan.grpo.commands.cli import main as run

    run()


def rendezvous_handler() -> Callable[[Any], Any]:
    """Returns what makes torchrun's rendezvous ``--rdzv-backend torchtitan_grpo``.

    Torch calls this whenever it imports its rendezvous, so it imports nothing itself.
    """

    def make(params: Any) -> Any:
        _light_start().install_bare_package()
        from torchtitan.grpo.start.local_rendezvous import LocalRendezvous

        return LocalRendezvous.make(params)

    return make


def _light_start() -> ModuleType:
    """Returns `torchtitan/grpo/system/light_start.py`, imported by its path."""
    file = Path(__file__).resolve().parent / "torchtitan" / "grpo" / "system" / "light_start.py"
    spec = importlib.util.spec_from_file_location("torchtitan_grpo_light_start", file)
    if spec is None or spec.loader is None:
        sys.exit(f"error: {file} cannot be imported. Install torchtitan-grpo again.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
