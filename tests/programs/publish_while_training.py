"""Publishes versions from pipeline stages while the training thread uses its own groups."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from build_model import build

from torchtitan.grpo.models.hf_weights import full_hf_tensors, named_parameters
from torchtitan.grpo.weight_sync.connection import Bucket, PushReport
from torchtitan.grpo.weight_sync.gather import Gatherer
from torchtitan.grpo.weight_sync.publisher import WeightPublisher
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.snapshot import Snapshots

CPU = torch.device("cpu")
NUM_VERSIONS = 6


class RecordingConnection:
    """Stands in for the connection to a server: keeps what it is given."""

    def __init__(self) -> None:
        self.client = SimpleNamespace(url="recorder", close=self.close)
        self.pushed: dict[int, dict[str, torch.Tensor]] = {}

    async def join(self) -> None: ...

    async def close(self) -> None: ...

    async def push(self, version: int, buckets: list[Bucket]) -> PushReport:
        tensors = {}
        for bucket in buckets:
            flat = bucket.payload.clone().view(torch.float32)
            sizes = [torch.Size(shape).numel() for shape in bucket.spec.shapes]
            tensors |= dict(zip(bucket.spec.names, flat.split(sizes), strict=True))
        self.pushed[version] = tensors
        return PushReport(version, 0, 0.0, 0.0)


def main(arguments):
    built = build(arguments["model"], seq_len=8, **arguments["layout"])
    parameters = dict(named_parameters(built.parts))
    is_leader = dist.get_rank() == 0
    connection = RecordingConnection()
    publisher = WeightPublisher(
        snapshots=Snapshots(parameters, 2, torch.float32, CPU),
        slots=SlotTable(2),
        gatherer=Gatherer(
            parameters, built.adapter, wire_dtype=torch.float32, bucket_bytes=10_000,
            backend="gloo", timeout_seconds=60.0, payload_device=CPU, device=CPU,
        ),
        make_connections=(lambda: [connection]) if is_leader else None,  # pyright: ignore
        on_version=lambda url, version: None,
        on_lost=lambda url, reason: None,
        command_timeout_seconds=60.0,
    )  # fmt: skip
    expected = {}
    for version in range(NUM_VERSIONS):
        slot = torch.tensor(publisher.reserve_slot() if is_leader else 0)
        dist.broadcast(slot, src=0)
        publisher.fence()
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(1.0)
        publisher.publish(version, int(slot))
        # Collectives of the training thread while the publisher's are under way.
        whole = full_hf_tensors(built.parts, built.adapter, torch.float32)
        expected[version] = {name: tensor.clone().view(-1) for name, tensor in whole}
    if is_leader:
        publisher.wait_for(NUM_VERSIONS - 1, 60.0, lambda: False)
    dist.barrier()  # the followers have answered the last command
    publisher.raise_if_failed()
    publisher.close()
    return {
        "pushed": sorted(connection.pushed),
        "unequal": [
            f"{version} {name}"
            for version, tensors in connection.pushed.items()
            for name, tensor in expected[version].items()
            if not torch.equal(tensor, tensors.pop(name))
        ],
        "unexpected": [name for tensors in connection.pushed.values() for name in tensors],
    }
