# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the programs of episodes: a process for each, or functions in worker processes.

The process of a program is killed together with everything in its session when its episode ends.
"""

import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Protocol

from torchtitan.grpo.config import Agent, Rollout, Workers
from torchtitan.grpo.config.environments import own_key
from torchtitan.grpo.rewards.reward_calls import LARGEST_REWARD
from torchtitan.grpo.rollout.agents.function_worker import (
    Ended,
    LoadEnvironment,
    LoadFunction,
    Run,
    decode_reply,
)
from torchtitan.grpo.rollout.environments.protocol import EnvironmentFailed, EnvironmentsFailing
from torchtitan.grpo.system.child import child_command
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.channel import NotPlainData, Refused, not_passed
from torchtitan.grpo.workers.host import Cancelled
from torchtitan.grpo.workers.owner import OUTPUT_HINT, CallFailed, FailureLimit, WorkerOwner
from torchtitan.grpo.workers.pool import Worker, WorkerPool
from torchtitan.grpo.workers.process import limits_of, worker_environment

logger = logging.getLogger(__name__)

MODEL = "policy"
"""Name of the model. Requests of programs may also lack it or give another one."""

REWARD = f"a number between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}"

_MAX_OUTPUT, _MOST_PRINTED = 2**20, 2**26  # that are read, and after which a program is ended
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Access:
    """The URL and the key with which the program of one episode reaches the model."""

    base_url: str
    key: str
    episode: str

    def variables(self) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": MODEL,
            "GRPO_EPISODE": self.episode,
        }


class Programs(Protocol):
    """Runs one program for each episode."""

    @property
    def limit(self) -> FailureLimit:
        """Counts failed episodes, and stops the run if too many in a row have failed."""
        ...

    async def start(self) -> None: ...

    async def run(self, prompt: Prompt, access: Access) -> Any:
        """Runs a program and returns its result. Cancelling the call ends the program.

        Raises EnvironmentFailed if the program failed, and WorkerLost if the episode may begin again.
        """
        ...

    async def close(self) -> None: ...


def make_programs(
    agent: Agent, rollout: Rollout, workers: Workers, on_failure: Any, environment: str = ""
) -> Programs:
    if agent.function is not None:
        return Functions(agent, rollout, workers, on_failure, environment)
    return Commands(agent, rollout, workers, on_failure, environment)


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The data that a program receives: the columns of its row, and the prompt as ``prompt``."""
    return {**prompt.columns, "prompt": prompt.text}


class Commands:
    """Runs ``agent.command``, with a process for each episode."""

    def __init__(
        self, agent: Agent, rollout: Rollout, workers: Workers, on_failure: Any, environment: str
    ) -> None:
        self._command, self._workers = agent.command, workers
        most = rollout.max_consecutive_failures, "rollout.max_consecutive_failures"
        self._key = own_key(environment, "agent.command")
        calls = f"episodes of {self._key} in a row failed"
        self.limit = FailureLimit(calls, most, EnvironmentsFailing, on_failure)
        self._has_told_end = False

    async def start(self) -> None:
        program, path = self._command[0], self._environment().get("PATH")
        if shutil.which(program, path=path) is None:
            raise EnvironmentsFailing(
                f"{self._key} must begin with a program that can be run, in PATH or as a path, got "
                f"{program!r} in {os.getcwd()}."
            )

    async def run(self, prompt: Prompt, access: Access) -> Any:
        try:
            row = json.dumps(row_of(prompt), allow_nan=True)
        except (TypeError, ValueError) as error:
            message = not_passed(prompt, prompt.columns, self._key, NotPlainData(str(error)))
            raise EnvironmentFailed("column", message) from error
        with contextlib.ExitStack() as files:
            process, output = await self._start(access, row, files)
            try:
                status = await self._ended(process, output)
            finally:
                # Also what the program has left behind.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            output.seek(max(output.seek(0, os.SEEK_END) - _MAX_OUTPUT, 0))
            printed = output.read()
        if status != 0:
            raise EnvironmentFailed(
                f"exit status {status}",
                f"{self._key} {self._command} ended with exit status {status}. {OUTPUT_HINT}",
            )
        return self._reward(printed)

    async def _ended(self, process: asyncio.subprocess.Process, output: IO[bytes]) -> int:
        """Returns the exit status, or raises EnvironmentFailed as soon as too much is printed."""
        while (size := os.fstat(output.fileno()).st_size) <= _MOST_PRINTED:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(process.wait(), _LOOK_SECONDS)
        raise EnvironmentFailed(
            "much output",
            f"{self._key} {self._command} was ended: it may print at most {_MOST_PRINTED >> 20} MiB to "
            f"standard output, and has printed {size >> 20}. Let it print less, or to standard error.",
        )

    def _reward(self, printed: bytes) -> Any:
        """Returns the value of the last line of output if that is JSON and no string, else None."""
        line = (printed.decode(errors="replace").strip().splitlines() or [""])[-1]
        with contextlib.suppress(ValueError, RecursionError):
            if not isinstance(value := json.loads(line), str):
                return value
        if not self._has_told_end:
            self._has_told_end = True
            logger.info(
                "The last line of output of an episode of %s is no reward, which is a number or "
                'JSON such as {"reward": 1.0}: %.200r', self._key, line,
            )  # fmt: skip
        return None

    async def close(self) -> None:
        pass

    async def _start(
        self, access: Access, row: str, files: contextlib.ExitStack
    ) -> tuple[asyncio.subprocess.Process, IO[bytes]]:
        """Starts a program. Returns its process and the file that receives its output.

        Files are used instead of pipes because a program need not read its row from standard input,
        a pipe holds little, and processes that the program leaves behind would keep a pipe open.
        """
        environment = self._environment() | access.variables()
        try:
            given = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            printed = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            # Appended, because a program that opens /dev/stdout empties the file.
            fcntl.fcntl(printed, fcntl.F_SETFL, os.O_APPEND)
            given.write(row.encode() + b"\n")
            given.seek(0)
            command, limits = self._command, limits_of(self._workers)
            if limits:
                command = child_command(command, environment, signal.SIGKILL, limits)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=given, stdout=printed, start_new_session=True, env=environment
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise EnvironmentFailed(
                "start", f"{self._key} {self._command} cannot be started: {error}."
            ) from error
        return process, printed

    def _environment(self) -> dict[str, str]:
        return worker_environment(self._workers.pass_variables)


