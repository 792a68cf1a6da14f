# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that no server ever serves a mixture of versions, even among faults.

    python benchmarks/torn_free.py [--publishes 500 | --all] [--seed 0] [--json]

Two training ranks (gloo, FSDP2) publish versions of a tiny model much faster than three embedded
servers can receive them, while completions are in flight. Every parameter of every version is
tagged: it is multiplied by a factor that depends on its name and the version, so every slot,
bucket and server can be compared, bit by bit, with what it should hold. Copies, gathering,
broadcasts and requests are delayed at random. Servers are stopped for a while, or killed and
started again with their first weights.

All the time, the benchmark compares the SHA-256 of the parameters of each server with the version
that the server reports, and the logprobs of each completion with those of transformers for the
versions that the completion names. The ranks compare each slot after it was read, on both ranks,
and each bucket before and after each broadcast. By default 500 versions are published, which
takes a few minutes; ``--all`` publishes 2,000. The exit status is 1 if a violation is found. With
``--json`` the last line is a JSON object.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "programs"))

from loop_driver import Event, PublishingLoop
from ranks import fork_server
from tagged import UNPUSHED, TaggedModel, digest_of, save_model

from torchtitan.grpo.inference.kinds import ServerSpec
from torchtitan.grpo.inference.local_servers import HeldPorts, LaunchedServer

NUM_RANKS, NUM_SERVERS = 2, 3
TOLERANCE = 1e-3
CHECK_SECONDS = 0.1
PUBLISHES_A_PUSH = 10
"""Maximum number of publishes for each push. The run continues until there are enough pushes."""
WEIGHT_SYNC = {
    "checksum": True,
    "bucket_bytes": 65536,
    "timeout_seconds": 3.0,
    "push_timeout_seconds": 8.0,
    "retry_seconds": 0.1,
    "max_retry_seconds": 0.5,
    "attest_every": 7,
}


