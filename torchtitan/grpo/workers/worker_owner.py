# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts worker processes, has them load the user's code, and kills them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torchtitan.grpo.workers.frames import Refused
from torchtitan.grpo.workers.surroundings import Surroundings
from torchtitan.grpo.workers.worker_process import WorkerLost, WorkerProcess

Reply = TypeVar("Reply")

LOAD_FACTOR = 10
"""Loading may take this many times the limit of one call: user code imports large libraries and
reads files, above all in the first seconds of a run, when everything else starts as well."""

OUTPUT_HINT = "Its output is in rollout_process.log."


class LoadFailed(RuntimeError):
    """A worker could not load the user's code, so the run cannot continue."""


@dataclass(frozen=True)
class WorkerProgram(Generic[Reply]):
    """Describes the program that worker processes run.

    Attributes:
        module: Module that each process runs as ``__main__``.
        decode_reply: Decodes the body of a reply.
        load: First request of each process: it loads the user's code.
        subject: What is loaded, for messages, such as ``rollout.environment 'calculator'``.
        timeout_setting: TOML key of ``timeout_seconds``, for messages.
        timeout_seconds: Time limit of one call. Loading may take ``LOAD_FACTOR`` times as long.
        surroundings: Environment variables and limits of each process.
    """

    module: str
    decode_reply: Callable[[bytes], Reply | Refused]
    load: Any
    subject: str
    timeout_setting: str
    timeout_seconds: float
    surroundings: Surroundings = field(default_factory=Surroundings)


class WorkerOwner(Generic[Reply]):
    """Owns the running worker processes of one program.

    Args:
        program: What the processes run.
    """

    def __init__(self, program: WorkerProgram[Reply]) -> None:
        self.program = program
        self._running: set[WorkerProcess[Reply | Refused]] = set()
        self._is_closed = False

    async def start(
        self, on_end: Callable[[WorkerLost], None] = lambda reason: None
    ) -> tuple[WorkerProcess[Reply | Refused], Reply]:
        """Starts a process and has it load the user's code.

        Args:
            on_end: Called once, when the process has ended, with the reason.

        Returns:
            The process, and its reply to the load request.

        Raises:
            LoadFailed: If the user's code cannot be loaded, or not in time.
            WorkerLost: If the owner is closed.
        """
        if self._is_closed:
            raise WorkerLost("No worker process is started any more: the run is ending.")

        def ended(reason: WorkerLost) -> None:
            self._running.discard(process)
            on_end(reason)

        program = self.program
        process = WorkerProcess(program.module, program.decode_reply, ended, program.surroundings)
        self._running.add(process)
        try:
            await process.start()
            return process, await self._load(process)
        except BaseException:
            await process.kill()
            raise

    async def close(self) -> None:
        """Kills all processes, and starts no more. It is idempotent."""
        self._is_closed = True
        for process in list(self._running):
            await process.kill()

    async def _load(self, process: WorkerProcess[Reply | Refused]) -> Reply:
        program = self.program
        seconds = LOAD_FACTOR * program.timeout_seconds
        try:
            reply = await process.call_or_kill(program.load, seconds)
        except TimeoutError as error:
            raise LoadFailed(
                f"Importing {program.subject} took longer than {seconds:g} s, {LOAD_FACTOR} times "
                f"{program.timeout_setting}. Import less, or raise {program.timeout_setting}."
            ) from error
        except WorkerLost as error:
            if self._is_closed:
                raise
            raise LoadFailed(
                f"Importing {program.subject} ended the worker process: {error} {OUTPUT_HINT}"
            ) from error
        if isinstance(reply, Refused):
            raise LoadFailed(reply.message)
        return reply
