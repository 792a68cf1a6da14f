# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The servers of a run, which ``[inference]`` names or launches.

The set can change: ``inference.urls_file`` may name other servers, servers may register and leave,
and a launched server may end for good. A change is reported to the dispatcher first, and then to rank 0.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.cluster import count_servers, server_groups
from torchtitan.grpo.config.environments import environments_of
from torchtitan.grpo.config.evaluation import longest_answer
from torchtitan.grpo.inference.access import ADMIN_KEY_VARIABLE
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.join_check import ServerNeeds, WrongServer, check_server
from torchtitan.grpo.inference.kinds import IDLE_SECONDS, make_client
from torchtitan.grpo.inference.local_servers import (
    HeldPorts,
    LaunchedServer,
    start_servers,
    stop_servers,
)
from torchtitan.grpo.inference.registry import RegisteredServers, RegistryFolder, registry_folder
from torchtitan.grpo.inference.urls import UrlsFile, checked_urls
from torchtitan.grpo.inference.waiting import Show, wait_until_up
from torchtitan.grpo.rollout.prompts import PromptLimits
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.registry_server import RegistryServer
from torchtitan.grpo.rollout.serving.supervisor import Supervisor
from torchtitan.grpo.system.waits import Reminders, wait_at_most
from torchtitan.grpo.types import ServerInfo

logger = logging.getLogger(__name__)

_FILE_POLL_SECONDS = 1.0
_JOINS_OF_A_PROCESS = 1_000_000
_CLOSE_SECONDS = 0.5
# Time within which a server that joins during the run must answer what it is.
_LATE_SECONDS = 600.0
_STOP_GRACE_SECONDS = 1.5

_REGISTRY_POLL_SECONDS = 0.25

Tell = Callable[[list[ServerInfo]], Awaitable[None]]


