# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The state that a run loads from a checkpoint and saves, as far as upstream does not handle it."""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from safetensors import SafetensorError

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.step_source import StepSource
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.models.hf_names import StateDictAdapter
from torchtitan.grpo.models.hf_weights import export_policy, load_hf_weights
from torchtitan.grpo.models.lora import begin_adapters
from torchtitan.grpo.resume.checkpoint_files import is_whole, remove_incomplete
from torchtitan.grpo.resume.checkpoint_manager import GRPOCheckpointManager, LastSaveFailed
from torchtitan.grpo.resume.kept_record import STATE_KEY, CheckpointDamaged, RecordState
from torchtitan.grpo.resume.resumption import Start, choose_start, describe_start, is_finished
from torchtitan.grpo.rollout.link import RolloutFailed
from torchtitan.grpo.run_folder.launch import LAUNCH_VARIABLE
from torchtitan.grpo.run_folder.start_record import without_keys
from torchtitan.grpo.system.disk_failures import describe_failure
from torchtitan.grpo.system.files import damaged_files
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo.training.critic import Critic
from torchtitan.grpo.training.frame import Trainer
from torchtitan.grpo.training.lr_schedule import renew_settings, settings_of
from torchtitan.grpo.types import PromptProgress
from torchtitan.grpo.upstream.checkpoint import MODEL, CheckpointManager, ModelWrapper
from torchtitan.grpo.weight_wire.adapter_names import is_adapter

_MODULE = "torchtitan.grpo_train"
# How a run begins. The flags may have a value, such as true.
_OF_START = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
_OF_START.add_argument(
    "--job.overwrite",
    "--job.no-overwrite",
    "--job.no_overwrite",
    dest="overwrite",
    nargs="?",
    const="",
)
_OF_START.add_argument("--checkpoint.load_step", "--checkpoint.load-step", dest="load_step")


class RunFinished(Exception):
    """The run in the folder has nothing left to do."""


def find_start(config: JobConfig, model: HFModel) -> Start:
    """Decides how the run starts (`choose_start`), checks its checkpoint, and removes interrupted saves.

    Collective. To check the checkpoint's contents, each rank reads a share of the files. RunFinished is
    raised on all ranks or on none.
    """
    damaged: dict[int, str] = {}
    while True:
        start = choose_start(config, model, damaged, goes_on=True)
        folder = start.folder
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        own = [] if folder is None else list(damaged_files(folder, rank, num_ranks))
        found: list[list[str] | None] = [None] * num_ranks
        dist.all_gather_object(found, own)
        files = sorted({file for files in found for file in files or []})
        if not files or folder is None:
            break
        problem = f"{', '.join(files[:3])}: not what was written"
        if config.checkpoint.load_step != -1 or start.step in damaged:
            raise CheckpointDamaged(folder, problem)
        damaged[start.step] = problem
    # Clocks of hosts differ.
    shared: list[Any] = [rank == 0 and is_finished(config, start), start.record.date]
    dist.broadcast_object_list(shared, src=0)
    is_over, start.record.date = shared
    if is_over:
        raise RunFinished
    if rank == 0 and config.checkpoint.enable and not config.checkpoint.load_only:
        remove_incomplete(Path(config.job.dump_folder) / config.checkpoint.folder)
    dist.barrier()  # all ranks must find the folder settled
    return start


class AdapterState(ModelWrapper):
    """Saves only a model's adapters. Of the frozen weights, the run's record keeps a digest."""

    def _get_state_dict(self) -> dict[str, Any]:
        whole = super()._get_state_dict()
        return {name: tensor for name, tensor in whole.items() if is_adapter(name)}


def load_weights(trainer: Trainer, adapter: StateDictAdapter, model: HFModel) -> None:
    show = trainer.metrics_processor.wait
    load_hf_weights(trainer.model_parts, adapter, model.path, show=show)
    begin_adapters(trainer.model_parts, trainer.job_config.debug.seed)


def load(trainer: Trainer, start: Start, critic: Critic | None = None) -> bool:
    """Loads a checkpoint, or returns False if there is none. This start's settings override the saved ones."""
    checkpointer, config = trainer.checkpointer, trainer.job_config
    assert isinstance(config, JobConfig)
    settings = settings_of(trainer.optimizers)
    of_critic = [] if critic is None else settings_of(critic.optimizers)
    if checkpointer.enable and config.lora.rank:
        checkpointer.states[MODEL] = AdapterState(trainer.model_parts)
    if checkpointer.enable:
        checkpointer.states[STATE_KEY] = RecordState(start.record)
        checkpointer.exclude_from_loading = [*checkpointer.exclude_from_loading, STATE_KEY]
    step = config.checkpoint.load_step
    if checkpointer.enable and start.folder is not None and step == -1:
        # Not the newest one, if that is damaged.
        is_own = start.folder.parent == Path(checkpointer.folder)
        step = int(start.folder.name.removeprefix("step-")) if is_own else -1
    is_loaded = checkpointer.load(step=step)
    if is_loaded and start.folder is not None:
        rate, brought = renew_settings(trainer.optimizers, trainer.lr_schedulers, settings)
        if critic is not None:
            renew_settings(critic.optimizers, critic.schedulers, of_critic)
        if dist.get_rank() == 0:
            lines = list(describe_start(config, start))
            if not math.isclose(rate, brought, rel_tol=1e-6, abs_tol=1e-12):
                lines.append(
                    f"  The learning rate of step {start.step + 1} is {rate:.6g}; under the settings of "
                    f"the run that wrote the checkpoint it would be {brought:.6g}."
                )
            # Differences are shown whatever observe.log_level hides.
            (logger.warning if len(lines) > 1 else logger.info)("\n".join(lines))
    return is_loaded


