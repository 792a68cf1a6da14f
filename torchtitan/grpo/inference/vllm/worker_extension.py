# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What this project adds to vLLM's workers, with ``--worker-extension-cls``.

A weight transfer engine (see `engine.py`) cannot answer: vLLM drops what its methods return. A
method that the extension adds to the workers can be called by name through ``/collective_rpc``,
which returns the answers of all workers.
"""

from dataclasses import asdict
from typing import Any

import torch

from torchtitan.grpo.weight_wire.own_group_facts import own_group_facts


class WorkerExtension:
    """Becomes a base class of vLLM's worker class, which has the attribute ``device``."""

    device: torch.device

    def torchtitan_grpo_group_facts(self) -> dict[str, Any]:
        """Returns the :class:`GroupFacts` of this worker."""
        return asdict(own_group_facts(self.device))
