# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs from Python: ``from torchtitan.grpo import run``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.grpo.start.from_python import Run, run
    from torchtitan.grpo.system.errors import RunError

__all__ = ["Run", "RunError", "run"]


def __getattr__(name: str) -> Any:
    """Imports a public name only at its first use, because every process of a run imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchtitan.grpo.start import from_python
    from torchtitan.grpo.system import errors

    return getattr(errors if name == "RunError" else from_python, name)