def save_whole(checkpointer: CheckpointManager, step: int) -> None:
    """Saves a full checkpoint, unlike upstream's last one, which may hold only the model.

    At a multiple of ``checkpoint.interval``, a full checkpoint exists already, and nothing is saved.
    """
    if checkpointer.enable and step % checkpointer.interval:
        checkpointer.last_save_model_only = False
        checkpointer.save(step, last_step=True)


def save_stopped(
    trainer: Trainer, source: StepSource | None, first_step: int, stop: StopRequest
) -> None:
    """Saves what is needed to continue a stopped run, unless it took no step, and prints how to continue.

    ``source`` is None on ranks other than 0.
    """
    config, checkpointer, step = trainer.job_config, trainer.checkpointer, trainer.step
    assert isinstance(config, JobConfig) and isinstance(checkpointer, GRPOCheckpointManager)
    if not checkpointer.enable or step == 0:
        source = None  # without a checkpoint nothing can go on with rollouts
    if source is not None:
        # Written by the rollout process while the ranks write the checkpoint.
        with suppress(RolloutFailed):
            source.save(step)
    if checkpointer.enable and step > first_step:
        save_whole(checkpointer, step)
        checkpointer.finish()  # one may be written in the background, at its interval
    num_rollouts: int | None = 0
    if source is not None:
        # A rollout process that hangs must leave time for an orderly end.
        seconds = min(stop.timeout_seconds, stop.seconds_left) / 2
        num_rollouts = source.wait_saved(step, max(seconds, 0.0))
        if checkpointer.missing is not None:
            checkpointer.discard_rollouts()
    if dist.get_rank() == 0:
        print(describe_stop(config, step, num_rollouts, sys.argv[1:]), flush=True)


def export(trainer: Trainer, adapter: StateDictAdapter, model: HFModel, *, is_last: bool) -> Path:
    """Exports the model, and returns the export's folder. Collective.

    A failed export is logged, and training goes on. If the last export fails, LastSaveFailed is raised.
    """
    config = trainer.job_config
    assert isinstance(config, JobConfig)
    target = Path(config.job.dump_folder, "hf", f"step-{trainer.step}")
    try:
        export_policy(
            config, trainer.model_parts, adapter, model.path, target, is_writer=dist.get_rank() == 0
        )
    except (OSError, SafetensorError) as error:  # only the writer
        problem = f"The export {target} could not be written: {describe_failure([error], target)}."
        if is_last:
            again = "with checkpoint.enable, the run resumes from its last checkpoint and exports the model."
            raise LastSaveFailed(f"{problem} Correct that, and start again: {again}") from error
        interval = f"grpo.hf_export_interval = {config.grpo.hf_export_interval} steps"
        logger.error(f"{problem} Training goes on and exports again after {interval}.")
    return target


def progress_state(progress: PromptProgress) -> dict[str, str]:
    # One string: a checkpoint stores each element of a list by itself, and their number changes.
    return {"prompt_progress": msgspec.json.encode(progress).decode()}


def progress_from(state_dict: dict[str, Any]) -> PromptProgress:
    return msgspec.json.decode(state_dict["prompt_progress"], type=PromptProgress)


def describe_stop(
    config: JobConfig, step: int, num_rollouts: int | None, arguments: Sequence[str]
) -> str:
    """Returns the text to print after a stop. ``num_rollouts`` is None if they were not saved in time."""
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
    """Returns the command that continues a run from its newest checkpoint, or from ``load_step``."""
    given, kept = _OF_START.parse_known_args(without_keys(arguments))
    # The overwrite and the load_step of the first start must not apply again.
    if config.job.overwrite or given.overwrite is not None:
        kept.append("--job.no-overwrite")
    if load_step is not None:
        kept.append(f"--checkpoint.load_step={load_step}")
    elif config.checkpoint.load_step != -1 or given.load_step is not None:
        kept.append("--checkpoint.load_step=-1")
    if (launch := os.environ.get(LAUNCH_VARIABLE)) is not None:
        # It names the configuration itself, and passes the rest on after two dashes.
        each = "on each node, with its own --nproc and --interface, if these are given."
        return f"{launch} -- {shlex.join(kept[2:])}\n{each}"
    return shlex.join([*_launcher(), *kept])


def _launcher() -> list[str]:
    """Returns a command that starts the ranks, without arguments. It is the original one if that is known."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        words = []
    if _MODULE in words and words[words.index(_MODULE) - 1] == "-m":
        words = words[: words.index(_MODULE) + 1]
        # A script's interpreter stands in front of the script.
        return words[1:] if len(words) > 1 and words[1].endswith("torchrun") else words
    return ["torchtitan-grpo", "train", "--nproc", os.environ.get("LOCAL_WORLD_SIZE", "1")]
