"""A trainer that only publishes: the real publisher with a real, tiny model.

    torchrun ... publishing_loop.py '{"socket": ..., ...}'

Each optimizer step is replaced by writing the next tagged version (see `tagged.py`) into
the parameters. Rank 0 keeps completions in flight through the real dispatcher, and tells all
that happens to whoever listens on the socket. It ends when it hears anything from there.
"""

# ruff: noqa: E402  (the device is settled before torchtitan's modules read it)

import json
import logging
import os
import random
import sys
import threading
from dataclasses import dataclass
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

from torchtitan.grpo.models.hf_weights import hf_meta
from torchtitan.grpo.models.shards import local_tensor, named_parameters
from torchtitan.grpo.start.entry import leave
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync.attestation import attested_tokens
from torchtitan.grpo.weight_sync.build import build_publisher
from torchtitan.grpo.weight_sync.publisher import WeightPublisher

_SEQ_LEN = 64


@dataclass
class Settings:
    socket: str
    model: str
    servers: list[list[Any]]
    pause_seconds: tuple[float, float]
    weight_sync: dict[str, Any]
    control_timeout_seconds: float
    num_requests: int
    num_tokens: int
    seed: int
    delays: float
    inject: str | None


class Listener:
    """The connection to the driver; any thread may send events."""

    def __init__(self, socket: str) -> None:
        self.connection: Connection = Client(socket, "AF_UNIX")
        self._lock = threading.Lock()

    def tell(self, event: str, **what: Any) -> None:
        with self._lock:
            self.connection.send({"event": event, "rank": dist.get_rank(), **what})


class Link:
    """Takes the place of the link to the rollout process, and reports versions and losses."""

    def __init__(self, listener: Listener, sampler: Sampler) -> None:
        self._listener, self._sampler = listener, sampler
        self.watch = self

    def poll(self) -> None:
        """The servers do not change."""

    def notify_version(self, url: str, version: int, pause_seconds: float) -> None:
        self._listener.tell("version", url=url, version=version)
        self._sampler.set_version(url, version)

    def notify_asleep(self, url: str) -> None:
        raise AssertionError("no server is lent")

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
        hooks = loop_hooks.Hooks(listener.tell, settings)
        loop_hooks.install(hooks, self.model, self.expected_shard)
        self.version, self.is_going = 0, True
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
        while self._publish_next():
            seconds = self.random.uniform(*self.settings.pause_seconds)
            if self.is_leader and self.listener.connection.poll(seconds):
                self.is_going = False
        # The leader's publisher is closed first, because gathering needs all ranks.
        if self.is_leader:
            self.sampler.close()
            self.publisher.close(timeout_seconds=20.0)
        dist.barrier()
        if self.is_leader:
            self.publisher.raise_if_failed()
        else:
            self.publisher.close(timeout_seconds=20.0)

    def _publish_next(self) -> bool:
        going = torch.tensor([self.is_going and self.publisher.error is None, 0])
        if self.is_leader:
            self.publisher.raise_if_failed()
            going[1] = self.publisher.reserve_slot()
        dist.broadcast(going, src=0)
        if not going[0]:
            return False
        slot = int(going[1])
        if self.settings.inject != "fence":
            self.publisher.fence()
        for name, shard in self.shards.items():
            torch.mul(self.first[name], factor(self.hf_names[name], self.version), out=shard)
        if self.settings.inject == "slot" and self.last_slot is not None:
            self.publisher.snapshots.copy_into(self.last_slot)
        self.last_slot = slot
        self.publisher.publish(self.version, slot)
        if self.is_leader:
            self._tell_of(self.version, self.publisher)
        self.version += 1
        return True

    def _tell_of(self, version: int, publisher: WeightPublisher) -> None:
        if publisher.is_attested(version):
            tokens = attested_tokens(self.built.config, VOCAB_SIZE)
            publisher.probes.put(version, self.model.logprobs(version, tokens))
        self.listener.tell(
            "publish",
            version=version,
            superseded=publisher.slots.num_superseded,
            versions_alive=publisher.metrics()["weight_sync/versions_alive"],
            pushes=sum(lane.num_pushes for lane in publisher.lanes),
        )


def main() -> int:
    settings = Settings(**json.loads(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    built = build(settings.model, _SEQ_LEN, dp_shard=int(os.environ["WORLD_SIZE"]))
    Trainer(settings, built, Listener(settings.socket)).run()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main)
