# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes the model of a checkpoint as a Hugging Face directory, in one process and without training."""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel, ModelError
from torchtitan.grpo.models.hf_weights import write_hf
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.resume.checkpoint_files import METADATA_FILE, quick_problem, whole_steps
from torchtitan.grpo.system.dtypes import TORCH_DTYPE_MAP
from torchtitan.grpo.system.files import damaged_files
from torchtitan.grpo.training.model_spec import build_without_memory


def find_checkpoint(config: JobConfig, named: str) -> Path:
    """``named`` is ``newest``, a step, or a folder; the checkpoint found is whole and undamaged."""
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    if named == "newest" or named.isdecimal():
        steps = whole_steps(folder)
        step = int(named) if named.isdecimal() else max(steps, default=None)
        if step not in steps:
            listed = ", ".join(map(str, steps)) or "none"
            raise ModelError(
                f"--checkpoint must name a checkpoint of the run in job.dump_folder, got {named}. "
                f"{folder} holds whole checkpoints of the steps: {listed}."
            )
        found = folder / f"step-{step}"
    else:
        found = Path(named)
    if not (found / METADATA_FILE).is_file():
        raise ModelError(
            f"--checkpoint must be a checkpoint folder with a {METADATA_FILE}, which is written when "
            f"it is whole, or a step, or newest, got {named}. --model takes a Hugging Face directory."
        )
    problem = quick_problem(found)
    damaged = [problem] if problem else list(damaged_files(found))
    if damaged:
        raise ModelError(f"The checkpoint {found} is damaged: {'; '.join(damaged[:3])}.")
    return found


def export_checkpoint(config: JobConfig, model: HFModel, folder: Path, target: Path) -> None:
    """Writes a checkpoint's model as a Hugging Face directory, in ``export_dtype``.

    It must fit into host memory. ``model`` gives config and tokenizer; its arguments are changed.
    """
    dtype = TORCH_DTYPE_MAP[config.checkpoint.export_dtype]
    built, adapter_of = build_without_memory(config, model)
    state = {
        name: torch.empty(parameter.shape, dtype=dtype)
        for name, parameter in named_parameters([built])
    }
    try:
        with warnings.catch_warnings():
            # It warns that it loads in a single process, which is what is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    except (CheckpointException, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"The checkpoint {folder} must hold the model of model.hf_assets_path ({model.path}): "
            f"{str(error).strip()[-300:]}"
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    adapter = adapter_of(str(model.path))
    tensors = (item for name in state for item in adapter.to_hf({name: state[name]}).items())
    write_hf(tensors, model.path, target, dtype)
