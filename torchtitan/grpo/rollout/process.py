# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rollout process: an asyncio program without torch, and a child of training rank 0.

Its argument is a private directory with `config.json` and the sockets (:mod:`.link` is the
other end). It ends on a stop message, when rank 0 ends, and on an error, which it reports first.
All processes that it started end with it.

Cluster managers send SIGTERM to all processes of a job at once. Rank 0 then writes a last
checkpoint, to which the rollouts in flight belong. On a signal this process therefore stops
generating and waits for rank 0's stop message, at most ``grpo.stop_timeout_seconds``.
"""

import asyncio
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import zmq
import zmq.asyncio

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout import link_messages
from torchtitan.grpo.rollout.batch_fetch import BatchHolder
from torchtitan.grpo.rollout.codec import pack, pack_without_arrays
from torchtitan.grpo.rollout.evaluator import Evaluator
from torchtitan.grpo.rollout.lending.lender import DeviceRequests
from torchtitan.grpo.rollout.process_monitor import LoopLag, RolloutMonitor
from torchtitan.grpo.rollout.producer import Producer
from torchtitan.grpo.rollout.saved import SavedRollouts, file_of, remove_others, write_saved
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.session import RolloutSession
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.child import adopt_orphans, end_descendants
from torchtitan.grpo.system.process_tuning import map_large_blocks, spare_collections
from torchtitan.grpo.system.stop import stop_signals
from torchtitan.grpo.system.waits import wait_at_most
from torchtitan.grpo.types import ServerInfo

logger = logging.getLogger(__name__)


_PARENT_POLL_SECONDS = 1.0
_PROGRESS_SECONDS = 2.0
_COUNT_SECONDS = 1.0
_CANCEL_SECONDS = 0.5
_SAVE_SECONDS = 1.5
_LINGER_MILLISECONDS = 2000

_Found = TypeVar("_Found")


class Announcer(logging.Handler):
    """A queue of sentences that rank 0 tells the user. It belongs to the event loop that made it.

    Errors that other modules log are queued as well, except those with a traceback, which end the run.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._loop = asyncio.get_running_loop()
        self._texts: deque[tuple[str, bool]] = deque()
        self.has_news = asyncio.Event()
        logging.getLogger("torchtitan.grpo").addHandler(self)

    def announce(self, text: str) -> None:
        """Logs a warning and queues it. Any thread may call it."""
        logger.warning("%s", text)
        self._queue(text)

    def say(self, text: str) -> None:
        """Logs and queues a sentence that is no warning, such as progress."""
        logger.info("%s", text)
        self._queue(text, is_warning=False)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:
            self._queue(record.getMessage())

    def take(self) -> list[tuple[str, bool]]:
        self.has_news.clear()
        return [self._texts.popleft() for _ in range(len(self._texts))]

    def close(self) -> None:
        logging.getLogger("torchtitan.grpo").removeHandler(self)
        super().close()

    def _queue(self, text: str, is_warning: bool = True) -> None:
        self._texts.append((text, is_warning))
        self._loop.call_soon_threadsafe(self.has_news.set)


