# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which checkpoints a run can resume from, and what it saves. The rest is upstream's."""

from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.tools.logging import logger

from torchtitan.grpo.types import PromptProgress


class CheckpointError(ValueError):
    """A run cannot be resumed from a checkpoint; the message names the remedy."""


def check_resumable(checkpointer: CheckpointManager, load_step: int) -> None:
    """Refuses a checkpoint that holds the model alone, as the last one of a finished run does.

    Args:
        checkpointer: Checkpoint manager of the run.
        load_step: ``checkpoint.load_step``; -1 stands for the newest checkpoint.

    Raises:
        CheckpointError: If the checkpoint lacks the optimizer and the progress of the run, or
            the reference model that the run needs.
    """
    if not checkpointer.enable or not Path(checkpointer.folder).is_dir():
        return
    step = checkpointer._find_load_step() if load_step == -1 else load_step
    folder = Path(checkpointer._create_checkpoint_id(step))
    if step == -1 or not folder.is_dir():
        return
    if not (folder / ".metadata").exists():
        held = set()  # a Hugging Face directory
    else:
        metadata = FileSystemReader(folder).read_metadata()
        held = {key.partition(".")[0] for key in metadata.state_dict_metadata}
    if "train_state" not in held:
        raise CheckpointError(
            f"A run must resume from a whole checkpoint, got {folder}, which holds the model "
            "alone. The last checkpoint of a finished run holds no more "
            "(checkpoint.last_save_model_only). Set checkpoint.load_step to an earlier step in "
            "that folder, or choose another job.dump_folder to start a new run."
        )
    if "reference" in checkpointer.states and "reference" not in held:
        raise CheckpointError(
            "A run with grpo.ref_model_ema above 0 must resume from a checkpoint that holds its "
            f"reference model, got {folder}, which was written without one. Set "
            "grpo.ref_model_ema = 0, or choose another job.dump_folder to start a new run."
        )


def load_newest(checkpointer: CheckpointManager, load_step: int) -> bool:
    """Loads the checkpoint that the run resumes from; returns False if there is none.

    Args:
        checkpointer: Checkpoint manager of the run.
        load_step: ``checkpoint.load_step``; -1 stands for the newest checkpoint.

    Raises:
        CheckpointError: If :func:`check_resumable` refuses the checkpoint.
    """
    check_resumable(checkpointer, load_step)
    return checkpointer.load(step=load_step)


def save_whole(checkpointer: CheckpointManager, step: int) -> None:
    """Saves a checkpoint from which the run can be resumed, unless ``step`` has one already.

    Upstream's last checkpoint of a run holds the model alone; this one holds everything.
    """
    if checkpointer.enable and step % checkpointer.interval:
        checkpointer.last_save_model_only = False
        checkpointer.last_save_in_hf = False
        checkpointer.save(step, last_step=True)


def save_stopped(checkpointer: CheckpointManager, step: int, first_step: int) -> None:
    """Saves a checkpoint from which a stopped run can be resumed, and logs where it stopped.

    Args:
        checkpointer: Checkpoint manager of the run.
        step: Number of steps that the run has taken.
        first_step: Value of ``step`` when this process began. Nothing is saved if no step was
            taken since.
    """
    message = f"Stopped at step {step}"
    if checkpointer.enable and step > first_step:
        save_whole(checkpointer, step)
        message += ", which is checkpointed"
    logger.info(f"{message}.")


def progress_state(progress: PromptProgress) -> dict[str, str]:
    """Returns the entry of a checkpoint that holds the progress through the prompts.

    It is one string: a checkpoint stores each element of a list by itself, and the number of
    open prompts changes.
    """
    return {"prompt_progress": msgspec.json.encode(progress).decode()}


def progress_from(state_dict: dict[str, Any]) -> PromptProgress:
    """Reads the progress through the prompts from a checkpoint's state."""
    return msgspec.json.decode(state_dict["prompt_progress"], type=PromptProgress)
