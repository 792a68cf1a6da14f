# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides how a run starts, anew or from a checkpoint, and describes settings that have changed since.

:func:`choose_start` only reads files, so that every rank and a dry run come to the same decision.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.resume.checkpoint_files import quick_problem, whole_steps
from torchtitan.grpo.resume.kept_record import (
    Change,
    CheckpointDamaged,
    CheckpointError,
    RunRecord,
    asks_for_another_rate,
    changes,
    invalidates_rollouts,
    model_refusal,
    read_kept,
    record_of,
    refusal,
    states_in,
)
from torchtitan.grpo.run_folder.contents import describe_run, next_free_folder
from torchtitan.grpo.system.files import damaged_files
from torchtitan.grpo.training.lr_schedule import describe_shortened, schedule_of


@dataclass(frozen=True)
class Start:
    record: RunRecord  # of this run, for its checkpoints
    step: int = 0  # number of steps taken
    folder: Path | None = None  # the checkpoint from which it resumes; None if it begins anew
    kept: RunRecord | None = None  # that of the checkpoint
    changes: list[Change] = field(default_factory=list)
    newer_steps: list[int] = field(default_factory=list)  # of checkpoints in the same folder
    damaged: dict[int, str] = field(default_factory=dict)  # newer checkpoints, by their steps
    goes_on: bool = False  # what the folder holds was written by this run

    @property
    def unusable_because(self) -> list[str]:
        return invalidates_rollouts(self.changes)


def choose_start(
    config: JobConfig,
    model: HFModel,
    damaged: Mapping[int, str] | None = None,
    *,
    goes_on: bool = False,
) -> Start:
    """Decides from the files whether a run is new, or from which undamaged checkpoint it starts.

    With ``goes_on``, the folder was written by earlier ranks of this same run: it is then not replaced,
    even with ``job.overwrite``, and is no reason to refuse. Raises CheckpointError if this run would
    overwrite another one, or if it cannot resume, for instance because of a changed setting.
    """
    found = dict(damaged or {})
    while True:
        replaces = config.job.overwrite and not goes_on
        folder = checkpoint_folder(config, found, is_new=replaces)
        if folder is None:
            if not goes_on:
                check_new_run(config)
            return Start(_own_record(config, model), goes_on=goes_on)
        try:
            return _start_from(folder, config, model, found)
        except CheckpointDamaged as error:
            own = Path(config.job.dump_folder) / config.checkpoint.folder
            if config.checkpoint.load_step != -1 or folder.parent != own:
                raise  # the user has named this checkpoint
            found[int(folder.name.removeprefix("step-"))] = error.reason


def _start_from(folder: Path, config: JobConfig, model: HFModel, damaged: dict[int, str]) -> Start:
    if problem := quick_problem(folder):
        raise CheckpointDamaged(folder, problem)
    states = states_in(folder)
    needs_reference = config.grpo.kl_coef > 0 and config.grpo.ref_model_ema > 0
    check_whole(folder, states, needs_reference=needs_reference, needs_critic=config.has_critic)
    step, kept = read_kept(folder, states)
    record = _own_record(config, model)
    newer = [n for n in whole_steps(folder.parent) if n > step and n not in damaged]
    if kept is None:
        return Start(record, step, folder, newer_steps=newer, damaged=damaged)
    found = changes(kept, config, record.num_ranks)
    for problem in (
        model_refusal(kept, record, model.path),
        *(refusal(change, kept, config) for change in found),
    ):
        if problem is not None:
            raise CheckpointError(problem)
    if config.lr_scheduler.total_steps is None and not asks_for_another_rate(found):
        record.schedule_steps = kept.schedule_steps
    # The directory may have moved; the digest of the weights with which the run began stays, and so
    # does the day.
    record.weights, record.date = kept.weights or record.weights, kept.date or record.date
    return Start(record, step, folder, kept, found, newer, damaged)


def _own_record(config: JobConfig, model: HFModel) -> RunRecord:
    total = config.lr_scheduler.total_steps
    return record_of(config, model, config.training.steps if total is None else total)


def checkpoint_folder(
    config: JobConfig, damaged: Mapping[int, str] | None = None, *, is_new: bool = False
) -> Path | None:
    """Returns the checkpoint from which a run resumes, or None if it begins anew.

    As in torchtitan, this is the checkpoint of ``checkpoint.load_step`` or else the newest one. If there
    is none, it is ``checkpoint.initial_load_path``, unless only the model is loaded from there.
    Checkpoints in ``damaged`` are ignored; with ``is_new``, so are all in the run's folder.
    """
    settings = config.checkpoint
    if not settings.enable:
        return None
    folder = Path(config.job.dump_folder) / settings.folder
    steps = [] if is_new else whole_steps(folder)
    if not steps and settings.load_step == -1:
        path, whole = settings.initial_load_path, not settings.initial_load_model_only
        return Path(path) if path and whole and Path(path).is_dir() else None
    if settings.load_step == -1:
        usable = [step for step in steps if step not in (damaged or {})]
        if usable:
            return folder / f"step-{usable[-1]}"
        reasons = "; ".join(f"step {step}: {why}" for step, why in (damaged or {}).items())
        raise CheckpointError(
            f"A run must resume from a whole checkpoint, and all in {folder} are damaged ({reasons}). "
            "Bring one back, or choose another job.dump_folder to start a new run."
        )
    if settings.load_step not in steps:
        raise CheckpointError(
            f"checkpoint.load_step must be the step of a checkpoint in {folder}, got "
            f"{settings.load_step}. There is {_listed(steps)}."
        )
    return folder / f"step-{settings.load_step}"