@dataclass
class Result:
    """The contents of the table. ``found`` has a text for each violation."""

    publishes: int = 0
    pushes: int = 0
    superseded: int = 0
    kills: int = 0
    stops: int = 0
    losses: int = 0
    parameter_checks: int = 0
    completions_checked: int = 0
    completions_over_versions: int = 0
    mixtures: int = 0
    slot_or_bucket_errors: int = 0
    versions_alive: int = 0
    worst_lag: int = 0
    seconds: float = 0.0
    found: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether checks were made and found no violation."""
        return not self.found and self.parameter_checks > 0 and self.completions_checked > 0


class Server:
    """One embedded server and its state.

    Attributes:
        lives: Number of starts. A check during which this number changes has met two processes, and
            does not count.
        is_sick: Whether the server is stopped, killed, or not yet up again.
    """

    def __init__(self, spec: ServerSpec, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self.lives, self.is_sick = 0, False
        self.newest = UNPUSHED
        self.start()

    def start(self) -> None:
        """Starts the server with its first weights."""
        self.lives += 1
        self.newest = UNPUSHED
        log = self._folder / f"server-{self._spec.port}-{self.lives}.log"
        self.process: LaunchedServer = fork_server().start_server(self._spec, log)
        self.url = self.process.url

    def signal(self, signum: int) -> None:
        """Signals all processes of the server."""
        os.killpg(self.process.process.pid, signum)


class Stress:
    """Controls the whole run, in one event loop on the main thread."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, ports: list[int]) -> None:
        self.arguments, self.result = arguments, Result()
        self.random = random.Random(arguments.seed)
        save_model(folder / "model")
        self.model = TaggedModel(folder / "model")
        self.servers = [Server(self._spec(folder, port), folder) for port in ports]
        self.loop = PublishingLoop(
            folder / "loop",
            NUM_RANKS,
            fork_server(),
            model=str(folder / "model"),
            servers=[[server.url, "embedded"] for server in self.servers],
            pause_seconds=(0.0, 0.06),
            weight_sync=WEIGHT_SYNC,
            control_timeout_seconds=2.0,
            num_requests=3,
            num_tokens=32,
            seed=arguments.seed,
            delays=0.03,
            inject=arguments.inject,
        )
        self.num_seen = 0
        self.num_published = 0
        self.confirmed: dict[str, int] = {}
        self.samples: list[Event] = []

    def _spec(self, folder: Path, port: int) -> ServerSpec:
        return ServerSpec("embedded", str(folder / "model"), port, "cpu", "float32", 256, 16)

    async def run(self) -> Result:
        """Runs until there were enough publishes, checks and faults."""
        wanted = self.arguments.publishes
        # Until then, a server cannot be distinguished from a restarted one.
        await self._until_loop(lambda: self._all_confirmed(), 400)
        begin = time.monotonic()
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(self._check(session, s)) for s in self.servers]
            working += [tasks.create_task(self._harm()), tasks.create_task(self._rate())]
            await self._until_loop(lambda: self._is_enough(wanted), 300 + wanted)
            for task in working:
                task.cancel()
        for server in self.servers:  # stopped servers continue, so that they notice the end
            with contextlib.suppress(
                ProcessLookupError
            ):  # a killed server may not have been started again
                server.signal(signal.SIGCONT)
        self.result.seconds = time.monotonic() - begin
        await asyncio.to_thread(self.loop.end)
        self._read_events()
        while self.samples:
            self._check_sample(self.samples.pop())
        return self.result

    def close(self) -> None:
        self.loop.close()
        for server in self.servers:
            server.process.stop()

    async def _until_loop(self, holds: Any, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not holds():
            if self.loop.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    "The ranks must continue to publish, but they have ended or are too slow. The "
                    f"end of their log:\n{self.loop.log_tail()}"
                )
            await asyncio.sleep(0.02)

    # -- events of the ranks -----------------------------------------------------------

    def _all_confirmed(self) -> bool:
        self._read_events()
        return len(self.confirmed) == NUM_SERVERS

    def _is_enough(self, wanted: int) -> bool:
        """Returns whether there were enough publishes, pushes and checks, and every kind of fault.

        On a slow machine, more versions are published than asked for.
        """
        self._read_events()
        result = self.result
        return (
            result.publishes >= wanted
            and result.pushes >= wanted // PUBLISHES_A_PUSH
            and min(result.kills, result.stops, result.losses, result.superseded) > 0
            and min(result.parameter_checks, result.completions_checked) > 10
        )

    def _read_events(self) -> None:
        events = self.loop.events[self.num_seen :]
        self.num_seen += len(events)
        for event in events:
            self._read_event(event)

    def _read_event(self, event: Event) -> None:
        result, kind = self.result, event["event"]
        if kind == "publish":
            result.publishes += 1
            self.num_published = event["version"]
            result.superseded, result.pushes = event["superseded"], event["pushes"]
            result.versions_alive = max(result.versions_alive, int(event["versions_alive"]))
            if result.versions_alive > NUM_SERVERS + 2:
                self._find(
                    f"{result.versions_alive} versions are alive, must be <= {NUM_SERVERS + 2}"
                )
        elif kind == "version":
            former = self.confirmed.get(event["url"], UNPUSHED)
            if event["version"] < former:  # equal is allowed: an idle lane repeats its version
                self._find(
                    f"{event['url']} confirmed version {event['version']} after version {former}"
                )
            self.confirmed[event["url"]] = event["version"]
            result.worst_lag = max(result.worst_lag, self.num_published - event["version"])
        elif kind == "lost":
            result.losses += 1
        elif kind == "sample":
            self.samples.append(event)
        elif kind == "violation":
            result.slot_or_bucket_errors += 1
            self._find(event["what"])

    def _find(self, what: str) -> None:
        self.result.found.append(what)

    # -- checks ------------------------------------------------------------------------

    async def _check(self, session: aiohttp.ClientSession, server: Server) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            lives = server.lives
            try:
                async with asyncio.timeout(5.0):
                    before = await self._named_version(session, server)
                    async with session.post(f"{server.url}/weights_checker", json={}) as answer:
                        ranks = (await answer.json())["ranks"]
                    after = await self._named_version(session, server)
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue  # the server is stopped, killed, or not yet up
            if server.lives == lives:
                digest = digest_of(ranks[0]["checksums"].items())
                self._compare(server, before, digest, after)

    async def _named_version(self, session: aiohttp.ClientSession, server: Server) -> int:
        async with session.get(f"{server.url}/model_info") as answer:
            label = (await answer.json())["weight_version"]
        return UNPUSHED if label == "default" else int(label)

    def _compare(self, server: Server, before: int, digest: str, after: int) -> None:
        """Checks that the parameters are those of a version that the server reported."""
        self.result.parameter_checks += 1
        if not server.newest <= before <= after:
            self._find(
                f"{server.url} reported version {server.newest}, then {before}, then {after}"
            )
        server.newest = after
        if digest not in (self.model.digest(v) for v in range(before, after + 1)):
            self.result.mixtures += 1
            self._find(
                f"{server.url} reports versions {before} to {after}, but serves none of them"
            )

    async def _rate(self) -> None:
        """Checks completions, the oldest first. Those that are left are checked at the end."""
        while True:
            self._read_events()
            if self.samples:
                self._check_sample(self.samples.pop(0))
            await asyncio.sleep(0.01)

    def _check_sample(self, sample: Event) -> None:
        self.result.completions_checked += 1
        self.result.completions_over_versions += len(sample["segments"]) > 1
        if sample["segments"][0][0] < sample["attested"]:
            self._find(f"a completion of {sample['segments']} began below {sample['attested']}")
        error = self.model.sample_error(sample)
        if not error <= TOLERANCE:
            self.result.mixtures += 1
            self._find(
                f"the logprobs of a completion of versions {sample['segments']} differ by "
                f"{error:.3g}"
            )

    # -- faults ------------------------------------------------------------------------

    async def _harm(self) -> None:
        """Stops or kills a server after every so many publishes. One server always stays healthy.

        A server is killed only while no other server is starting, because a start may take long.
        """
        every = max(self.arguments.publishes // 40, 30)
        async with asyncio.TaskGroup() as tasks:
            starting: asyncio.Task[None] | None = None
            for number in itertools.count(1):
                while self.result.publishes < number * every:
                    await asyncio.sleep(0.02)
                well = [server for server in self.servers if not server.is_sick]
                if len(well) < 2:
                    continue
                server, none_starts = self.random.choice(well), starting is None or starting.done()
                server.is_sick = (
                    True  # set now, because the next server may be chosen before the task runs
                )
                if none_starts and (number == 1 or self.random.random() < 0.5):
                    starting = tasks.create_task(self._kill(server))
                else:
                    tasks.create_task(self._stop(server))

    async def _kill(self, server: Server) -> None:
        self.result.kills += 1
        server.lives += 1
        server.signal(signal.SIGKILL)
        await asyncio.to_thread(server.process.process.wait, 10)
        await asyncio.sleep(self.random.uniform(0.0, 1.0))
        server.start()
        while server.newest == UNPUSHED:  # until a check has found pushed weights
            await asyncio.sleep(0.05)
        server.is_sick = False

    async def _stop(self, server: Server) -> None:
        self.result.stops += 1
        server.signal(signal.SIGSTOP)
        # Some of these times are shorter than the timeouts, and only delay a push.
        await asyncio.sleep(self.random.choice((0.2, 1.0, 5.0)))
        server.signal(signal.SIGCONT)
        server.is_sick = False


def show(result: Result) -> None:
    """Prints the table."""
    rows = {name: value for name, value in asdict(result).items() if name != "found"}
    width = max(map(len, rows))
    for name, value in rows.items():
        shown = f"{value:.1f}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' '):<{width}}  {shown:>8}")
    for what in result.found[:20]:
        print(f"FOUND: {what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="publish 2000 versions")
    parser.add_argument("--publishes", type=int, help="number of versions; default: 500")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    # Defects that the checks must find: parameters that are overwritten without the fence, or a
    # slot that is written without being reserved.
    parser.add_argument("--inject", choices=("fence", "slot"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.publishes = arguments.publishes or (2000 if arguments.all else 500)
    held = contextlib.closing(HeldPorts(NUM_SERVERS))
    with tempfile.TemporaryDirectory() as folder, held as ports:
        stress = Stress(arguments, Path(folder), ports.ports)
        try:
            result = asyncio.run(stress.run())
        finally:
            stress.close()
    if arguments.json:
        figures = {"publishes_wanted": arguments.publishes, **asdict(result)}
        print(json.dumps({"benchmark": "torn_free", "ok": result.is_clean, "figures": figures}))
    else:
        show(result)
    return 0 if result.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
