# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""PEFT's model, with which low-rank adapters are compared."""

from pathlib import Path
from typing import Any

import peft
import torch


def peft_model(model: Any, folder: Path, rank: int, alpha: float, targets: list[str]) -> Any:
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, task_type="CAUSAL_LM", target_modules=targets
    )
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    return adapted
