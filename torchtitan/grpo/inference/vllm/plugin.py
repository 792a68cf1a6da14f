# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

# vLLM has an environment of its own, which the type checker does not see.
# pyright: reportMissingImports=false

"""What vLLM calls, in each of its processes, when this package is installed beside it.

Installed with ``--no-deps``: vLLM's environment has neither torchtitan nor the trainer's
libraries, so this module and the engine import only what needs vLLM's environment alone.
"""

ENGINE_NAME = "torchtitan_grpo"


def register() -> None:
    """Registers the weight transfer engine. Harmless when called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may load its plugins more than once in a process, and refuses a second name.
    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            ENGINE_NAME, "torchtitan.grpo.inference.vllm.engine", "TorchGroupWeightEngine"
        )
