# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Upstream's checkpoint manager, with checkpoints that are whole or absent, and failure reports.

Upstream ends the run at a failed save, though the disk may have room at the next one.
"""

import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from torchtitan.grpo.config.frame import Checkpoint
from torchtitan.grpo.resume.checkpoint_files import (
    METADATA_FILE,
    CheckpointWriter,
    is_whole,
    whole_steps,
)
from torchtitan.grpo.rollout.saved import file_of
from torchtitan.grpo.system.disk_failures import describe_failure
from torchtitan.grpo.system.errors import LAST_SAVE_FAILED, RunError
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.upstream.checkpoint import AsyncMode, CheckpointManager, manager_arguments
from torchtitan.grpo.upstream.parallelism import GarbageCollection

# A save that holds up training for this share of the time since the last one is reported.
_SLOW_SHARE = 0.2
_SLOW_SECONDS = 5.0
_NONE_FOLLOWS = "It was to be the last one: the run ends without it."


class SaveFailed(RunError):
    """A checkpoint could not be written, which ends the run (``checkpoint.save_failure``)."""


class LastSaveFailed(SaveFailed):
    """A run has taken all its steps, but its last checkpoint could not be written."""

    exit_status = LAST_SAVE_FAILED


class GRPOCheckpointManager(CheckpointManager):
    """Upstream's manager, with failure reports. ``missing`` says why the newest checkpoint failed, if so."""

    missing: str | None = None
    _saving: str | None = None
    _is_told = _is_slow_told = False
    _then: str | None = None  # what follows a failed save; None while training goes on
    _last_save_at: float | None = None

    def __init__(self, settings: Checkpoint, dump_folder: str, **parts: Any) -> None:
        """``parts`` are upstream's: model parts, optimizers, schedules, states, and the adapter."""
        # Upstream's 0.3 makes none of them if checkpoints are not enabled.
        self.states, self.save_future, self.exclude_from_loading = parts["states"], None, []
        super().__init__(
            dataloader=None, base_folder=dump_folder, **manager_arguments(settings), **parts
        )
        self.settings, self.dump_folder = settings, dump_folder
        if self.enable:  # once: a folder that is removed later is not made again
            Path(self.folder).parent.mkdir(parents=True, exist_ok=True)

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Saves a checkpoint if one is due, and warns if saving holds up training for long."""
        if not self.enable or not self._should_save(curr_step, last_step):
            return
        begin = time.monotonic()
        self._then = "The next one is written now."
        self._async_wait()
        self._then = _NONE_FOLLOWS if last_step else None
        super().save(curr_step, last_step)
        now = time.monotonic()
        if self._last_save_at is not None and not last_step:
            self._tell_if_slow(curr_step, now - begin, begin - self._last_save_at)
        self._last_save_at = now

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        self._saving, self._is_told, self.missing = checkpoint_id, False, None
        try:
            if to_hf:
                return super().dcp_save(
                    state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
                )
            writer = CheckpointWriter(checkpoint_id)
            if async_mode == AsyncMode.DISABLED:
                dcp.save(state_dict, storage_writer=writer)
                if enable_garbage_collection:
                    GarbageCollection.collect("GC collection invoked by checkpointer.")
                return None
            arguments: dict[str, Any] = {"storage_writer": writer, "process_group": self.pg}
            if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
                arguments |= {
                    "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
                    "async_stager": self.stager,
                }
            return dcp.async_save(state_dict, **arguments)
        except CheckpointException as error:  # the same on all ranks
            self._end_failed(error)
            done: Future[None] = Future()
            done.set_result(None)
            is_pinned = async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
            return AsyncSaveResponse(done, done) if is_pinned else done

    def maybe_wait_for_staging(self) -> None:
        """Called in each step: waits for staging, and reports a failure of a save in the background."""
        super().maybe_wait_for_staging()
        future = cast(Future | None, self.save_future) if self.enable else None
        if future is not None and future.done() and (error := future.exception()) is not None:
            self._tell_failure(self._describe_failure(error))

    def finish(self) -> None:
        """Waits for what is still being written; nothing is saved afterwards. Collective."""
        self._then = _NONE_FOLLOWS
        if self.enable:
            self._async_wait()

    def raise_if_missing(self) -> None:
        """Raises :class:`LastSaveFailed` if the newest checkpoint was not written. Collective."""
        self.finish()
        if self.missing is not None:
            raise LastSaveFailed(
                f"{self.missing} The run has taken all its steps, but cannot be resumed from the last "
                "one. Make room, or correct job.dump_folder, and start again: the steps since the "
                "newest whole checkpoint are then taken again."
            )

    def _async_wait(self) -> None:
        future, self.save_future = cast(Future | None, self.save_future), None
        if future is None:
            return
        try:
            future.result()
        except CheckpointException as error:
            self._end_failed(error)

    _wait_for_saving = _async_wait  # as 0.3 calls it

    def _tell_failure(self, failure: str) -> None:
        if not self._is_told and dist.get_rank() == 0:
            if self.settings.save_failure == "stop":
                then = "The run ends with the next checkpoint."
            else:
                then = self._then or (
                    "Training goes on and saves again after checkpoint.interval = "
                    f'{self.interval} steps; checkpoint.save_failure = "stop" would end it.'
                )
            logger.error(f"{failure} {then}")
        self._is_told = True

    def _describe_failure(self, error: BaseException) -> str:
        kept = "There is no whole checkpoint."
        if whole := whole_steps(Path(self.folder)):
            kept = f"The newest whole checkpoint is that of step {whole[-1]}."
        causes = [error]
        if isinstance(error, CheckpointException):
            causes = [wrapped[0] for wrapped in error.failures.values()]
        reason = describe_failure(causes, Path(self.folder))
        return f"The checkpoint {self._saving} could not be written: {reason}. {kept}"

    def _end_failed(self, error: BaseException) -> None:
        """Removes the remains of a failed save. Reports the failure, or raises SaveFailed if so configured."""
        # Described first: what is removed gives room.
        self.missing = self._describe_failure(error)
        if dist.get_rank() == 0 and self._saving and not is_whole(Path(self._saving)):
            shutil.rmtree(self._saving, ignore_errors=True)
            self.discard_rollouts()
        if self.settings.save_failure == "stop":
            raise SaveFailed(
                f'{self.missing} The run ends, because checkpoint.save_failure is "stop". '
                "Make room, or correct job.dump_folder, and start again to go on from that one."
            ) from error
        self._tell_failure(self.missing)

    def discard_rollouts(self) -> None:
        """Removes the rollouts that were saved for a checkpoint whose own save failed."""
        if self._saving is not None:
            step = int(Path(self._saving).name.removeprefix("step-"))
            file_of(self.dump_folder, step).unlink(missing_ok=True)

    def _tell_if_slow(self, step: int, seconds: float, since_last: float) -> None:
        if self._is_slow_told or dist.get_rank() != 0:
            return
        if seconds > max(_SLOW_SECONDS, _SLOW_SHARE * since_last):
            self._is_slow_told = True
            remedy = "" if self.async_mode != AsyncMode.DISABLED else (
                ', or let it be written while training goes on (checkpoint.async_mode = "async")'
            )  # fmt: skip
            logger.warning(
                f"The checkpoint of step {step} held up training for {seconds:.1f} s, after "
                f"{since_last:.1f} s of training. The disk of {self.folder} is slow for so many "
                f"checkpoints: raise checkpoint.interval{remedy}."
            )

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k <= 0 or dist.get_rank() != 0 or self.purge_thread is None:
            return
        for step in whole_steps(Path(self.folder))[: -self.keep_latest_k]:
            folder = Path(self.folder, f"step-{step}")
            # Not whole any more from here on, however far its removal gets.
            (folder / METADATA_FILE).unlink(missing_ok=True)
            self.purge_queue.put(str(folder))
