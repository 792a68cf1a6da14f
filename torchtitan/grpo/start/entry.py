# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a training rank from its command line to its exit status.

A user's mistake or an external failure is reported once, in one line. Only bugs show a traceback.
"""

import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.grpo.config.command_line.help_page import help_words, page
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import check_model, load_config
from torchtitan.grpo.data.feed import RankZeroFailed
from torchtitan.grpo.inference.kinds import take_nccl_setting_of
from torchtitan.grpo.models.hf_config import (
    HFModel,
    check_critic_model,
    check_reference,
    read_hf_model,
)
from torchtitan.grpo.models.hub import locate_models
from torchtitan.grpo.observe.console import init_console
from torchtitan.grpo.observe.events import events
from torchtitan.grpo.resume.checkpoint import RunFinished
from torchtitan.grpo.resume.resumption import (
    choose_start,
    describe_finished,
    describe_start,
    is_finished,
)
from torchtitan.grpo.run_folder.folder import RunFolder, check_folder, describe_folder
from torchtitan.grpo.start.dry_run import dry_run
from torchtitan.grpo.start.known_failures import known_failure
from torchtitan.grpo.start.lost_rank import LostRankHandler
from torchtitan.grpo.start.train import SETTINGS_FLAG
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.child import die_with_parent
from torchtitan.grpo.system.device import choose_interfaces
from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.logs import logger, outlive_readers
from torchtitan.grpo.system.process_tuning import require_open_files
from torchtitan.grpo.system.rank_channel import RankChannel, RankLost
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo.system.store_rounds import separate_rounds
from torchtitan.grpo.system.strict_json import Found
from torchtitan.grpo.training.frame import Trainer
from torchtitan.grpo.training.lent_memory import check_lent_memory
from torchtitan.grpo.training.model_spec import check_weights
from torchtitan.grpo.weight_wire.process_group import limit_communicators

_DRY_RUN = "--dry-run"
# Longer than rank 0 takes to report an error and to close.
_RANK_ZERO_PATIENCE_SECONDS = 15.0
# Longer than torchrun takes to stop all ranks after one of them has ended.
_AGENT_PATIENCE_SECONDS = 5.0
# A collective with a dead rank may fail, or torchrun stop this one, before the channel sees that.
_LOSS_PATIENCE_SECONDS = 1.0


TrainerFactory = Callable[[JobConfig, HFModel, StopRequest, RankChannel], Trainer]


def run(make_trainer: TrainerFactory, args: Sequence[str]) -> int:
    """Checks the configuration, trains, and returns the exit status of the process.

    The status is 0 after a complete run, 1 after a failure, 2 for an unusable configuration or model, 3 if
    a guard stopped the run, 4 if its last checkpoint failed, and 128 plus a signal's number if that stopped it.
    """
    args = list(args)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A rank that hangs before it watches torchrun, such as in opening a file, ends with it.
        die_with_parent()
    is_rank_zero = int(os.environ.get("RANK", "0")) == 0
    if (words := help_words(args)) is not None:
        if is_rank_zero:
            print(page(JobConfig, words))
        return 0
    try:
        if _DRY_RUN in args:
            if not is_rank_zero:
                return 0
            kept = [word for word in args if word not in (_DRY_RUN, SETTINGS_FLAG)]
            return check_only(kept, {}, shows_settings=SETTINGS_FLAG in args)
        config, model, notes = _open(args, weights=True)
    except (RunError, TimeoutError) as error:
        return _report(is_rank_zero, error, 2)
    if is_rank_zero:
        print(*notes, sep="\n", end="\n" if notes else "", flush=True)
        return _train_in_folder(make_trainer, config, model)
    # The others meet rank 0 in `find_start`.
    return _train(make_trainer, config, model, is_rank_zero=False)


def _open(args: list[str], *, weights: bool) -> tuple[JobConfig, HFModel, list[str]]:
    """Returns the configuration and its model, both checked, and notes for the user."""
    config = load_config(args)
    require_open_files()
    notes = locate_models(config, weights=weights)
    model = read_hf_model(config.model.hf_assets_path)
    check_model(config, model)
    check_lent_memory(config, model)
    if config.grpo.kl_coef > 0:
        check_reference(config)
    if config.has_critic:
        check_critic_model(config)
    return config, model, notes


def check_only(args: list[str], found: Found, *, shows_settings: bool) -> int:
    """Prints the :func:`findings` about a run, and returns the exit status."""
    status, lines = findings(args, found, shows_settings=shows_settings)
    for line in lines:
        print(line, flush=True)
    return status


def findings(args: list[str], found: Found, *, shows_settings: bool) -> tuple[int, Iterator[str]]:
    """Returns an exit status and lines about inputs and layout; ``shows_settings`` adds the settings.

    The status is 2 if the run would be refused only because of its folder. Any other reason raises
    RunError, here or in the iterator. What the lines tell is put into ``found``.
    """
    config, model, notes = _open(args, weights=False)
    status, date = 0, ""
    try:
        check_folder(config)
        start = choose_start(config, model)
        lines, date = [*describe_start(config, start), *describe_folder(config)], start.record.date
    except RunError as error:  # the settings are right, but not the folder
        status, lines = 2, [f"would be refused: {error}"]
        found["error"] = str(error)
    init_console("error", is_rank_zero=True)
    checked = dry_run(config, model, lines, found, date, shows_settings=shows_settings)
    return status, itertools.chain(notes, checked)


def _train_in_folder(make_trainer: TrainerFactory, config: JobConfig, hf_model: HFModel) -> int:
    """On rank 0, locks the run's folder before any rank writes to it, and then trains."""
    status = 1
    try:
        folder = RunFolder(config)
    except RunError as error:
        return _report(True, error, 2)
    try:
        start = choose_start(config, hf_model, goes_on=folder.is_restart)
        if folder.is_restart:
            print("The ranks were started again.", *describe_start(config, start), flush=True)
        if is_finished(config, start):
            print(describe_finished(config, start), flush=True)
        else:
            # Unusable weights are refused before anything of an earlier run is moved.
            if start.folder is None or config.lora.rank:  # else a checkpoint brings them
                for note in check_weights(config, hf_model)[1]:
                    print(f"warning: {note}", flush=True)
                    events.add("warning", note)
            folder.begin()
            events.folder = Path(config.job.dump_folder)
        status = _train(make_trainer, config, hf_model, is_rank_zero=True)
    except RunError as error:
        status = _report(True, error, 2)
    finally:
        events.close()  # what came after the trainer's end, such as the error that has ended it
        folder.close(failed=status != 0)
    return status


