"""Publishes to a real server while the training thread uses process groups of its own."""

import json
import time
import urllib.request
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from build_model import build

from torchtitan.grpo.inference.embedded.weights import tensor_sha256
from torchtitan.grpo.models.hf_weights import full_hf_tensors
from torchtitan.grpo.models.shards import local_tensor, named_parameters
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync.build import build_publisher

NUM_VERSIONS = 12
PUSH_SECONDS = 180.0


def post(url: str, route: str, **body: Any) -> Any:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url + route, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def served(url: str) -> tuple[int, dict[str, str]] | None:
    """Returns a version and its checksums, or ``None`` if it changed between the two requests."""
    before = post(url, "/server_info")["weight_version"]
    sums = post(url, "/weights_checker", action="checksum")["ranks"][0]["checksums"]
    after = post(url, "/server_info")["weight_version"]
    return (int(after), sums) if before == after and after.isdigit() else None


def main(arguments):
    url = arguments["url"]
    built = build(arguments["model"], seq_len=8, **arguments["layout"])
    parameters = dict(named_parameters(built.parts))
    is_leader = dist.get_rank() == 0
    built.config.weight_sync.bucket_bytes = 10_000
    built.config.weight_sync.attest_every = 0
    told: list[int] = []
    link: Any = SimpleNamespace(
        notify_version=lambda url, version: told.append(version),
        notify_lost=lambda url, reason: None,
        watch=SimpleNamespace(poll=lambda: None),
    )
    channel = RankChannel(60.0, lambda lost: None)
    channel.start()
    publisher = build_publisher(
        built.config, built.parts, built.adapter, torch.device("cpu"), channel,
        link if is_leader else None, [ServerInfo(url, "embedded")] if is_leader else [], 61,
    )  # fmt: skip

    def is_awaited(version: int) -> bool:
        """Returns whether to wait for the server: only for the last but one version."""
        is_late = time.monotonic() > began + PUSH_SECONDS
        return version == NUM_VERSIONS - 2 and not told and not is_late

    began = time.monotonic()
    expected: dict[int, dict[str, str]] = {}
    seen: dict[int, dict[str, str]] = {}
    wrong_sums = num_collectives = 0
    for version in range(NUM_VERSIONS):
        slot = torch.tensor(publisher.reserve_slot() if is_leader else 0)
        dist.broadcast(slot, src=0)
        publisher.fence()
        with torch.no_grad():
            for parameter in parameters.values():
                local_tensor(parameter).add_(1.0)
        publisher.publish(version, int(slot))
        # Collectives of the training thread while the publisher's are under way.
        whole = full_hf_tensors(built.parts, built.adapter, torch.float32)
        expected[version] = {name: tensor_sha256(tensor) for name, tensor in whole}
        ends = torch.tensor(time.monotonic() + 0.2)
        while True:
            total = torch.ones(1000) * (dist.get_rank() + 1)
            dist.all_reduce(total)
            ranks = dist.get_world_size()
            wrong_sums += int((total != ranks * (ranks + 1) / 2).sum())
            num_collectives += 1
            goes_on = torch.tensor(time.monotonic() < float(ends) or is_awaited(version))
            dist.broadcast(goes_on, src=0)
            if not goes_on:
                break
        if is_leader and (now := served(url)) is not None:
            seen[now[0]] = now[1]
    if is_leader:
        publisher.wait_for(NUM_VERSIONS - 1, PUSH_SECONDS, lambda: False)
        last = served(url)
        assert last is not None, "nobody pushes any more"
        seen[last[0]] = last[1]
    dist.barrier()  # the other sources have sent their share of the last version
    publisher.raise_if_failed()
    failures = publisher.num_failures
    publisher.close()
    return {
        # A lane that is idle for long says again what its server has.
        "told": [version for version, _ in groupby(told)],
        "seen": sorted(seen),
        "unequal": [version for version, sums in seen.items() if sums != expected[version]],
        "failures": failures,
        "wrong_sums": wrong_sums,
        "num_collectives": num_collectives,
    }