class RolloutProcess:
    """Answers rank 0's commands with the help of a session, over sockets in ``directory``.

    ``devices`` are the training devices, which rank 0 frees for lent servers on request.
    """

    def __init__(self, config: RolloutProcessConfig, directory: Path) -> None:
        self._config = config
        self._context = zmq.asyncio.Context()
        self._messages = self._bind(zmq.PAIR, directory / link_messages.MESSAGES_SOCKET)
        self._notices = self._bind(zmq.PULL, directory / link_messages.NOTICES_SOCKET)
        self._servers = self._bind(zmq.PUSH, directory / link_messages.SERVERS_SOCKET)
        self._stop = asyncio.Event()
        self._parent = os.getppid()
        # Tasks that need servers, which may have been sent the same signal as this process.
        self._generating: set[asyncio.Task[None]] = set()
        self._announcer = Announcer()
        self._told_counts: dict[str, int] = {}
        self._lag = LoopLag()
        self._monitor = RolloutMonitor(config, self._announcer.announce)
        self._session: RolloutSession | None = None
        self._saving: asyncio.Task[None] | None = None
        self._evaluating: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self.devices = DeviceRequests(self._send, config.start_version)
        self._holder: BatchHolder | None = None
        if not config.prompts.single_rank_load:
            self._holder = BatchHolder(self._context, config.fetch_host, config.fetch_secret)

    def stop(self) -> None:
        self._stop.set()

    def stop_with_parent(self) -> None:
        """Stops generating now, but shuts down only when rank 0 says so or ends, or after a time limit."""
        if os.getppid() != self._parent or not self._generating:
            self.stop()
            return
        logger.warning(
            "A signal has stopped the generation. Rollouts are kept for rank 0's checkpoint."
        )
        for task in tuple(self._generating):
            task.cancel()
        loop = asyncio.get_running_loop()
        loop.call_later(self._config.grpo.stop_timeout_seconds, self.stop)

    async def run(self) -> int:
        """Runs until the process is stopped or fails. Returns the exit status."""
        work = asyncio.create_task(self._work())
        stopped = asyncio.create_task(self._stop.wait())
        parent = asyncio.create_task(self._watch_parent())
        try:
            tasks = {work, stopped, parent}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._saving is not None:  # the run may end right after its last checkpoint
                await asyncio.wait({self._saving}, timeout=_SAVE_SECONDS)
            for task in tasks:
                task.cancel()
            # Bounded, because a cancelled request notifies its server, which may not answer.
            done, _ = await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
            failed = work in done and not work.cancelled()
            return await self._report(work.exception() if failed else None)
        finally:
            self._announcer.close()
            await self._monitor.close()
            if self._session is not None:
                await self._session.close()
            self._messages.close(linger=_LINGER_MILLISECONDS)
            self._notices.close(linger=0)
            self._servers.close(linger=0)
            if self._holder is not None:
                self._holder.close()
            self._context.term()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            # Started first, so that a stop is received while servers come up.
            tasks.create_task(self._listen(tasks))
            tasks.create_task(self._speak())
            await self._monitor.start()
            self._session = session = RolloutSession(
                self._config, self._announcer.announce, self._announcer.say, devices=self.devices,
                show=self._show_start,
            )  # fmt: skip
            await session.open()
            self._monitor.health.begin(session)
            self._monitor.tell_servers(session.fleet.servers)
            endpoint = self._holder.endpoint if self._holder is not None else None
            await self._send(
                link_messages.Ready(session.fleet.servers, endpoint, session.inputs.warnings)
            )
            if self._holder is not None:
                tasks.create_task(self._holder.run())
            # Not earlier, because a slow start-up does not delay other work.
            spare_collections()
            tasks.create_task(self._lag.run())
            tasks.create_task(self._hear_notices(session))
            self._generate(tasks, session.producer.run())
            self._generate(tasks, session.fleet.watch(session.dispatcher, self._tell_servers))
            self._generate(tasks, session.dispatcher.watch_loads())
            if (lender := session.lender) is not None:
                self._generate(tasks, lender.run())

    def _generate(
        self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        task = tasks.create_task(work)
        self._generating.add(task)
        task.add_done_callback(self._generating.discard)
        return task

    async def _report(self, error: BaseException | None) -> int:
        await self._speak_once()
        if error is None or isinstance(error, asyncio.CancelledError):
            return 0
        cause = first_cause(error)
        logger.error("The rollout process ends", exc_info=cause)
        text = str(cause)
        if not isinstance(cause, ValueError | RuntimeError | TimeoutError) or not text:
            text = f"{type(cause).__name__}: {text}"
        await self._send(link_messages.Fatal(text))
        return 1

    async def _speak(self) -> None:
        while True:
            await wait_at_most(_COUNT_SECONDS, self._announcer.has_news)
            self._monitor.health.note()
            if self._session is not None and hasattr(self._session, "producer"):
                self._session.producer.count_prompts()
            await self._speak_once()

    async def _speak_once(self) -> None:
        for announced in self._announcer.take():
            await self._send(link_messages.Announcement(*announced))
        counts = dict(self._session.drops.counts) if self._session is not None else {}
        if counts != self._told_counts:
            self._told_counts = counts
            await self._send(link_messages.Dropped(counts))

    async def _listen(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            command = link_messages.decode_command(await self._messages.recv())
            if isinstance(command, link_messages.NextBatch):
                tasks.create_task(self._send_batch(self._opened(), command))
            elif isinstance(command, link_messages.Evaluate):
                if self._evaluating is not None:
                    self._evaluating.cancel()  # rank 0 has given it up, if it is still running
                work = self._send_evaluation(self._opened(), command)
                self._evaluating = self._generate(tasks, work)
            elif isinstance(command, link_messages.Save):
                # Taken now, because later changes belong to a later checkpoint.
                saved = self._opened().producer.save(command.version)
                self._saving = tasks.create_task(self._save(saved, command))
            else:
                self.stop()

    async def _hear_notices(self, session: RolloutSession) -> None:
        dispatcher = session.dispatcher
        while True:
            notice = link_messages.decode_notice(await self._notices.recv())
            if isinstance(notice, link_messages.VersionServed):
                told = session.lender.note_version if session.lender else dispatcher.set_version
                told(notice.url, notice.version, notice.pause_seconds)
            elif isinstance(notice, link_messages.ServerLost):
                dispatcher.set_lost(notice.url, notice.reason)
                if session.lender is not None:
                    session.lender.note_lost(notice.url, notice.reason)
            elif isinstance(notice, link_messages.ServerAsleep):
                assert session.lender is not None, "only lent servers sleep"
                session.lender.note_asleep(notice.url)
            elif isinstance(notice, link_messages.DevicesFree):
                self.devices.free(notice.version)
            else:
                session.fleet.reread_urls()

    async def _tell_servers(self, servers: list[ServerInfo]) -> None:
        self._monitor.tell_servers(servers)
        await self._servers.send(link_messages.encode(servers))

    async def _send_batch(self, session: RolloutSession, command: link_messages.NextBatch) -> None:
        if session.lender is not None:
            session.lender.ask(command.version)
        work, what = session.producer.batch(command.version), f"step {command.version + 1}"
        batch = await result_of(work, what, session.producer, session.dispatcher, self._send)
        lending = {} if session.lender is None else await session.lender.give_back(batch.groups)
        if self._holder is None:
            groups = pack(batch.groups)
        else:
            self._holder.hold(command.version, batch.groups)
            groups = pack_without_arrays(batch.groups, self._config.samples_per_step)
        # The lag since the previous batch is reported once, with the part that ends this one.
        metrics = (
            batch.metrics | self._lag.take_metrics() | lending if batch.part.ends_batch else {}
        )
        told = metrics, groups.header, batch.part, batch.rows
        answer = link_messages.Batch(command.version, batch.progress, batch.closed, *told)
        await self._send(answer, [groups.arrays])

    async def _send_evaluation(
        self, session: RolloutSession, command: link_messages.Evaluate
    ) -> None:
        evaluator = session.evaluator
        if evaluator is None:
            raise RuntimeError("Rank 0 requested an evaluation, but [evaluation] names no set.")
        work = evaluator.evaluate(command.version, command.pinned)
        what = f"evaluation at step {command.version}"
        result = await result_of(work, what, evaluator, session.dispatcher, self._send)
        await self._send(link_messages.EvaluationDone(command.request_id, result))

    async def _save(self, saved: SavedRollouts, command: link_messages.Save) -> None:
        """Writes the rollouts that belong to a checkpoint. After a failure the run continues."""
        folder = self._config.dump_folder
        num_rollouts: int | None = saved.num_rollouts
        try:
            async with self._writing:  # one at a time: two commands may be for the same step
                await asyncio.to_thread(write_saved, file_of(folder, command.version), saved)
                await asyncio.to_thread(remove_others, folder, [*command.kept, command.version])
        except OSError as error:
            logger.error(
                "The rollouts in flight could not be saved with step %d: %s", command.version, error
            )
            num_rollouts = None
        await self._send(link_messages.Saved(command.version, num_rollouts))

    async def _watch_parent(self) -> None:
        """Waits until rank 0 has ended, by polling, because not every kernel signals this to a child."""
        while os.getppid() == self._parent and self._parent != 1:
            await asyncio.sleep(_PARENT_POLL_SECONDS)
        logger.error("Rank 0 has ended")

    async def _send(self, message: link_messages.Answer, frames: list[bytes] | None = None) -> None:
        await self._messages.send_multipart([link_messages.encode(message), *(frames or [])])

    async def _show_start(self, line: str, done: int, wanted: int) -> None:
        await self._send(link_messages.Progress(line, False, line, done, wanted))

    def _opened(self) -> RolloutSession:
        assert self._session is not None, "rank 0 sent a command before the process was ready"
        return self._session

    def _bind(self, kind: int, path: Path) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(f"ipc://{path}")
        return socket


async def result_of(
    work: Coroutine[Any, Any, _Found],
    what: str,
    source: Producer | Evaluator,
    dispatcher: Dispatcher,
    send: Callable[[link_messages.Progress], Awaitable[None]],
) -> _Found:
    """Returns the result of ``work``. Until it is there, reports to rank 0 what it is waiting for."""
    waiting = asyncio.ensure_future(work)
    begun, (*_, num_before) = time.monotonic(), source.progress()
    try:
        while not (await asyncio.wait({waiting}, timeout=_PROGRESS_SECONDS))[0]:
            servers = dispatcher.servers.values()
            is_stuck = not any(server.is_ready() or server.waits_for_devices for server in servers)
            done, wanted, tokens = source.progress()
            tokens -= num_before
            speed = f"{tokens:,} tokens, {tokens / (time.monotonic() - begun):,.0f} tokens/s"
            line = f"{what}: {done} of {wanted} completions, {speed}"
            line += "; their scores are awaited" if done == wanted else ""
            await send(link_messages.Progress(source.describe(), is_stuck, line, done, wanted))
    except asyncio.CancelledError:
        waiting.cancel()
        raise
    return waiting.result()


def first_cause(error: BaseException) -> BaseException:
    """Returns the first error in an exception group, perhaps nested. Returns other errors unchanged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def serve(directory: Path) -> NoReturn:
    """Runs the rollout process, then exits the interpreter."""
    config_file = directory / link_messages.CONFIG_FILE
    text = config_file.read_bytes()
    # It may contain the servers' keys, which the user's code must not find.
    config_file.unlink()
    config = msgspec.json.decode(text, type=RolloutProcessConfig)
    if config.timeline:
        spans.open_inherited("rollouts")
    process = RolloutProcess(config, directory)
    loop = asyncio.get_running_loop()
    for signum in stop_signals():
        loop.add_signal_handler(signum, process.stop_with_parent)
    status = await process.run()
    end_descendants()
    spans.close_spans()
    logging.shutdown()
    # Everything is closed. A thread that still reads a data set must not delay the exit.
    os._exit(status)


def main() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    map_large_blocks()
    adopt_orphans()
    asyncio.run(serve(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
