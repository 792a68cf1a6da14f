# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A trainer that only publishes: the real publisher with a real, tiny model.

    python publishing_loop.py '{"socket": ..., ...}'     (or under torchrun)

Each optimizer step is replaced by writing the next tagged version (see `tagged.py`) into
the parameters. Rank 0 keeps completions in flight through the real dispatcher, tells all
that happens to whoever listens on the socket, and takes commands from there: to stop at a
named point of a push, and to do a push some harm.
"""

# ruff: noqa: E402  (the device is settled before torchtitan's modules read it)

import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Client, Connection
from typing import Any

from torchtitan.grpo.system.device import settle_device

settle_device()

import loop_hooks
import torch
import torch.distributed as dist
from build_model import Built, build
from loop_sampler import Sampler
from tagged import VOCAB_SIZE, TaggedModel, factor

from torchtitan.grpo.attestation import attested_tokens
from torchtitan.grpo.entry import leave
from torchtitan.grpo.models.hf_weights import hf_meta
from torchtitan.grpo.models.shards import local_tensor, named_parameters
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync.build import build_publisher
from torchtitan.grpo.weight_sync.publisher import WeightPublisher

_SEQ_LEN = 64


@dataclass
class Settings:
    socket: str
    model: str
    servers: list[list[Any]]
    start_version: int = 0
    pause_seconds: tuple[float, float] = (0.15, 0.25)
    weight_sync: dict[str, Any] = field(default_factory=dict)
    control_timeout_seconds: float = 4.0
    num_requests: int = 2
    num_tokens: int = 24
    seed: int = 0
    delays: float = 0.0
    inject: str | None = None
    waits: bool = False
    tells_calls: bool = True


class Listener:
    """The connection to the driver; any thread may send events."""

    def __init__(self, socket: str) -> None:
        self._connection: Connection = Client(socket, "AF_UNIX")
        self._lock = threading.Lock()

    def tell(self, event: str, **what: Any) -> None:
        message = {"event": event, "rank": dist_rank(), "at": time.monotonic(), **what}
        with self._lock:
            self._connection.send(message)

    def poll(self, timeout_seconds: float) -> dict[str, Any] | None:
        if not self._connection.poll(timeout_seconds):
            return None
        return self._connection.recv()


class Link:
    """Takes the place of the link to the rollout process, and reports versions and losses."""

    def __init__(self, listener: Listener, sampler: Sampler) -> None:
        self._listener, self._sampler = listener, sampler
        self.watch = self

    def poll(self) -> None:
        """The servers do not change."""

    def notify_version(self, url: str, version: int) -> None:
        self._listener.tell("version", url=url, version=version)
        self._sampler.set_version(url, version)

    def notify_lost(self, url: str, reason: str) -> None:
        self._listener.tell("lost", url=url, reason=reason)
        self._sampler.set_lost(url, reason)


class Trainer:
    def __init__(self, settings: Settings, built: Built, listener: Listener) -> None:
        self.settings, self.built, self.listener = settings, built, listener
        self.is_leader = dist.get_rank() == 0
        self.random = random.Random(settings.seed + dist.get_rank())
        self.model = TaggedModel(settings.model)
        self.parameters = dict(named_parameters(built.parts))
        self.shards = {name: local_tensor(p) for name, p in self.parameters.items()}
        self.first = {name: shard.clone() for name, shard in self.shards.items()}
        self.hf_names = {
            name: next(iter(hf_meta(built.adapter, name, p.shape)))
            for name, p in self.parameters.items()
        }
        self.hooks = loop_hooks.Hooks(listener.tell, settings)
        loop_hooks.install(self.hooks, self.model, self.expected_shard)
        self.version = settings.start_version
        self.last_slot: int | None = None
        self.channel = RankChannel(600.0, lambda lost: None)
        self.channel.start()
        self.publisher = self._build_publisher()

    def expected_shard(self, name: str, version: int) -> torch.Tensor:
        return self.first[name] * factor(self.hf_names[name], version)

    def _build_publisher(self) -> WeightPublisher:
        settings, config = self.settings, self.built.config
        for name, value in settings.weight_sync.items():
            assert hasattr(config.weight_sync, name), name
            setattr(config.weight_sync, name, value)
        config.inference.control_timeout_seconds = settings.control_timeout_seconds
        servers = [ServerInfo(url, kind) for url, kind in settings.servers]
        link = None
        if self.is_leader:
            self.sampler = Sampler(
                servers, settings.num_requests, settings.num_tokens, self.listener.tell
            )
            link = Link(self.listener, self.sampler)
        return build_publisher(
            config, self.built.parts, self.built.adapter, torch.device("cpu"),
            self.channel, link, servers if self.is_leader else [], VOCAB_SIZE,  # pyright: ignore
        )  # fmt: skip

    def run(self) -> None:
        self.listener.tell("began", pid=os.getpid())
        while self._publish_next():
            self._pause()
        self._close_publisher()
        for thread in threading.enumerate():
            if thread.name.startswith("weight"):
                # A broadcast that was given up lasts until the group's timeout, which tests set
                # to a few seconds.
                thread.join(15.0)
        self.listener.tell("ended", threads=[t.name for t in threading.enumerate()])

    def _publish_next(self) -> bool:
        going = torch.tensor([self.hooks.is_going and self.publisher.error is None, 0])
        if self.is_leader:
            self.publisher.raise_if_failed()
            going[1] = self.publisher.reserve_slot()
        dist.broadcast(going, src=0)
        if not going[0]:
            return False
        slot, begin = int(going[1]), time.perf_counter()
        if self.settings.inject != "fence":
            self.publisher.fence()
        fenced = time.perf_counter()
        for name, shard in self.shards.items():
            torch.mul(self.first[name], factor(self.hf_names[name], self.version), out=shard)
        if self.settings.inject == "slot" and self.last_slot is not None:
            self.publisher.snapshots.copy_into(self.last_slot)
        self.last_slot = slot
        written = time.perf_counter()
        self.publisher.publish(self.version, slot)
        boundary = fenced - begin + time.perf_counter() - written
        if self.is_leader:
            self._tell_of(boundary)
        self.version += 1
        return True

    def _tell_of(self, boundary: float) -> None:
        version, publisher = self.version, self.publisher
        if publisher.is_attested(version):
            tokens = attested_tokens(self.built.config, VOCAB_SIZE)
            publisher.probes.put(version, self.model.logprobs(version, tokens))
        self.listener.tell(
            "publish",
            version=version,
            boundary_seconds=boundary,
            superseded=publisher.slots.num_superseded,
            versions_alive=publisher.metrics()["weight_sync/versions_alive"],
            pushes=sum(lane.num_pushes for lane in publisher.lanes),
            states={lane.url: lane.state.value for lane in publisher.lanes},
        )

    def _pause(self) -> None:
        """Waits until the next publish; rank 0 executes commands meanwhile."""
        seconds = self.random.uniform(*self.settings.pause_seconds)
        if not self.is_leader:
            return  # waits for rank 0 in the next broadcast
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            command = self.listener.poll(left)
            if command is not None:
                self._obey(command)

    def _obey(self, command: dict[str, Any]) -> None:
        what = command.pop("command")
        if what == "status":
            self.listener.tell(
                "status",
                threads=[t.name for t in threading.enumerate()],
                errors={lane.url: lane.last_error for lane in self.publisher.lanes},
            )
        elif what == "file_limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (command["bytes"], resource.RLIM_INFINITY))
            self.listener.tell("file_limit", bytes=command["bytes"])
        elif what == "rebuild":
            self._close_publisher()
            self.settings.weight_sync |= command["weight_sync"]
            self.publisher = self._build_publisher()
            self.listener.tell("rebuilt")
        else:
            getattr(self.hooks, what)(**command)

    def _close_publisher(self) -> None:
        """Closes the leader's publisher first, because gathering needs all ranks."""
        if self.is_leader:
            self.sampler.close()
            self.publisher.close(timeout_seconds=20.0)
        dist.barrier()
        if self.is_leader:
            self.publisher.raise_if_failed()
        else:
            self.publisher.close(timeout_seconds=20.0)


def dist_rank() -> int:
    return int(os.environ["RANK"])


def main() -> int:
    settings = Settings(**json.loads(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    listener = Listener(settings.socket)
    built = build(settings.model, _SEQ_LEN, dp_shard=int(os.environ["WORLD_SIZE"]))
    listener.tell("loaded", settings=asdict(settings))
    while settings.waits:
        command = listener.poll(3600.0)
        assert command is not None
        if command.pop("command") == "go":
            settings.waits, settings.start_version = False, command["start_version"]
    trainer = Trainer(settings, built, listener)
    trainer.run()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main)