class EpisodeWorkers(WorkerPool[Ended | Cancelled]):
    """The processes of `function_worker`, each of which runs many episodes at the same time.

    ``key`` is the setting that names the user's code, and ``name`` is its value. ``limit`` raises
    EnvironmentsFailing if too many episodes in a row have failed.
    """

    def __init__(
        self,
        load: LoadFunction | LoadEnvironment,
        number: int,
        key: str,
        name: str,
        *,
        timeout_seconds: tuple[float, str],
        rollout: Rollout,
        workers: Workers,
        on_failure: Callable[[CallFailed], object],
    ) -> None:
        self.key = key
        self.limit = owner = WorkerOwner(
            "torchtitan.grpo.rollout.agents.function_worker",
            decode_reply,
            load,
            subject=f"{key} {name!r}",
            calls=f"episodes of {key} in a row failed",
            error=EnvironmentsFailing,
            timeout_seconds=timeout_seconds,
            most_failures=(rollout.max_consecutive_failures, "rollout.max_consecutive_failures"),
            workers=workers,
            on_failure=on_failure,
        )
        super().__init__(owner, number)
        self._numbers = itertools.count()
        self.close = owner.close

    async def run(
        self, worker: Worker[Ended | Cancelled], row: dict[str, Any], variables: Mapping[str, str]
    ) -> Ended | Refused:
        reply = await self.call(worker, Run(next(self._numbers), row, dict(variables)))
        assert not isinstance(reply, Cancelled), "a call that is cancelled is not answered"
        return reply


class Functions:
    """Runs ``agent.function``, with many episodes in each worker process."""

    def __init__(
        self, agent: Agent, rollout: Rollout, workers: Workers, on_failure: Any, environment: str
    ) -> None:
        assert agent.function is not None, "agent.function must be set"
        self._workers = EpisodeWorkers(
            LoadFunction(agent.function, agent.options),
            agent.workers,
            own_key(environment, "agent.function"),
            agent.function,
            timeout_seconds=(agent.timeout_seconds, "agent.timeout_seconds"),
            rollout=rollout,
            workers=workers,
            on_failure=on_failure,
        )
        self.limit = self._workers.limit

    async def start(self) -> None:
        await self._workers.start()

    async def run(self, prompt: Prompt, access: Access) -> Any:
        key, worker = self._workers.key, await self._workers.enter()
        try:
            reply = await self._workers.run(worker, row_of(prompt), access.variables())
        except NotPlainData as error:
            message = not_passed(prompt, prompt.columns, key, error)
            raise EnvironmentFailed("column", message) from error
        finally:
            await self._workers.leave(worker)
        if isinstance(reply, Refused):
            raise EnvironmentFailed(reply.kind, f"{key}: {reply.message}")
        return reply.result

    async def close(self) -> None:
        await self._workers.close()


def reward_of(result: Any) -> float | None:
    """Returns the reward in a program's result, perhaps None. Raises EnvironmentFailed if it is invalid."""
    value = result.get("reward") if isinstance(result, dict) else result
    if value is None:
        return None
    if (reward := finite_number(value)) is None:
        raise EnvironmentFailed(
            "bad reward", f"An agent's reward must be {REWARD} or None, got {value!r:.100}."
        )
    return reward


def finite_number(value: Any) -> float | None:
    """Returns a number as a float, or None if it is not a number or too large for a reward."""
    is_reward = isinstance(value, int | float) and abs(value) <= LARGEST_REWARD
    return float(value) if is_reward else None
