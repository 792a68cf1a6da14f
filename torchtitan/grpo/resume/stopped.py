# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a run says when it has been stopped: where its checkpoint is, and how to go on."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.resume.checkpoint_files import is_whole
from torchtitan.grpo.run_folder.launch import LAUNCH_VARIABLE
from torchtitan.grpo.run_folder.start_record import without_keys

_MODULE = "torchtitan.grpo_train"
_FLAGS = ("--job.overwrite", "--job.no-overwrite", "--job.no_overwrite")
_FLAG_VALUES = ("true", "false", "True", "False")
_WITH_VALUE = ("--checkpoint.load_step", "--checkpoint.load-step")


def describe_stop(
    config: JobConfig, step: int, num_rollouts: int | None, arguments: Sequence[str]
) -> str:
    """Returns what to print after a stop request.

    Args:
        config: Configuration of the run.
        step: Number of steps that the run has taken.
        num_rollouts: Number of rollouts in flight that are kept beside the checkpoint. None if
            they could not be written in time.
        arguments: Command line of the run, without the program's name.
    """
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    checkpoint = folder / f"step-{step}"
    stopped = f"Stopped after step {step}."
    if not config.checkpoint.enable or not is_whole(checkpoint):
        reason = "the run had taken no step" if step == 0 else "checkpoint.enable is false"
        if config.checkpoint.enable and step:
            reason = "checkpoint.load_only is set"
            if not config.checkpoint.load_only:
                reason = "that failed, as the log says; a new start begins from the one before it"
        return f"{stopped} No checkpoint was written, because {reason}."
    kept = "no rollouts were in flight"
    if num_rollouts is None:
        kept = "rollouts in flight could not be kept and will be generated again"
    elif num_rollouts:
        kept = f"{num_rollouts} rollouts in flight are kept with it"
    later = any(int(p.name[5:]) > step for p in folder.glob("step-*") if p.name[5:].isdecimal())
    command = resume_command(config, arguments, step if later else None)
    return f"{stopped} The checkpoint is {checkpoint}; {kept}. To go on:\n    {command}"


def resume_command(config: JobConfig, arguments: Sequence[str], load_step: int | None) -> str:
    """Returns the command that continues a run from its newest checkpoint.

    Args:
        config: Configuration of the run.
        arguments: Command line of the run, without the program's name.
        load_step: The step to continue from, if the folder holds newer checkpoints.
    """
    kept = _without_start(without_keys(arguments))
    named = {argument.partition("=")[0] for argument in arguments}
    # What the command line said may hide what the file says, which must not count again.
    if config.job.overwrite or named & {*_FLAGS}:
        kept.append("--job.no-overwrite")
    if load_step is not None:
        kept.append(f"--checkpoint.load_step={load_step}")
    elif config.checkpoint.load_step != -1 or named & {*_WITH_VALUE}:
        kept.append("--checkpoint.load_step=-1")
    if (launch := os.environ.get(LAUNCH_VARIABLE)) is not None:
        # It names the configuration itself, and passes the rest on after two dashes.
        each = "on each node, with its own --nproc and --interface, if these are given."
        return f"{launch} -- {shlex.join(kept[2:])}\n{each}"
    return shlex.join([*_launcher(), *kept])


def _without_start(arguments: Sequence[str]) -> list[str]:
    """Returns arguments without those that say where the run was to begin."""
    kept: list[str] = []
    before = ""  # the option whose value may follow
    for argument in arguments:
        name = argument.partition("=")[0]
        is_value = before in _WITH_VALUE or (before in _FLAGS and argument in _FLAG_VALUES)
        is_start = not is_value and name in (*_FLAGS, *_WITH_VALUE)
        before = argument if is_start else ""  # with "=", its value does not follow
        if not is_value and not is_start:
            kept.append(argument)
    return kept


def _launcher() -> list[str]:
    """Returns the words that start the ranks, up to their arguments, as they were given if that is known."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        words = []
    if _MODULE in words and words[words.index(_MODULE) - 1] == "-m":
        words = words[: words.index(_MODULE) + 1]
        # A script's interpreter stands in front of the script.
        return words[1:] if len(words) > 1 and words[1].endswith("torchrun") else words
    return ["torchtitan-grpo", "train", "--nproc", os.environ.get("LOCAL_WORLD_SIZE", "1")]
