# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A trainer of one rank in this process, which pushes to servers and does not train."""

# ruff: noqa: E402  (the device must be settled before the trainer's modules are imported)

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from torchtitan.grpo.system.device import settle_device

settle_device()

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.models.hf_weights import full_hf_tensors, load_hf_weights
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.training.model_spec import hf_train_spec
from torchtitan.grpo.types import ServerInfo, ServerKind
from torchtitan.grpo.weight_sync.build import build_publisher
from torchtitan.grpo.weight_sync.lane import Lane, LaneState
from torchtitan.grpo.weight_wire.checksum import tensor_checksum

MODEL = Path(__file__).resolve().parents[2] / "assets/reverse_digits/model"
PATIENCE = 300.0
T = TypeVar("T")


def wait_until(look: Callable[[], T | None], what: str = "", poll_seconds: float = 0.01) -> T:
    """Calls ``look`` until it returns something true, and returns that."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        time.sleep(poll_seconds)
    return found


def ask(url: str, route: str, **body: Any) -> Any:
    """The server's answer; posts where there is a body."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url + route, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def checksums(url: str) -> dict[str, int]:
    return ask(url, "/weights_checker", action="checksum")["ranks"][0]["checksums"]


class LoneTrainer:
    """A model, its publisher, and the notices that the rollout process would receive.

    ``kind`` is that of the first server; all others are embedded.
    """

    def __init__(
        self,
        urls: list[str],
        disk_path: Path,
        *,
        kind: ServerKind = "embedded",
        model: Path = MODEL,
        keys: dict[str, str] | None = None,
        control_seconds: float = 2.0,
        **sync: Any,
    ) -> None:
        config = JobConfig()
        config.model.hf_assets_path = str(model)
        for name, key in (keys or {}).items():
            setattr(config.inference, name, key)
        config.training.seq_len = 32
        config.training.mixed_precision_param = "float32"
        config.inference.control_timeout_seconds = control_seconds
        settings = {
            "bucket_bytes": 60_000,
            "attest_every": 0,
            "timeout_seconds": 3.0,
            "push_timeout_seconds": 12.0,
            "retry_seconds": 0.1,
            "max_retry_seconds": 0.5,
        }
        if sync.get("transport") == "disk":
            settings["disk_path"] = str(disk_path)
        for key, value in (settings | sync).items():
            setattr(config.weight_sync, key, value)
        hf_model = read_hf_model(str(model))
        model_args: Any = hf_model.model_args
        model_args.update_from_config(config)
        spec = hf_train_spec(hf_model, config)
        with torch.device("meta"):
            self.model: Any = spec.model_cls(model_args)
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights()
        assert spec.state_dict_adapter is not None
        self.adapter = spec.state_dict_adapter(model_args, str(model))
        load_hf_weights([self.model], self.adapter, model)
        self.version = -1
        self.expected: dict[int, dict[str, int]] = {}
        self.told: list[tuple[str, int]] = []
        self.news: list[list[ServerInfo]] = []
        link: Any = SimpleNamespace(
            notify_version=lambda url, version, _: self.told.append((url, version)),
            notify_lost=lambda url, reason: self.told.append((url, -1)),
            notify_asleep=lambda url: self.told.append((url, -2)),
            watch=SimpleNamespace(poll=lambda: self.news.pop(0) if self.news else None),
        )
        infos = [ServerInfo(url, "embedded" if i else kind) for i, url in enumerate(urls)]
        self.publisher = build_publisher(
            config, [self.model], self.adapter, torch.device("cpu"), RankChannel(60.0, print), link,
            infos, 128,
        )  # fmt: skip

    def publish(self) -> int:
        self.version += 1
        slot = self.publisher.reserve_slot()
        self.publisher.fence()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.view(-1)[self.version % 7 :: 101] += 0.01
        self.publisher.publish(self.version, slot)
        sums = {name: tensor_checksum(tensor) for name, tensor in self.weights()}
        self.expected[self.version] = sums
        return self.version

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return full_hf_tensors([self.model], self.adapter, torch.float32)

    def publish_until_under_way(self, url: str) -> None:
        """Publishes until a push to the server is seen in progress; each push is short."""

        def is_under_way() -> bool:
            if not self.publisher.lanes:
                return False  # its thread has only just been started
            lane = self.lane(url)
            if lane.state is LaneState.READY and lane.version == self.version:
                self.publish()
            return lane.state is LaneState.SYNCING

        self.publish()
        wait_until(is_under_way, f"a push to {url}", poll_seconds=0.001)

    def lane(self, url: str) -> Lane:
        (lane,) = [lane for lane in self.publisher.lanes if lane.url == url]
        return lane

    def wait_served(self, url: str, version: int | None = None) -> None:
        """Returns when the server's lane is ready with the version, by default the newest."""
        wanted = self.version if version is None else version

        def is_served() -> bool:
            self.publisher.raise_if_failed()
            if not self.publisher.lanes:
                return False  # its thread has only just been started
            lane = self.lane(url)
            return lane.version >= wanted and lane.state is LaneState.READY

        wait_until(is_served, f"{url} serves version {wanted}")

    def wait_lost(self, url: str) -> None:
        wait_until(lambda: self.lane(url).is_lost, f"{url} is lost")

    def assert_serves_newest(self, url: str) -> None:
        self.wait_served(url)
        assert ask(url, "/server_info")["weight_version"] == str(self.version)
        assert checksums(url) == self.expected[self.version]

    def versions_told(self, url: str) -> list[int]:
        """Returns the reported versions in order, with -1 for a loss."""
        versions = [version for told, version in self.told if told == url]
        # An idle lane says again what its server has.
        return [version for version, _ in groupby(versions)]
