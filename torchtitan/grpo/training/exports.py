# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Exports the policy into the run's folder for other programs."""

from pathlib import Path

import torch.nn as nn

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_weights import export_hf
from torchtitan.grpo.models.lora import export_peft
from torchtitan.grpo.system.dtypes import TORCH_DTYPE_MAP
from torchtitan.grpo.upstream.state_dict import BaseStateDictAdapter


def export_policy(
    config: JobConfig,
    model_parts: list[nn.Module],
    adapter: BaseStateDictAdapter,
    source: Path,
    step: int,
    *,
    is_writer: bool,
) -> Path:
    """Exports the model to ``hf/step-N``, and adapters to ``peft/step-N``; returns the former.

    Collective; ``is_writer`` is rank 0. ``source`` is the run's original Hugging Face directory.
    """
    folder, name = Path(config.job.dump_folder), f"step-{step}"
    dtype = TORCH_DTYPE_MAP[config.checkpoint.export_dtype]
    target = folder / "hf" / name
    export_hf(model_parts, adapter, source, target, dtype, is_writer=is_writer)
    if config.lora.rank:
        export_peft(
            model_parts, adapter, config.lora, str(source), folder / "peft" / name, dtype,
            is_writer=is_writer,
        )  # fmt: skip
    return target