def _listed(steps: list[int]) -> str:
    return ", ".join(f"step {step}" for step in steps) or "none"


def check_whole(
    folder: Path, states: set[str], *, needs_reference: bool, needs_critic: bool = False
) -> None:
    """Raises CheckpointError if a checkpoint lacks the training state, a needed reference, or the critic."""
    if "train_state" not in states:
        raise CheckpointError(
            f"A run must resume from a whole checkpoint, got {folder}, which holds the model "
            "alone, as the last checkpoint of a run with checkpoint.last_save_model_only does. Set "
            "checkpoint.load_step to an earlier step in that folder, or choose another "
            "job.dump_folder to start a new run."
        )
    if needs_reference and "reference" not in states:
        raise CheckpointError(
            "A run with grpo.ref_model_ema above 0 must resume from a checkpoint that holds its "
            f"reference model, got {folder}, which was written without one. Set "
            "grpo.ref_model_ema = 0, or choose another job.dump_folder to start a new run."
        )
    if needs_critic and "critic" not in states:
        raise CheckpointError(
            'A run with grpo.advantage = "gae" must resume from a checkpoint that holds its critic, got '
            f"{folder}, which was written without one. Choose another grpo.advantage, or another "
            "job.dump_folder to start a new run from an export (--model.hf_assets_path)."
        )


def check_new_run(config: JobConfig) -> None:
    earlier = None if config.job.overwrite else describe_run(config)
    if earlier is None:
        return
    folder = Path(config.job.dump_folder)
    resumes = ""
    if not config.checkpoint.enable and whole_steps(folder / config.checkpoint.folder):
        resumes = "--checkpoint.enable to go on from its newest checkpoint, "
    raise CheckpointError(
        f"job.dump_folder must not hold an earlier run, got {folder}, with {earlier}, which this "
        f"run would write over. Add {resumes}--job.dump_folder "
        f"{next_free_folder(config.job.dump_folder)} to keep it, or --job.overwrite to remove it "
        "first."
    )


def is_finished(config: JobConfig, start: Start) -> bool:
    folder = Path(config.job.dump_folder)
    export = folder / "hf" / f"step-{start.step}"
    ended = export.is_dir() and (folder / "summary.json").is_file()
    if start.folder is None or start.step < config.training.steps or not ended:
        return False
    # One that was damaged is exported again. Text may have been edited, such as a chat template.
    return not any(damaged_files(export, is_wanted=lambda name, _: name.endswith(".safetensors")))


def describe_finished(config: JobConfig, start: Start) -> str:
    return (
        f"The run in {config.job.dump_folder} is finished: it has taken {start.step} steps, and "
        f"training.steps is {config.training.steps}. To go on, add --training.steps "
        f"{2 * start.step}."
    )


def describe_start(config: JobConfig, start: Start) -> Iterator[str]:
    earlier = describe_run(config)
    is_replaced = earlier is not None and config.job.overwrite and not start.goes_on
    if start.folder is None and earlier and start.goes_on:
        yield f"Begins anew in {config.job.dump_folder}, with step 1: there is no checkpoint."
    elif start.folder is None or is_replaced:
        removed = f", where {earlier} will be removed (job.overwrite) after the first step"
        yield f"A new run in {config.job.dump_folder}{removed if is_replaced else ''}."
    if start.folder is not None:
        yield from _describe_resumed(start)
    if used := describe_shortened(config.lr_scheduler, start.record.schedule_steps):
        yield f"  {used}"
    yield from _describe_rate(config, start)


def _describe_resumed(start: Start) -> Iterator[str]:
    for step, reason in sorted(start.damaged.items()):
        yield (
            f"The checkpoint of step {step} is damaged and is not used ({reason}). It is replaced when "
            "the run reaches that step again."
        )
    yield f"Resumes after step {start.step} from {start.folder}."
    if start.newer_steps:
        yield (
            f"Newer checkpoints stay in that folder ({_listed(start.newer_steps)}): they belong to "
            "steps that this run takes again. Remove them, or name checkpoint.load_step whenever "
            "you resume."
        )
    if start.kept is None:
        yield (
            "The checkpoint was written without a record of its run's settings, so that changes "
            "cannot be listed. All settings are those of this start."
        )
    for change in start.changes:
        yield f"  {change.describe(start.step + 1)}"
    if keys := start.unusable_because:
        yield (
            "  Rollouts kept beside the checkpoint were made under the old "
            f"{' and '.join(keys)}. They are not used; their prompts are sampled again."
        )


def _describe_rate(config: JobConfig, start: Start) -> Iterator[str]:
    """Yields a note that a changed ``training.steps`` alone does not change the learning-rate schedule."""
    kept, steps, rate = start.record.schedule_steps, config.training.steps, config.optimizer.lr
    if config.lr_scheduler.total_steps is not None or kept == steps or start.step >= steps:
        return
    held, anew = (schedule_of(config.lr_scheduler, n) for n in (kept, steps))
    if all(held(n) == anew(n) for n in range(start.step, steps)):
        return
    end = f" and holds {rate * held(steps):.3g} after it" if steps > kept else ""
    yield (
        f"  The learning rate goes on without a jump ({rate * held(start.step):.3g} in step "
        f"{start.step + 1}): its schedule stays laid over {kept} steps{end}. Add "
        f"--lr_scheduler.total_steps {steps} to lay it over all steps "
        f"({rate * anew(start.step):.3g} in step {start.step + 1})."
    )
