# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Methods that this project adds to vLLM's workers, with ``--worker-extension-cls``.

The weight transfer engine (`engine.py`) cannot answer questions, because vLLM drops what its methods
return. ``/collective_rpc`` calls the methods here by name and returns the answers of all workers.
"""

from dataclasses import asdict
from typing import Any

import torch

from torchtitan.grpo.weight_wire.process_group import own_group_facts


class WorkerExtension:
    """A mixin that vLLM adds to its worker class. The two annotated attributes are the worker's."""

    device: torch.device
    vllm_config: Any

    def torchtitan_grpo_group_facts(self) -> dict[str, Any]:
        return asdict(own_group_facts(self.device))

    def torchtitan_grpo_sleep_frees(self) -> str:
        # Without the option, /sleep and /wake_up answer as usual and free nothing.
        return "memory" if self.vllm_config.model_config.enable_sleep_mode else "nothing"