def _train(
    make_trainer: TrainerFactory, config: JobConfig, hf_model: HFModel, is_rank_zero: bool
) -> int:
    init_console(config.observe.log_level, is_rank_zero=is_rank_zero)
    choose_interfaces()
    take_nccl_setting_of(config.inference.kind, config.weight_sync.transport)
    limit_communicators(config.weight_sync.timeout_seconds)
    separate_rounds()
    stop = StopRequest(config.grpo.stop_timeout_seconds)
    # torchrun stops the other ranks once it knows that one has died, which may be before they do.
    handler = LostRankHandler(config, lambda: stop.is_older_than(_LOSS_PATIENCE_SECONDS))
    channel = RankChannel(config.grpo.lost_rank_seconds, handler)
    trainer: Trainer | None = None
    has_failed = True
    try:
        trainer = make_trainer(config, hf_model, stop, channel)
        trainer.train()
        has_failed = False
    except RunFinished:
        has_failed = False  # rank 0 has said so
    except RankLost:
        return 1
    except RankZeroFailed:
        # Rank 0 must report and close first: torchrun ends all ranks once one has ended.
        stop.wait(0 if channel.lost else _RANK_ZERO_PATIENCE_SECONDS)
        return 1
    except (RunError, TimeoutError) as error:
        if channel.lost is not None and getattr(error, "exit_status", None) is None:
            return 1  # the error is a consequence
        return _report(is_rank_zero, error, 1, stop.wait)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        if channel.wait_lost(_LOSS_PATIENCE_SECONDS):
            return 1
        known = known_failure(error, config)
        if known is not None:
            return _report(is_rank_zero, RuntimeError(known), 1, stop.wait)
        # A collective fails if another rank has died. That is not the cause of the failure, and
        # torchrun is about to stop this rank as well.
        if not stop.wait(_AGENT_PATIENCE_SECONDS):
            events.add("error", f"{type(error).__name__}: {error}")
            raise
        name = signal.Signals(stop.exit_code - 128).name
        logger.warning(
            f"{name} stopped this rank. Before that, it had failed: {type(error).__name__}: {error}"
        )
    finally:
        if trainer is not None:
            trainer.close()
        channel.close(failed=has_failed)
    if stop.requested:
        return stop.exit_code
    dist.destroy_process_group()
    return 0


def _report(
    is_rank_zero: bool,
    error: Exception,
    status: int,
    wait: Callable[[float], bool | None] = time.sleep,
) -> int:
    """Prints an error without a traceback and returns its exit status, by default ``status``.

    Rank 0 prints at once. Other ranks first ``wait``, which returns True if the rank is stopped meanwhile.
    If all ranks fail alike, torchrun stops the waiting ones. A rank that fails alone prints after the wait.
    """
    if is_rank_zero or not wait(_RANK_ZERO_PATIENCE_SECONDS):
        print(f"error: {error}", file=sys.stderr, flush=True)
        events.add("error", str(error))
        _tell_torchrun(str(error))
    return getattr(error, "exit_status", None) or status


def _tell_torchrun(message: str) -> None:
    """Leaves a message that torchrun repeats at the end of its report."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    extra = {"timestamp": str(int(time.time()))}
    content = {"message": {"message": message, "extraInfo": extra}}
    # The error has been printed. A directory that is gone must not hide it.
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps(content, allow_nan=False))


def leave(main: Callable[[], int]) -> None:
    """Runs ``main``, which must close everything, and ends the process with the status it returns.

    Python's own cleanup is skipped: it cannot end threads that are in a collective with a dead rank or in a
    broadcast to a stopped server, and it aborts if a gloo thread then releases the last reference to a tensor
    (https://github.com/pytorch/pytorch/issues/190489).
    """
    outlive_readers()
    try:
        status = main()
    except Exception as error:
        traceback.print_exc()
        _tell_torchrun(f"{type(error).__name__}: {error} (its traceback stands above)")
        status = 1
    spans.close_spans()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
