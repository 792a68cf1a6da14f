# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rank 0's end of the connection to the rollout process, without asyncio and torch."""

import contextlib
import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import zmq

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.inference.server_log import log_tail
from torchtitan.grpo.rollout import link_messages
from torchtitan.grpo.rollout.child_process import end_process, start_process
from torchtitan.grpo.rollout.codec import Packed, unpack
from torchtitan.grpo.rollout.results import EvaluationResult, RolloutBatch
from torchtitan.grpo.rollout.server_watch import ServerWatch
from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.private_folders import make_private_folder, remove_private_folder
from torchtitan.grpo.system.waits import Reminders
from torchtitan.grpo.types import RolloutGroup, ServerInfo

_Answer = TypeVar("_Answer")

LOG_FILE = "rollout_process.log"
_PROGRAM = "torchtitan.grpo.rollout.process"

_POLL_MILLISECONDS = 50
_ORDERLY_STOP_SECONDS = 4.0
_KILL_GRACE_SECONDS = 1.0
_LIMITS: dict[type, str] = {  # the settings that limit the waits for answers
    link_messages.Ready: "inference.startup_timeout_seconds and a minute",
    link_messages.Batch: "rollout.batch_timeout_seconds",
    link_messages.EvaluationDone: "evaluation.timeout_seconds",
}


class RolloutFailed(RunError):
    """The rollout process ended or did not answer in time."""


class RolloutKilled(RolloutFailed):
    """The rollout process ended without reporting an error. It can be restarted."""


