# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

# vLLM has its own environment, which the type checker does not see.
# pyright: reportMissingImports=false

"""The vLLM plugin, which vLLM calls in each of its processes if this package is installed.

The package is installed with ``--no-deps`` beside vLLM, whose environment has neither
torchtitan nor the trainer's libraries. This module and the engine therefore import only modules
that need torch, numpy, safetensors, msgspec and vLLM.
"""

import multiprocessing

from torchtitan.grpo.system.child import end_with_parent
from torchtitan.grpo.weight_wire.process_group import limit_communicators

ENGINE_NAME = "torchtitan_grpo"
# For the communicator with a trainer, whose own timeout is not known yet: its default.
_COMMUNICATOR_SECONDS = 120.0


def register() -> None:
    """Registers the weight transfer engine. Further calls do nothing."""
    if multiprocessing.parent_process() is not None:
        # Otherwise the engine would outlive a server that is killed, and keep its memory and GPUs.
        end_with_parent()
    # Here, because vLLM's workers use their own communicators before they meet a trainer.
    limit_communicators(_COMMUNICATOR_SECONDS)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may load its plugins twice in a process, and refuses to register a name again.
    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            ENGINE_NAME, "torchtitan.grpo.inference.vllm.engine", "TorchGroupWeightEngine"
        )
