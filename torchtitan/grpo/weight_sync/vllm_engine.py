# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""vLLM's end of a weight group: receives buckets and loads them, in each worker.

An update goes ``start -> (check) -> receive* -> finish``, or ``abandon`` instead of what
is left of it. vLLM rebuilds a layer once all its weights have come, and until then the
layer has none; so nothing is touched before the first bucket has arrived whole, and
whatever goes wrong, every layer is given weights again: the new ones where they were
complete, the old ones elsewhere. Such a mixture must not be served as any version, which
the client sees to.
"""

import json
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from torchtitan.grpo.weight_sync.process_group import create_weight_group, destroy_weight_group

logger = init_logger(__name__)


@dataclass
class GroupInitInfo(WeightTransferInitInfo):
    """Body of ``/init_weight_transfer_engine``: the client's ``WeightGroupInfo``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_seconds: float


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """Body of ``/update_weights``: what to do, and the bucket it is about."""

    action: Literal["check", "receive", "abandon"]
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class TorchGroupWeightEngine(WeightTransferEngine[GroupInitInfo, BucketUpdateInfo]):
    """Receives each bucket as one uint8 broadcast from rank 0 of a torch process group."""

    init_info_cls = GroupInitInfo
    update_info_cls = BucketUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: dist.ProcessGroup | None = None
        self._loading = False
        self._expected: dict[str, tuple[int, ...]] | None = None

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        """Joins the trainer's group, after leaving a former one."""
        self._leave()
        self._group = create_weight_group(
            init_info.master_address,
            init_info.master_port,
            init_info.rank_offset + self.parallel_config.rank,
            init_info.world_size,
            init_info.group_name,
            init_info.backend,
            init_info.timeout_seconds,
        )

    def start_weight_update(self) -> None:
        """Nothing yet: a model without weights must not wait for the first bucket."""
        self._abandon()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Does the action of one request; a failed one leaves no layer without weights."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
        except BaseException:
            self._abandon()
            raise

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """See :class:`BucketUpdateInfo`."""
        if update_info.action == "abandon":
            self._abandon()
            return
        self._refuse_wrong_weights(update_info)
        if update_info.action == "check":
            return
        weights = self._receive(update_info)
        if not self._loading:
            initialize_layerwise_reload(self.model)
            self._loading = True
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        """Finishes the layers that vLLM treats last (attention, padded embeddings)."""
        if self._loading:
            finalize_layerwise_reload(self.model, self.model_config)
            self._loading = False

    def shutdown(self) -> None:
        """Leaves the group."""
        self._abandon()
        self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            destroy_weight_group(group)

    def _receive(self, bucket: BucketUpdateInfo) -> list[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise RuntimeError("No weight group: call /init_weight_transfer_engine first.")
        dtypes = [getattr(torch, name) for name in bucket.dtypes]
        sizes = [
            prod(shape) * dtype.itemsize for shape, dtype in zip(bucket.shapes, dtypes, strict=True)
        ]
        payload = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        dist.broadcast(payload, src=0, group=self._group)
        return [
            # Cloned: vLLM keeps the tensors of unfinished layers beyond this bucket, and a
            # view would keep the whole bucket with them (and may be misaligned).
            (name, part.clone().view(dtype).view(shape))
            for name, dtype, shape, part in zip(
                bucket.names, dtypes, bucket.shapes, payload.split(sizes), strict=True
            )
        ]

    def _refuse_wrong_weights(self, bucket: BucketUpdateInfo) -> None:
        """Compares names and shapes with the checkpoint that the server was started from."""
        if self._expected is None:
            self._expected = checkpoint_shapes(Path(self.model_config.model))
            if not self._expected:
                logger.warning(
                    "%s is no directory with safetensors: names and shapes of pushed weights "
                    "are not checked beforehand.",
                    self.model_config.model,
                )
        if not self._expected:
            return
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            expected = self._expected.get(name)
            if expected is None and name == "lm_head.weight":  # tied to the embedding
                expected = self._expected.get("model.embed_tokens.weight")
            if expected is None:
                raise ValueError(f"The served model has no parameter named {name}.")
            if tuple(shape) != expected:
                raise ValueError(f"{name} must have shape {expected}, got {tuple(shape)}.")

    def _abandon(self) -> None:
        """Gives layers that are still without weights their old ones back."""
        if not self._loading:
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # vLLM would fill up what is missing with uninitialised memory.
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        self._loading = False


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the headers of a directory's safetensors files; empty if none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                shapes[name] = tuple(entry["shape"])
    return shapes
