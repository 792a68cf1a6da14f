# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

# vLLM has an environment of its own, which the type checker does not see.
# pyright: reportMissingImports=false

"""vLLM's end of the weight groups: receives buckets and loads them, in each worker.

Staged (see staging.py), where a worker has room for a second copy of the weights:

    start -> (stage | disk)* -> verify -> finish

``stage`` and ``disk`` return at once, so vLLM generates during the transfer. Whatever fails
up to ``verify`` leaves the old weights whole; ``finish`` alone touches them.

Direct, where there is no room, and vLLM must be paused: ``start -> check -> receive* ->
finish``.

``abandon`` takes the place of what is left of either. vLLM rebuilds a layer once all its
weights have come, and until then the layer has none; so whatever goes wrong while loading,
every layer is given weights again: the new ones where they were complete, the old ones
elsewhere. Such a mixture must not be served as any version, which the client sees to.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
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

from torchtitan.grpo.weight_wire.buckets import (
    WIRE_DTYPES,
    bucket_bytes,
    check_lengths,
    read_safetensors,
    split_bucket,
)
from torchtitan.grpo.weight_wire.buffers import BufferPool
from torchtitan.grpo.weight_wire.receiving import WeightGroup
from torchtitan.grpo.weight_wire.staging import Staging, StagingPlace
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

logger = init_logger(__name__)

# Staging on the device needs the weights once more, and some room to work.
_ROOM_FACTOR = 1.2
# Bound of reading a version from disk where no group says another.
_DISK_SECONDS = 600.0
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass
class GroupInitInfo(WeightTransferInitInfo):
    """Body of ``/init_weight_transfer_engine``: the client's ``WeightGroupInfo``.

    With ``probe`` nothing is joined: the request fails where there is no room to stage.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_seconds: float
    deltas: bool = False
    probe: bool = False


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """Body of ``/update_weights``: what to do, and the bucket or directory it is about."""

    action: Literal["check", "receive", "stage", "disk", "verify", "abandon"]
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    checksums: list[int] | None = None
    num_changed: list[int] | None = None
    base_version: int | None = None
    group_name: str = ""
    sequence: int | None = None
    version: str | None = None
    path: str = ""

    def bucket(self) -> BucketSpec:
        """The bucket.

        Raises:
            ValueError: Its parts contradict one another.
        """
        bucket = BucketSpec(
            tuple(self.names),
            tuple(self.dtypes),
            tuple(tuple(shape) for shape in self.shapes),
            None if self.checksums is None else tuple(self.checksums),
            None if self.num_changed is None else tuple(self.num_changed),
            self.base_version,
        )
        check_lengths(bucket)
        return bucket


@dataclass(frozen=True)
class _Kept:
    """A committed version as it travelled, on the host: what deltas are applied to."""

    version: str
    tensors: dict[str, torch.Tensor]