class RolloutLink:
    """Starts the rollout process, exchanges messages with it, and ends it.

    All methods belong to one thread, except :meth:`notify_version`, :meth:`notify_lost`,
    :meth:`notify_asleep` and :meth:`reread_urls`. After the process has ended, all methods but
    :meth:`reread_urls` and :meth:`close` raise :class:`RolloutFailed`. Methods that wait call their
    argument ``should_stop`` at least every 0.1 s, and stop waiting if it returns true. ``announce`` is
    called with sentences that the user should read now.

    ``watch``, for any thread, exists once the process is started. ``fetch_endpoint`` is where ranks
    fetch rollouts, or ``None`` if rank 0 receives all. ``warnings`` are those of the first start. ``show``
    is called with a progress line and the numbers of completions finished and wanted.
    """

    watch: ServerWatch

    def __init__(
        self, config: RolloutProcessConfig, announce: Callable[[str], None] = print
    ) -> None:
        self._announce = announce
        self._config = config
        self._restarts_left = config.rollout.max_process_restarts
        self._child: subprocess.Popen | None = None
        self._directory: Path | None = None
        self._log = Path(config.dump_folder) / LOG_FILE
        self._context = zmq.Context()
        self._messages: zmq.Socket | None = None
        self._notices: zmq.Socket | None = None
        self._notices_lock = threading.Lock()
        self._is_restarting = False
        self._failure: str | None = None
        self._has_spoken = False
        self._asked_version: int | None = None
        self._wanted_for: int | None = None  # the version whose wait the devices are wanted for
        # The evaluation that was requested and whose result was not taken yet.
        self._awaited: link_messages.Evaluate | None = None
        self._num_requests = 0
        self.fetch_endpoint: str | None = None
        self.show: Callable[[str, int, int], None] = lambda line, done, wanted: None
        self.warnings: list[str] = []
        self._progress = link_messages.Progress("")
        self._stuck_since: float | None = None
        self._dropped_before: Counter[str] = Counter()  # by processes that were killed
        self._dropped: Counter[str] = Counter()
        self._saved: dict[int, int | None] = {}
        self._saves_under_way: Counter[int] = Counter()
        # Answers that arrived while a different answer was expected.
        self._unclaimed: list[tuple[link_messages.Answer, list[bytes]]] = []

    @property
    def dropped(self) -> Counter[str]:
        """Counts of what was dropped in the run so far, by the kinds of :mod:`.drops`."""
        return self._dropped_before + self._dropped

    @property
    def stuck_seconds(self) -> float:
        """How long the process has had no server that takes work, or 0 if it has one."""
        return 0.0 if self._stuck_since is None else time.monotonic() - self._stuck_since

    def start(self) -> None:
        """Starts the process. The calling thread must live as long as the run."""
        assert self._child is None, "the rollout process must be started only once"
        self._launch()
        self.watch = ServerWatch(self._connect(zmq.PULL, link_messages.SERVERS_SOCKET))

    def restart(self, config: RolloutProcessConfig) -> None:
        """Restarts the process after :class:`RolloutKilled`. Call :meth:`wait_ready` next.

        Notices that are sent before the new process is ready are lost. The new process reports all
        servers as new, so the weight pusher attests each of them again.
        """
        assert self._child is not None and self._child.poll() is not None, (
            "the rollout process must have ended before it is restarted"
        )
        if self._restarts_left == 0:
            raise RolloutFailed(
                f"{self._describe_exit()}\nIt is not restarted, because it was already restarted "
                f"{config.rollout.max_process_restarts} times (rollout.max_process_restarts)."
            )
        with self._notices_lock:
            self._is_restarting = True
        self._restarts_left -= 1
        end_process(self._child, self._mark, _KILL_GRACE_SECONDS)
        self._close_sockets()
        self._config = replace(config, incarnation=self._config.incarnation + 1)
        self._failure, self._asked_version, self._progress = None, None, link_messages.Progress("")
        self._dropped_before, self._dropped = self.dropped, Counter()
        self._unclaimed, self._stuck_since = [], None
        self._saves_under_way.clear()
        self._wanted_for = None
        self._launch()
        with self._notices_lock:
            self._is_restarting = False
        self.watch.reconnect(self._connect(zmq.PULL, link_messages.SERVERS_SOCKET))

    def _launch(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._directory = make_private_folder("rollout")
        config_file = self._directory / link_messages.CONFIG_FILE
        # The configuration may contain the servers' keys. The process removes the file once it is read.
        config_file.touch(mode=0o600)
        config_file.write_text(json.dumps(self._config.to_dict(), allow_nan=False))
        self._messages = self._connect(zmq.PAIR, link_messages.MESSAGES_SOCKET)
        with self._notices_lock:
            self._notices = self._connect(zmq.PUSH, link_messages.NOTICES_SOCKET)
        self._child, self._mark = start_process(_PROGRAM, self._directory, self._config, self._log)

    def wait_ready(
        self, timeout_seconds: float, should_stop: Callable[[], bool] | None = None
    ) -> list[ServerInfo]:
        """Waits until the process is ready. Returns its servers, or [] if ``should_stop`` returned true."""
        answer = self._wait_for(link_messages.Ready, timeout_seconds, should_stop, "become ready")
        if answer is None:
            return []
        ready, _ = answer
        self.fetch_endpoint = ready.fetch_endpoint
        is_first = self._config.incarnation == 0
        self.warnings = ready.warnings if is_first else []
        (self.watch.begin if is_first else self.watch.renew)(ready.servers)
        return ready.servers

    def next_batch(
        self,
        version: int,
        timeout_seconds: float,
        should_stop: Callable[[], bool] | None = None,
        lend: Callable[[], None] | None = None,
    ) -> RolloutBatch | None:
        """Waits for the batch that turns ``version`` into ``version + 1``, or its next part.

        ``lend`` is called if the rollout process wants the devices and has sent nothing of the batch yet.
        ``lend`` must make room on the devices and then call :meth:`notify_devices_free`.
        """
        if self._asked_version != version:
            self._send(link_messages.NextBatch(version))
            self._asked_version = version
        what = f"deliver the batch of version {version}"

        def meanwhile() -> None:
            wanted, self._wanted_for = self._wanted_for, None
            if wanted == version:  # an older wish has been overtaken by its batch
                assert lend is not None, "devices are wanted, but none are lent"
                lend()

        answer = self._wait_for(link_messages.Batch, timeout_seconds, should_stop, what, meanwhile)
        if answer is None:
            return None
        batch, frames = answer
        assert batch.version == version, f"got the batch of {batch.version}, expected {version}"
        self._asked_version = None
        groups = unpack(Packed(batch.groups, frames[0]), list[RolloutGroup])
        about = batch.progress, batch.closed, batch.metrics, batch.part, batch.rows
        return RolloutBatch(groups, *about)

    @property
    def is_evaluating(self) -> bool:
        return self._awaited is not None

    def request_evaluation(self, version: int, pinned: Sequence[str] = ()) -> None:
        """Requests an evaluation, without waiting. It replaces an evaluation that is still running."""
        self._num_requests += 1
        self._awaited = link_messages.Evaluate(self._num_requests, version, list(pinned))
        self._send(self._awaited)

    def renew_evaluation(self) -> None:
        """Requests the evaluation again that was running, if any, when the process was killed."""
        if self._awaited is not None:
            self._send(self._awaited)

    def take_evaluation(self) -> EvaluationResult | None:
        """Returns the result of the requested evaluation if it has arrived. Never waits."""
        self.raise_if_ended(wait_milliseconds=0)
        result = None
        while result is None and (answer := self._claim(link_messages.EvaluationDone)) is not None:
            result = self._result_of(answer[0])
        return result

    def wait_evaluation(
        self, timeout_seconds: float, should_stop: Callable[[], bool] | None = None
    ) -> EvaluationResult | None:
        deadline, result = time.monotonic() + timeout_seconds, None
        while result is None:
            assert self._awaited is not None, "an evaluation must be requested first"
            left, what = deadline - time.monotonic(), f"evaluate version {self._awaited.version}"
            answer = self._wait_for(link_messages.EvaluationDone, left, should_stop, what)
            if answer is None:
                return None
            result = self._result_of(answer[0])
        return result

    def _result_of(self, done: link_messages.EvaluationDone) -> EvaluationResult | None:
        # A request that was renewed or given up is answered as well.
        if self._awaited is None or done.request_id != self._awaited.request_id:
            return None
        self._awaited = None
        return done.result

    def save(self, version: int, kept_steps: Sequence[int]) -> None:
        """Requests that rollouts are saved beside the checkpoint of ``version``, without waiting."""
        self._saved.pop(version, None)
        self._send(link_messages.Save(version, list(kept_steps)))
        self._saves_under_way[version] += 1

    def wait_saved(self, version: int, timeout_seconds: float) -> int | None:
        """Waits until rollouts are written, and returns their number.

        Returns ``None`` after the timeout, if the process could not write them, or if the process was
        restarted. If two saves were requested for one version, waits for both and returns the second number.
        """
        deadline = time.monotonic() + timeout_seconds
        while self._saves_under_way[version] > 0:
            if time.monotonic() >= deadline:
                return None
            self._receive()
        return self._saved.get(version)

    def raise_if_ended(self, wait_milliseconds: int = _POLL_MILLISECONDS) -> None:
        """Handles all messages of the process that have arrived. Raises RolloutFailed if it has ended."""
        while self._receive(wait_milliseconds):
            pass

    def notify_version(self, url: str, version: int, pause_seconds: float = 0.0) -> None:
        """Reports that the server at ``url`` was attested to serve ``version``. Thread-safe.

        ``pause_seconds`` says for how long the server has not generated because of it.
        """
        self._notify(link_messages.VersionServed(url, version, pause_seconds))

    def notify_lost(self, url: str, reason: str) -> None:
        """Reports that the server at ``url`` must get no more requests. Thread-safe."""
        self._notify(link_messages.ServerLost(url, reason))

    def notify_asleep(self, url: str) -> None:
        """Reports that the lent server at ``url`` sleeps. Thread-safe."""
        self._notify(link_messages.ServerAsleep(url))

    def notify_devices_free(self, version: int) -> None:
        """Reports that servers may use the training devices until the batch of ``version``."""
        self._notify(link_messages.DevicesFree(version))

    def reread_urls(self) -> None:
        """Requests that ``inference.urls_file`` is read now, if a process runs. Thread-safe."""
        with contextlib.suppress(RolloutFailed):
            self._notify(link_messages.RereadUrls())

    def close(self) -> None:
        """Ends the process and everything it started, within 5 seconds. It is idempotent."""
        if self._child is not None and self._child.poll() is None and self._messages is not None:
            self._messages.send(link_messages.encode(link_messages.Stop()))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=_ORDERLY_STOP_SECONDS)
            # Its last words: what was dropped since it spoke last.
            with contextlib.suppress(RolloutFailed):
                self.raise_if_ended()
        if self._child is not None:
            end_process(self._child, self._mark, _KILL_GRACE_SECONDS)
            self._failure = self._failure or "The rollout process is closed."
        self._close_sockets()
        if hasattr(self, "watch"):
            self.watch.close()
        self._context.term()

    def _close_sockets(self) -> None:
        if self._messages is not None:
            self._messages.close(linger=0)
        with self._notices_lock:
            if self._notices is not None:
                self._notices.close(linger=0)
            self._notices = None
        self._messages = None
        if self._directory is not None:
            remove_private_folder(self._directory)

    def _connect(self, kind: int, name: str) -> zmq.Socket:
        # This end connects and the child binds: messages sent before the child is up are then kept.
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.connect(f"ipc://{self._directory}/{name}")
        return socket

    def _send(self, command: link_messages.Command) -> None:
        if self._failure is None and self._child is not None and self._child.poll() is not None:
            # The process may have sent its reason before it ended.
            self.raise_if_ended()
        self._check_alive()
        assert self._messages is not None, "the rollout process must be started first"
        self._messages.send(link_messages.encode(command))

    def _notify(self, notice: link_messages.Notice) -> None:
        with self._notices_lock:
            if self._is_restarting or (self._was_killed() and self._restarts_left):
                return  # the weight pusher attests all servers again for the next process
            if self._notices is None or self._child is None or self._child.poll() is not None:
                raise RolloutFailed(self._failure or self._describe_exit())
            self._notices.send(link_messages.encode(notice))

    def _wait_for(
        self,
        kind: type[_Answer],
        timeout_seconds: float,
        should_stop: Callable[[], bool] | None,
        what: str,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[_Answer, list[bytes]] | None:
        """Waits for the next answer of ``kind``. Returns it with its frames, or ``None`` if stopped.

        ``meanwhile`` is called repeatedly during the wait.
        """
        began = time.monotonic()
        reminders = Reminders()
        while True:
            if (answer := self._claim(kind)) is not None:
                return answer
            meanwhile()
            if self._receive():
                continue
            if should_stop is not None and should_stop():
                return None
            waited = time.monotonic() - began
            if self._progress.is_stuck and reminders.is_due(waited):
                self._announce(
                    f"The trainer has waited {waited:.0f} s (at most {timeout_seconds:g} s, "
                    f"{_LIMITS[kind]}) for the rollout process to {what}: {self._progress.message}"
                )
            if waited > timeout_seconds:
                state = self._progress.message or "it has not reported what it waits for"
                raise RolloutFailed(
                    f"The rollout process did not {what} within {timeout_seconds:g} s "
                    f"({_LIMITS[kind]}): {state}. Its log is {self._log}."
                )

    def _claim(self, kind: type[_Answer]) -> tuple[_Answer, list[bytes]] | None:
        for position, (message, frames) in enumerate(self._unclaimed):
            if isinstance(message, kind):
                del self._unclaimed[position]
                return message, frames
        return None

    def _receive(self, wait_milliseconds: int = _POLL_MILLISECONDS) -> bool:
        """Receives and handles one message. Returns ``False`` if none arrives in ``wait_milliseconds``."""
        assert self._messages is not None, (
            self._failure or "the rollout process must be started first"
        )
        # Read before polling, so that messages sent before the child ended are still received.
        ended = self._child is None or self._child.poll() is not None
        if not self._messages.poll(wait_milliseconds):
            if ended:
                self._check_alive()
            return False
        header, *frames = self._messages.recv_multipart()
        answer = link_messages.decode_answer(header)
        if isinstance(answer, link_messages.Fatal):
            self._failure, self._has_spoken = answer.message, True
            raise RolloutFailed(answer.message)
        if isinstance(answer, link_messages.Progress):
            self._progress = answer
            self.show(answer.line, answer.done, answer.wanted)
            since = time.monotonic() if self._stuck_since is None else self._stuck_since
            self._stuck_since = since if answer.is_stuck else None
        elif isinstance(answer, link_messages.DevicesWanted):
            self._wanted_for = answer.version
        elif isinstance(answer, link_messages.Announcement):
            tell = self._announce if answer.is_warning else partial(print, flush=True)
            tell(answer.text)
        elif isinstance(answer, link_messages.Dropped):
            self._dropped = Counter(answer.counts)
        elif isinstance(answer, link_messages.Saved):
            self._saved[answer.version] = answer.num_rollouts
            self._saves_under_way[answer.version] -= 1
        else:
            self._stuck_since = None  # what was waited for has arrived
            self._unclaimed.append((answer, frames))
        return True

    def _check_alive(self) -> None:
        has_ended = self._child is None or self._child.poll() is not None
        if self._failure is None and has_ended:
            self._failure = self._describe_exit()
        if self._failure is not None:
            raise (RolloutKilled if self._was_killed() else RolloutFailed)(self._failure)

    def _was_killed(self) -> bool:
        has_ended = self._child is not None and self._child.poll() not in (None, 0)
        return has_ended and not self._has_spoken

    def _describe_exit(self) -> str:
        if self._child is None:
            return "The rollout process was never started."
        return (
            f"The rollout process ended with exit code {self._child.returncode}. "
            f"The end of {self._log}:\n{log_tail(self._log).strip()}"
        )