class ServerFleet:
    """Holds the clients of all servers, and the launched processes. It may be closed at any time."""

    # Set by :meth:`watch`.
    _dispatcher: Dispatcher
    _tell: Tell

    def __init__(
        self,
        config: RolloutProcessConfig,
        announce: Callable[[str], None] | None = None,
        say: Callable[[str], object] = logger.info,
        show: Show | None = None,
    ) -> None:
        self._config, self._show = config, show
        self._needs = server_needs(config)
        self._announce, self._say = announce or logger.warning, say
        self._ports: HeldPorts | None = None
        self._launched: list[LaunchedServer] = []
        self._supervisors: list[Supervisor] = []
        self._members: dict[str, tuple[ServerInfo, InferenceClient]] = {}
        self._num_joined: dict[str, int] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._source = _changing_source(config)
        self._registry: RegistryServer | None = None
        self._reread = asyncio.Event()

    @property
    def clients(self) -> list[InferenceClient]:
        return [client for _, client in self._members.values()]

    @property
    def servers(self) -> list[ServerInfo]:
        return [info for info, _ in self._members.values()]

    @property
    def lent(self) -> list[str]:
        """URLs of the servers on the training devices; see :mod:`torchtitan.grpo.rollout.lending`."""
        return [info.url for info in self.servers if info.is_lent]

    async def set_wanted(self, is_wanted: bool) -> None:
        """Reports to rank 0 whether lent servers are to serve or to sleep."""
        for url in self.lent:
            info, client = self._members[url]
            self._members[url] = replace(info, is_wanted=is_wanted), client
        for supervisor in self._supervisors:
            if supervisor.is_lent:
                supervisor.set_wanted(is_wanted)
        await self._tell(self.servers)

    def is_up(self, url: str) -> bool:
        """Whether the launched server at ``url`` runs and has finished starting."""
        return any(one.is_up for one in self._supervisors if one.client.url == url)

    async def end(self, url: str) -> bool:
        """Ends the process of a lent server, which is started again when it is wanted.

        Returns whether the server was up.
        """
        for supervisor in self._supervisors:
            if supervisor.client.url == url:
                return await supervisor.end()
        return False

    async def start(self) -> None:
        """Launches servers if ``inference.launch`` is set, and waits until all servers are up.

        Raises ``ValueError`` for an invalid URL or interpreter, and the errors of `wait_until_up`.
        """
        inference = self._config.inference
        if inference.launch:
            self._ports = held = HeldPorts(count_servers(server_groups(self._config)))
            # A thread must not do this: the kernel ends a child together with the thread that
            # started it.
            self._launched = start_servers(self._config, held.ports)
            urls = [server.url for server in self._launched]
        elif isinstance(self._source, UrlsFile):
            urls = await asyncio.to_thread(self._source.read)
        elif self._source is not None:
            await self._open_registry()
            urls = await self._first_registered(self._source)
        else:
            urls = checked_urls(inference.urls, "inference.urls")
        lent = {server.url for server in self._launched if server.spec.is_lent}
        for url in urls:
            self._join(url, is_lent=url in lent)
        await wait_until_up(
            self.clients,
            self._launched,
            inference.startup_timeout_seconds,
            check=self._check,
            show=self._show,
            kind=inference.kind,
        )
        for server in self._launched:
            await asyncio.to_thread(server.note_shared_memory)
        self._supervisors = [
            Supervisor(server, self._members[server.url][1], inference) for server in self._launched
        ]

    async def watch(self, dispatcher: Dispatcher, tell: Tell) -> None:
        """Follows changes of the set of servers forever, and calls ``tell`` with the new list after each.

        Raises ``RuntimeError`` if the last launched server has ended and is not restarted.
        """
        self._dispatcher, self._tell = dispatcher, tell
        async with asyncio.TaskGroup() as tasks:
            for supervisor in self._supervisors:
                tasks.create_task(self._supervise(supervisor))
            if self._source is not None:
                tasks.create_task(self._follow(self._source, tasks))
            # Servers that only inference.urls names never change. The caller cancels this.
            await asyncio.Event().wait()

    def reread_urls(self) -> None:
        self._reread.set()

    async def close(self) -> None:
        launched = {server.url: server for server in self._launched}
        self._launched = []
        for supervisor in self._supervisors:
            launched.pop(supervisor.client.url, None)
            if (server := supervisor.close()) is not None:
                launched[server.url] = server
        for check in self._checks.values():
            check.cancel()
        members, self._members = self._members, {}
        closing = [asyncio.create_task(client.close()) for _, client in members.values()]
        closing += self._leaving
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_SECONDS)
        if launched:
            await asyncio.to_thread(stop_servers, list(launched.values()), _STOP_GRACE_SECONDS)
        if self._ports is not None:
            self._ports.close()
        if self._registry is not None:
            await self._registry.close()

    async def _open_registry(self) -> None:
        inference = self._config.inference
        if inference.registry_address is None:
            return
        key = inference.admin_key or os.environ[ADMIN_KEY_VARIABLE]
        folder = registry_folder(inference, self._config.dump_folder)
        assert folder is not None, "a registry address implies a registry folder"
        self._registry = RegistryServer(inference.registry_address, key, RegistryFolder(folder))
        await self._registry.start()

    async def _first_registered(self, source: RegisteredServers) -> list[str]:
        limit = self._config.inference.startup_timeout_seconds
        begin, reminders = time.monotonic(), Reminders()
        while (urls := await asyncio.to_thread(source.poll)) is None:
            waited = time.monotonic() - begin
            where = self._config.inference.registry_address or self._config.inference.registry
            if waited > limit:
                raise TimeoutError(
                    f"A {self._config.inference.kind} server must register itself within "
                    f"inference.startup_timeout_seconds ({limit:g} s), but none has registered. Start "
                    f"a server with `serve ... --register` and {where}."
                )
            if reminders.is_due(waited):
                self._say(
                    f"No server has registered itself at {where} yet. The run has waited for "
                    f"{waited:.0f} s (at most {limit:g} s, inference.startup_timeout_seconds)."
                )
            await asyncio.sleep(_REGISTRY_POLL_SECONDS)
        return urls

    async def _check(self, client: InferenceClient) -> None:
        needs = replace(self._needs, is_lent=client.url in self.lent)
        facts, warnings = await check_server(client, needs)
        for warning in warnings:
            self._announce(warning)
        if client in self.clients:  # the server may have left meanwhile
            info, _ = self._members[client.url]
            self._members[client.url] = replace(info, software=facts.software), client

    async def _check_late(self, client: InferenceClient) -> None:
        try:
            await wait_until_up([client], [], _LATE_SECONDS, check=self._check)
        except TimeoutError:
            return  # weight synchronization either reaches the server later or reports it lost
        except WrongServer as error:
            self._announce(f"{error}\nThe run continues without this server.")
            del self._checks[client.url]  # otherwise _leave would cancel this task
            self._leave(client.url)
            await self._tell(self.servers)

    async def _supervise(self, supervisor: Supervisor) -> None:
        end = await supervisor.run(self._dispatcher)
        self._leave(supervisor.client.url)
        if not self._members:
            raise RuntimeError(f"The last inference server has ended. {end}")
        logger.error("%d inference servers are left. %s", len(self._members), end)
        await self._tell(self.servers)

    async def _follow(self, source: UrlsFile | RegisteredServers, tasks: asyncio.TaskGroup) -> None:
        while True:
            await wait_at_most(_FILE_POLL_SECONDS, self._reread)
            is_asked = self._reread.is_set()
            self._reread.clear()
            try:
                # A thread reads the file, because it may be on a network file system.
                urls = await asyncio.to_thread(source.read if is_asked else source.poll)
            except ValueError as error:
                logger.error("%s The set of servers does not change.", error)
                continue
            if urls is not None and self._change_to(urls, source.name, tasks):
                await self._tell(self.servers)
            elif is_asked:
                logger.info("%s was read again. It names the same servers as before.", source.name)

    def _change_to(self, urls: list[str], source: str, tasks: asyncio.TaskGroup) -> bool:
        """Makes ``urls`` the set of servers. Returns whether this changed the set.

        New servers are checked in ``tasks``, so that an unforeseen error ends the run.
        """
        new = [url for url in urls if url not in self._members]
        gone = [url for url in self._members if url not in urls]
        for url in new:
            client = self._join(url)
            self._dispatcher.add(client)
            self._checks[client.url] = tasks.create_task(self._check_late(client))
            logger.info("Server %s joins (%s) and waits for weights.", url, source)
        for url in gone:
            self._leave(url)
            logger.info("Server %s leaves (%s).", url, source)
        return bool(new or gone)

    def _join(self, url: str, *, is_lent: bool = False) -> InferenceClient:
        inference = self._config.inference
        client = make_client(
            inference.kind,
            url,
            api_key=inference.api_key,
            admin_key=inference.admin_key,
            control_timeout_seconds=inference.control_timeout_seconds,
            request_timeout_seconds=self._config.rollout.request_timeout_seconds,
            idle_seconds=IDLE_SECONDS,
        )
        # The number is higher than any number that an earlier rollout process can have reported.
        before = self._num_joined.get(client.url, self._config.incarnation * _JOINS_OF_A_PROCESS)
        self._num_joined[client.url] = joined = before + 1
        self._members[client.url] = (
            ServerInfo(client.url, inference.kind, joined, is_lent=is_lent),
            client,
        )
        return client

    def _leave(self, url: str) -> None:
        _, client = self._members.pop(url)
        if (check := self._checks.pop(url, None)) is not None:
            check.cancel()
        requests = self._dispatcher.remove(url)

        async def close_client() -> None:
            if requests:  # the server is still being notified of their cancellation
                await asyncio.wait(requests)
            await client.close()

        task = asyncio.create_task(close_client())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def server_needs(config: RolloutProcessConfig) -> ServerNeeds:
    owns = environments_of(config).values()
    lengths = [
        (
            PromptLimits.of(own).max_tokens,
            longest_answer(config.evaluation, own.rollout.max_new_tokens),
        )
        for own in owns
    ]
    longest, new = max(lengths, key=sum)
    source = f"training.seq_len = {config.seq_len}; prompts.max_prompt_tokens is not set"
    if all(own.prompts.max_prompt_tokens for own in owns):
        source = f"prompts of {longest} tokens, completions of {new}"
    return ServerNeeds(
        kind=config.inference.kind,
        model_path=config.hf_assets_path,
        num_tokens=min(config.seq_len, longest + new),
        length_source=source,
        temperature=config.rollout.temperature,
        is_launched=config.inference.launch,
    )


def _changing_source(config: RolloutProcessConfig) -> UrlsFile | RegisteredServers | None:
    inference = config.inference
    if inference.urls_file is not None:
        return UrlsFile(inference.urls_file)
    folder = registry_folder(inference, config.dump_folder)
    return None if folder is None else RegisteredServers(folder, inference.kind)
