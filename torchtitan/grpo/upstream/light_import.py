# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Imports torchtitan's core without torch's compiler and without `datasets`.

Both take two seconds of a core in each rank. Upstream calls ``torch.compile`` in the bodies of
classes for attention, which imports the compiler, and its `TrainSpec` names the type of a validator,
whose module imports `datasets` and pandas. A move to 0.3.0 must look again at what is imported.
"""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_VALIDATE = "torchtitan.components.validate"


def import_core() -> None:
    """Call it before another module imports torchtitan's core, while no other thread runs.

    What upstream compiles in the bodies of its classes is compiled when it is first called. Code that
    imports upstream's validator afterwards gets the real one. Without this call, or after an import
    of torchtitan itself, all works, but has been imported at full length.
    """
    module: Any = torch
    real_compile = module.compile
    stand_in: Any = types.ModuleType(_VALIDATE)
    stand_in.BaseValidator = object
    is_new = sys.modules.setdefault(_VALIDATE, stand_in) is stand_in
    module.compile = functools.partial(_compile_later, real_compile)
    try:
        from torchtitan.protocols import train_spec
    finally:
        module.compile = real_compile
        if is_new:
            del sys.modules[_VALIDATE]


def _compile_later(
    compile: Callable[..., Callable[..., Any]],
    function: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    if function is None:  # it makes a decorator
        return functools.partial(_compile_later, compile, **options)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
