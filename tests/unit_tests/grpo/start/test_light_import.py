# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A rank imports torchtitan's core without the compiler, which is there when it is asked for."""

import subprocess
import sys

from light import LIGHT

PROGRAM = """
import sys
import torch
from torchtitan.grpo.system.device import settle_device
settle_device()
from torchtitan.grpo.upstream.light_import import import_core
calls, compile = [], torch.compile
torch.compile = counted = lambda function, **options: (calls.append(options), function)[1]
import_core()
assert torch.compile is counted
heavy = ("torch._inductor.compile_fx", "datasets", "torchtitan.components.validate")
assert not [name for name in heavy if name in sys.modules]
from torchtitan.grpo.training.frame import Trainer
from torchtitan.models.attention import VarlenAttentionWrapper
assert calls == [], "nothing is compiled before it is called"
for _ in range(2):
    try:
        VarlenAttentionWrapper._compiled_varlen_attn()
    except TypeError as error:
        assert "missing" in str(error), error
assert [options["mode"] for options in calls] == ["max-autotune-no-cudagraphs"]
from torchtitan.components.validate import BaseValidator
assert BaseValidator is not object
print("right")
"""


def test_the_core_is_imported_without_what_a_rank_may_not_need():
    command = [sys.executable, "-c", LIGHT + PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "right\n", done.stderr[-4000:]