class TorchGroupWeightEngine(WeightTransferEngine[GroupInitInfo, BucketUpdateInfo]):
    """Receives each bucket as one uint8 broadcast from rank 0 of a torch process group."""

    init_info_cls = GroupInitInfo
    update_info_cls = BucketUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups: dict[str, WeightGroup] = {}
        self._timeout_seconds = 0.0
        self._expected: dict[str, tuple[int, ...]] | None = None
        self._loading = False
        self._buffers = BufferPool()
        self._place = StagingPlace(self.device, self._base, self._put)
        self._staging: Staging | None = None
        self._verified: tuple[str, dict[str, torch.Tensor]] | None = None
        self._keeps = False
        self._kept: _Kept | None = None
        self._on_host: dict[str, torch.Tensor] = {}

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        """Joins one of the trainer's groups."""
        if init_info.probe:
            self._require_room()
            return
        former = self._groups.pop(init_info.group_name, None)
        if former is not None:
            former.leave()
        self._groups[init_info.group_name] = WeightGroup(
            init_info.master_address,
            init_info.master_port,
            init_info.rank_offset + self.parallel_config.rank,
            init_info.world_size,
            init_info.group_name,
            init_info.backend,
            init_info.timeout_seconds,
        )
        self._timeout_seconds = init_info.timeout_seconds
        self._keeps = init_info.deltas
        if not self._keeps:
            self._kept = None

    def start_weight_update(self) -> None:
        """Opens an update; the model is not touched."""
        self._abandon()
        self._staging = Staging(self._place, self._buffers)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Does the action of one request; a failed one leaves no layer without weights."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._abandon()
            raise

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """See :class:`BucketUpdateInfo`."""
        action = update_info.action
        if action == "abandon":
            self._abandon()
        elif action == "stage":
            self._stage(update_info)
        elif action == "disk":
            self._stage_directory(update_info.path)
        elif action == "verify":
            self._verify(update_info.version)
        else:
            bucket = update_info.bucket()
            self._refuse_wrong_weights(bucket.names, bucket.shapes)
            if action == "receive":
                self._load_received(bucket, self._group(update_info.group_name))

    def finish_weight_update(self) -> None:
        """Loads what was verified, and finishes the layers that vLLM treats last."""
        verified, self._verified = self._verified, None
        if verified is None and self._staging is not None and not self._loading:
            # A commit that was given up arrives after a later update was begun: vLLM must not
            # put its label on the old weights.
            raise RuntimeError("Nothing was received and verified in this update.")
        if verified is not None:
            self._load(verified[1].items())
        if self._loading:
            finalize_layerwise_reload(self.model, self.model_config)
            self._loading = False
            self._synchronize()
        if verified is not None:
            self._remember(*verified)
        self._staging = None

    def shutdown(self) -> None:
        """Leaves all groups and drops an open update."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.leave()
        self._abandon()

    # -- staged -----------------------------------------------------------------------

    def _require_room(self) -> None:
        """Raises unless the device can hold the weights twice."""
        if self.device.type != "cuda":
            return  # received on the host, which the operator sized
        needed = int(_ROOM_FACTOR * sum(p.nbytes for p in self.model.parameters()))
        free, _ = torch.cuda.mem_get_info(self.device)
        if free < needed:
            raise RuntimeError(
                f"There is no room to stage weights on {self.device}: {needed / 1024**3:.2f} GiB "
                f"must be free, {free / 1024**3:.2f} GiB are. Lower --gpu-memory-utilization to "
                "have weights received while vLLM generates."
            )

    def _stage(self, info: BucketUpdateInfo) -> None:
        bucket = info.bucket()
        self._refuse_wrong_weights(bucket.names, bucket.shapes)
        self._refuse_wrong_dtypes(bucket.dtypes)
        if bucket.num_changed is not None:
            self._refuse_wrong_base(bucket)
        self._open_staging().announce(bucket, self._group(info.group_name), sequence=info.sequence)

    def _stage_directory(self, path: str) -> None:
        headers = checkpoint_headers(Path(path))
        if not headers:
            raise ValueError(f"path must hold safetensors files, found none in {path!r}.")
        self._refuse_wrong_weights(headers, [shape for _, shape in headers.values()])
        dtypes = {
            name: _SAFETENSORS_DTYPES.get(dtype, dtype) for name, (dtype, _) in headers.items()
        }
        self._refuse_wrong_dtypes(dtypes.values())
        self._open_staging().read(dtypes, lambda: read_safetensors(path))

    def _open_staging(self) -> Staging:
        if self._staging is None:
            raise RuntimeError("No weight update is open: call /start_weight_update first.")
        return self._staging

    def _verify(self, version: str | None) -> None:
        """Waits for what was announced; raises unless all of it came as it was sent."""
        if version is None:
            raise ValueError("verify needs the version.")
        staging = self._open_staging()
        if not staging.dtypes:
            raise ValueError("No weights were announced since /start_weight_update.")
        tensors = staging.collect(self._timeout_seconds or _DISK_SECONDS)
        # vLLM rebuilds whole layers, so what a delta left as it was is loaded as well.
        unchanged = staging.dtypes.keys() - tensors.keys()
        kept = {} if self._kept is None else self._kept.tensors
        self._verified = version, {**{name: kept[name] for name in unchanged}, **tensors}

    def _refuse_wrong_base(self, bucket: BucketSpec) -> None:
        bucket_bytes(bucket)
        kept = self._kept
        if kept is None or kept.version != str(bucket.base_version):
            raise ValueError(
                f"A delta must be against the version that was kept, got base_version "
                f"{bucket.base_version}, kept is {kept.version if kept else None}. Send all of "
                "the weights."
            )
        for name, dtype in zip(bucket.names, bucket.dtypes, strict=True):
            held = kept.tensors.get(name)
            if held is None or held.dtype != WIRE_DTYPES[dtype]:
                raise ValueError(f"{name} was not kept in {dtype}. Send all of the weights.")

    def _base(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        assert self._kept is not None and self._kept.tensors[name].dtype == dtype
        return self._kept.tensors[name].clone()

    def _put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """On the staging thread: moves a whole tensor to where it is loaded from."""
        if self._keeps:
            self._on_host[name] = tensor.cpu()
        if self.device.type != "cuda":
            return tensor
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            tensor = tensor.to(self.device)
        stream.synchronize()
        return tensor

    def _remember(self, version: str, tensors: dict[str, torch.Tensor]) -> None:
        """Keeps the committed version for deltas, and frees the buffers of the one before."""
        on_host, self._on_host = self._on_host, {}
        in_use = [t for t in (*self.model.parameters(), *self.model.buffers()) if _is_dense(t)]
        if self._keeps:
            held = {name: on_host.get(name, tensor) for name, tensor in tensors.items()}
            self._kept = _Kept(version, held)
            in_use += held.values()
        self._buffers.settle(in_use)

    # -- direct -----------------------------------------------------------------------

    def _load_received(self, bucket: BucketSpec, group: WeightGroup) -> None:
        payload = torch.empty(bucket_bytes(bucket), dtype=torch.uint8, device=self.device)
        group.receive(payload)
        self._load(
            # Cloned: vLLM keeps the tensors of unfinished layers beyond this bucket, and a
            # view would keep the whole bucket with them.
            (name, part.clone())
            for name, part in zip(bucket.names, split_bucket(payload, bucket), strict=True)
        )
        self._synchronize()

    # -- both -------------------------------------------------------------------------

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise RuntimeError(
                f"No weight group {name!r}: call /init_weight_transfer_engine first. Joined: "
                f"{list(self._groups)}."
            )
        return self._groups[name]

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self._loading:
            self._kept = None  # from here on it is not what is served
            initialize_layerwise_reload(self.model)
            self._loading = True
        self.model.load_weights(weights)

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _refuse_wrong_dtypes(self, dtypes: Iterable[str]) -> None:
        wrong = set(dtypes) - WIRE_DTYPES.keys()
        if wrong:
            raise ValueError(f"dtypes must be of {sorted(WIRE_DTYPES)}, got {sorted(wrong)}.")

    def _refuse_wrong_weights(
        self, names: Iterable[str], shapes: Iterable[tuple[int, ...]]
    ) -> None:
        """Compares names and shapes with the checkpoint that the server was started from."""
        if self._expected is None:
            headers = checkpoint_headers(Path(self.model_config.model))
            self._expected = {name: shape for name, (_, shape) in headers.items()}
            if not self._expected:
                logger.warning(
                    "%s is no directory with safetensors: names and shapes of pushed weights "
                    "are not checked beforehand.",
                    self.model_config.model,
                )
        if not self._expected:
            return
        for name, shape in zip(names, shapes, strict=True):
            expected = self._expected.get(name)
            if expected is None and name == "lm_head.weight":  # tied to the embedding
                expected = self._expected.get("model.embed_tokens.weight")
            if expected is None:
                raise ValueError(f"The served model has no parameter named {name}.")
            if tuple(shape) != expected:
                raise ValueError(f"{name} must have shape {expected}, got {tuple(shape)}.")

    def _abandon(self) -> None:
        """Drops what was staged, and gives layers without weights their old ones back."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.drop()
        self._verified, self._on_host = None, {}
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


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def checkpoint_headers(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor in a directory's safetensors files; empty if none."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                found[name] = entry["dtype"], tuple(entry["shape"])
    return found
