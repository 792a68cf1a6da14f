# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the ranks of `push_exactness.py`: publishes versions under several layouts, one by one.

    torchrun --nproc_per_node=N benchmarks/push_run.py JOBS.json RESULTS.json

The model, the shards and the publisher are the trainer's own. Only the optimizer is replaced: its
arithmetic gives the same bits under every layout.
"""

# ruff: noqa: E402  (the device is settled before torchtitan's modules read it)

import json
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from torchtitan.grpo.system.device import settle_device

settle_device()

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from torchtitan.grpo.config_checks import check_model, load_config
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.models.hf_weights import full_hf_tensors
from torchtitan.grpo.models.shards import local_tensor, named_parameters
from torchtitan.grpo.observe.console import init_console
from torchtitan.grpo.start.entry import leave
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync.build import build_publisher
from torchtitan.grpo.weight_sync.gather import agree_on_push
from torchtitan.grpo.weight_sync.plan import families_of
from torchtitan.grpo.weight_sync.publisher import WeightPublisher
from torchtitan.grpo.weight_sync.slot_layout import PushPlan
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo_train import GRPOTrainer

PUSH_SECONDS = 120.0
NUM_VERSIONS = 2
# Each source then sends several buckets.
BUCKET_BYTES = 100_000


def step(tensor: torch.Tensor, version: int) -> None:
    """Changes a tensor in place of an optimizer step. Each element is rounded in the same way."""
    tensor.mul_(1.0 + 1.0 / (version + 3)).add_(0.001 * (version + 1))


class Layout:
    """Publishes the model under one layout, and compares it with the server after each push."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        config = load_config([*job["args"]])
        hf_model = read_hf_model(config.model.hf_assets_path)
        check_model(config, hf_model)
        self.trainer = GRPOTrainer(
            config, hf_model, StopRequest(60.0), RankChannel(60.0, lambda lost: None)
        )
        self.trainer._load_weights()
        self.url = str(job["url"])
        self.problems: list[str] = []
        parameters = dict(named_parameters(self.trainer.model_parts))
        plan = agree_on_push(
            parameters,
            self.trainer.sd_adapter,
            torch.float32,
            BUCKET_BYTES,
            max_sources=config.weight_sync.max_sources,
        )
        self.sources = {source.rank: source.num_bytes for source in plan.sources}
        self._check_even(plan)
        self.num_pushes = 0
        self.of_file: dict[str, torch.Tensor] = {}
        if self.is_leader:
            for file in Path(hf_model.path).glob("*.safetensors"):
                self.of_file |= load_file(file)

    def _check_even(self, plan: PushPlan) -> None:
        """Checks that sources that hold the same weights send about the same number of bytes."""
        assemblies = [a for s in plan.sources for b in s.buckets for a in b.assemblies]
        for family in families_of(assemblies):
            sent = [self.sources.get(rank, 0) for rank in sorted(family)]
            largest = max(
                size
                for source in plan.sources
                if source.rank in family
                for bucket in source.buckets
                for size in bucket.num_bytes_of.values()
            )
            if max(sent) > max(1.05 * sum(sent) / len(sent), largest):
                self.problems.append(f"ranks {sorted(family)} send {sent} bytes, which is uneven")

    @property
    def is_leader(self) -> bool:
        return dist.get_rank() == 0

    def publish_all(self, wire: Literal["float32", "bfloat16"], first_version: int) -> None:
        """Publishes versions in one dtype, and compares the server with each of them."""
        publisher = self._publisher(wire)
        try:
            for version in range(first_version, first_version + NUM_VERSIONS):
                expected = self._publish(publisher, version, getattr(torch, wire))
                if self.is_leader:
                    publisher.wait_for(version, PUSH_SECONDS, lambda: False)
                    self._compare(expected, version, wire)
            if self.is_leader:
                self.num_pushes += sum(lane.num_pushes for lane in publisher.lanes)
                assert publisher.num_failures == 0, publisher.lanes[0].last_error
            dist.barrier()  # no rank leaves before the last push has ended
            publisher.raise_if_failed()
        finally:
            publisher.close()

    def _publisher(self, wire: Literal["float32", "bfloat16"]) -> WeightPublisher:
        trainer, sync = self.trainer, self.trainer.config.weight_sync
        sync.dtype, sync.bucket_bytes, sync.attest_every = wire, BUCKET_BYTES, 0
        sync.checksum = True
        link: Any = SimpleNamespace(
            notify_version=lambda url, version, pause: None,
            notify_lost=lambda url, reason: print(f"{url} was lost: {reason}", flush=True),
            notify_asleep=lambda url: None,
            watch=SimpleNamespace(poll=lambda: None),
        )
        return build_publisher(
            trainer.config,
            trainer.model_parts,
            trainer.sd_adapter,
            torch.device("cpu"),
            trainer.channel,
            link if self.is_leader else None,
            [ServerInfo(self.url, "embedded")] if self.is_leader else [],
            trainer.hf_model.vocab_size,
        )

    def _publish(
        self, publisher: WeightPublisher, version: int, wire: torch.dtype
    ) -> dict[str, dict[str, int]]:
        """Publishes new weights, while rank 0 computes the checksums that the server must report."""
        trainer = self.trainer
        slot = torch.tensor(publisher.reserve_slot() if self.is_leader else 0)
        dist.broadcast(slot, src=0)
        publisher.fence()
        with torch.no_grad():
            for _, parameter in named_parameters(trainer.model_parts):
                step(local_tensor(parameter), version)
            for tensor in self.of_file.values():
                step(tensor, version)
        publisher.publish(version, int(slot))
        # The training thread runs collectives while those of the publisher are under way.
        exported = full_hf_tensors(trainer.model_parts, trainer.sd_adapter, torch.float32)
        export = {name: served_checksum(tensor, wire) for name, tensor in exported}
        of_file = {name: served_checksum(tensor, wire) for name, tensor in self.of_file.items()}
        return {"the export": export, "the file": of_file}

    def _compare(self, expected: dict[str, dict[str, int]], version: int, wire: str) -> None:
        num_groups = len(ask(self.url, "/server_info")["weight_groups"])
        if num_groups != len(self.sources):
            self.problems.append(
                f"there are {len(self.sources)} sources, but the server has {num_groups} groups"
            )
        served = ask(self.url, "/weights_checker", action="checksum")["ranks"][0]["checksums"]
        for where, sums in expected.items():
            # A server lists a tied weight under each of its names, but a file has one of the names.
            sums.setdefault("lm_head.weight", sums["model.embed_tokens.weight"])
            self.problems += [
                f"version {version} in {wire}: {name} differs from {where}"
                for name in sorted(sums.keys() | served.keys())
                if sums.get(name) != served.get(name)
            ]

    def result(self) -> dict[str, Any]:
        return {
            "ok": not self.problems and self.num_pushes == 2 * NUM_VERSIONS,
            "sources": sorted(self.sources),
            "source_bytes": list(self.sources.values()),
            "pushes": self.num_pushes,
            "problems": self.problems,
        }


def served_checksum(tensor: torch.Tensor, wire: torch.dtype) -> int:
    """Returns the checksum that a float32 server has for a tensor after the transfer."""
    return tensor_checksum(tensor.to(wire).to(torch.float32))


def ask(url: str, route: str, **body: Any) -> Any:
    """Sends a GET request, or a POST request if there is a body; returns the server's answer."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url + route, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    layout = Layout(job)
    try:
        layout.publish_all("float32", 0)
        layout.publish_all("bfloat16", NUM_VERSIONS)
        return layout.result()
    finally:
        layout.trainer.close()
        layout.trainer.channel.close()


def main() -> int:
    init_console("warning", is_rank_zero=False)
    results = [run_job(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main)
