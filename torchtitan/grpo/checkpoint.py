# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a run may be resumed from, and how it is kept resumable. The rest is upstream's."""

from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.checkpoint import CheckpointManager


class CheckpointError(ValueError):
    """A run cannot be resumed from a checkpoint; the message says what to do."""


def check_resumable(checkpointer: CheckpointManager, load_step: int) -> None:
    """Refuses a checkpoint that holds the model alone, as a finished run's last one does.

    Args:
        checkpointer: Of the run.
        load_step: ``checkpoint.load_step``; -1 is the newest.

    Raises:
        CheckpointError: Optimizer and progress are not in it.
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
            f"A run must resume from a whole checkpoint, got {folder}, which holds the model alone: "
            "a finished run's last one does (checkpoint.last_save_model_only). Set "
            "checkpoint.load_step to an earlier step that is in the folder, or another "
            "job.dump_folder to begin anew."
        )
    if "reference" in checkpointer.states and "reference" not in held:
        raise CheckpointError(
            f"A run with grpo.ref_model_ema above 0 must resume from a checkpoint that holds its "
            f"reference, got {folder}, which was written without one. Set grpo.ref_model_ema = 0, or "
            "another job.dump_folder to begin anew."
        )


def save_whole(checkpointer: CheckpointManager, step: int) -> None:
    """Saves a checkpoint out of turn that the run can be resumed from.

    Upstream's last checkpoint of a run holds the model alone.
    """
    if checkpointer.enable and step % checkpointer.interval:
        checkpointer.last_save_model_only = False
        checkpointer.last_save_in_hf = False
        checkpointer.save(step, last_step=True)
