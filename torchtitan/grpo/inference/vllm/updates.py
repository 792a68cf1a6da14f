# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The weight updates of one vLLM worker, without vLLM itself.

An update is staged on the worker's device, if it has room for a second copy of the weights, and
else in pinned host memory:

    begin -> (stage | disk)* -> verify -> finish

``stage`` and ``disk`` return at once, so vLLM generates during the transfer. A failure up to
``verify`` leaves the old weights whole; ``finish`` alone changes them.

Without room in either place, the update is direct, and vLLM must be paused: ``begin -> check ->
receive* -> finish``.

``abandon`` replaces the rest of either sequence. vLLM rebuilds a layer once all of the layer's
weights have been loaded, and until then the layer has none. Whatever fails during a load, every
layer is therefore given weights again: the new ones if they were complete, else the old ones.
Such a mixture must not be served under any version; the client takes the version off the server
before the first layer is loaded.

A delta is applied to a copy, on the host, of the version that was committed last. The copy
exists only if deltas were announced when the group was joined, and from the commit of one version
to the first load of the next.

This module needs torch and `weight_wire/`; `engine.py` connects it to vLLM.
"""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from torchtitan.grpo.system.own_streams import new_stream
from torchtitan.grpo.weight_wire.adapters import BaseWeights, is_of_adapters
from torchtitan.grpo.weight_wire.buckets import (
    WIRE_DTYPES,
    bucket_bytes,
    check_lengths,
    read_safetensors,
    refuse_wrong_dtypes,
    split_bucket,
)
from torchtitan.grpo.weight_wire.buffers import BufferPool
from torchtitan.grpo.weight_wire.model_files import WeightFiles
from torchtitan.grpo.weight_wire.model_folder import WeightsAbsent
from torchtitan.grpo.weight_wire.receiving import WeightGroup, leave_groups
from torchtitan.grpo.weight_wire.staging import Staging, StagingPlace
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

logger = logging.getLogger(__name__)

# Maximum duration of reading a version from disk if no group was joined, whose timeout applies.
_DISK_SECONDS = 600.0
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class LoadableModel(Protocol):
    """The worker's model, and how new weights are loaded into it."""

    def tensors(self) -> list[torch.Tensor]:
        """Returns all parameters and buffers that have memory of their own."""
        ...

    def checkpoint_folder(self) -> str:
        """Returns the directory that the model was loaded from."""
        ...

    def begin_load(self) -> None:
        """Takes the weights off the layers, until each has all of its new ones."""
        ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads some of the new weights, by their Hugging Face names."""
        ...

    def finish_load(self) -> None:
        """Rebuilds the layers that are rebuilt last."""
        ...

    def restore(self) -> None:
        """Gives layers that still lack new weights their old ones back, and ends the load."""
        ...


@dataclass
class UpdateRequest:
    """Holds the body of ``/update_weights``: an action, and its bucket or directory."""

    action: Literal["check", "receive", "stage", "disk", "verify", "abandon"]
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    checksums: list[int] | None = None
    num_changed: list[int] | None = None
    base_version: int | None = None
    lora_scale: float | None = None
    lora_base: str | None = None
    group_name: str = ""
    sequence: int | None = None
    version: str | None = None
    path: str = ""

    def bucket(self) -> BucketSpec:
        """Returns the description of the bucket that the request is about.

        Raises:
            ValueError: If its lists differ in length.
        """
        bucket = BucketSpec(
            tuple(self.names),
            tuple(self.dtypes),
            tuple(tuple(shape) for shape in self.shapes),
            None if self.checksums is None else tuple(self.checksums),
            None if self.num_changed is None else tuple(self.num_changed),
            self.base_version,
            self.lora_scale,
            self.lora_base,
        )
        check_lengths(bucket)
        return bucket


@dataclass(frozen=True)
class _Kept:
    """A committed version as it was sent, on the host: the base of the next delta."""

    version: str
    tensors: dict[str, torch.Tensor]


class WorkerUpdates:
    """The groups of one worker, and at most one open update.

    Args:
        model: See :class:`LoadableModel`.
        device: Device of the model.
    """

    def __init__(self, model: LoadableModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._groups: dict[str, WeightGroup] = {}
        self._timeout_seconds = 0.0
        self._expected: dict[str, tuple[int, ...]] | None = None
        self._loading = False
        self._buffers = BufferPool(pinned=device.type == "cuda")
        self._place = StagingPlace(device, self._base, self._put)
        self._staging: Staging | None = None
        self._adapted: BaseWeights | None = None
        self._lora_scale: float | None = None
        self._verified: tuple[str, dict[str, torch.Tensor]] | None = None
        self._keeps = False
        self._kept: _Kept | None = None
        self._on_host: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None  # of the staging threads
        self._putting = threading.Lock()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in which updates are received."""
        return self._buffers.host_bytes

    def stage_on_host(self, is_on_host: bool) -> None:
        """Decides where later updates are staged: in host memory, or on the device."""
        self._place = replace(self._place, on_host=is_on_host)

    def join(self, info: WeightGroupInfo, worker_rank: int) -> None:
        """Joins one of the trainer's groups; see :func:`create_weight_group`."""
        former = self._groups.pop(info.group_name, None)
        if former is not None:
            former.leave()
        self._groups[info.group_name] = WeightGroup(
            info.master_address,
            info.master_port,
            info.rank_offset + worker_rank,
            info.world_size,
            info.group_name,
            info.backend,
            info.timeout_seconds,
            info.piece_bytes,
        )
        self._timeout_seconds = info.timeout_seconds
        self._keeps = info.deltas
        if not self._keeps:
            self._kept = None

    def begin(self) -> None:
        """Opens an update; the model is not changed."""
        self.abandon()
        self._staging, self._lora_scale = Staging(self._place, self._buffers), None

    def update(self, request: UpdateRequest) -> None:
        """Carries out the action of one request. On failure the update is abandoned."""
        try:
            self._act(request)
        except BaseException:
            self.abandon()
            raise

    def _act(self, request: UpdateRequest) -> None:
        action = request.action
        if action == "abandon":
            self.abandon()
        elif action == "stage":
            self._stage(request)
        elif action == "disk":
            self._stage_directory(request.path)
        elif action == "verify":
            self._verify(request.version)
        else:
            bucket = request.bucket()
            if is_of_adapters(bucket):
                raise ValueError(
                    "Adapters alone need room to stage a second copy of the weights, on the GPU or in "
                    "host memory. Make room for it, or set lora.push = 'merged'."
                )
            self._refuse_wrong_weights(bucket.names, bucket.shapes)
            if action == "receive":
                self._load_received(bucket, self._group(request.group_name))

    def finish(self) -> None:
        """Loads what was verified, and ends the load.

        Raises:
            RuntimeError: If the update was staged and not verified. A request to finish an
                earlier, abandoned update may arrive after this one was begun, and vLLM must
                not put its version on the old weights.
        """
        verified, self._verified = self._verified, None
        if verified is None and self._staging is not None and not self._loading:
            raise RuntimeError("Nothing was received and verified in this update.")
        if verified is not None:
            self._load(verified[1].items())
        if self._loading:
            self._model.finish_load()
            self._loading = False
            self._synchronize()
        if verified is not None:
            self._remember(*verified)
        self._staging = None

    def leave(self) -> None:
        """Leaves all groups and drops an open update."""
        groups, self._groups = self._groups, {}
        leave_groups(groups.values())
        self.abandon()

    def abandon(self) -> None:
        """Drops what was staged, and gives layers without weights their old ones back."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.drop()
        self._verified, self._on_host = None, {}
        if self._loading:
            self._model.restore()
            self._loading = False

    # -- staged -----------------------------------------------------------------------

    def _stage(self, request: UpdateRequest) -> None:
        bucket = request.bucket()
        if is_of_adapters(bucket):
            if self._adapted is None:
                self._adapted = BaseWeights(self._model.checkpoint_folder())
            self._adapted.check(bucket)
        else:
            self._refuse_wrong_weights(bucket.names, bucket.shapes)
        self._lora_scale = bucket.lora_scale
        refuse_wrong_dtypes(bucket.dtypes)
        if bucket.num_changed is not None:
            self._refuse_wrong_base(bucket)
        group = self._group(request.group_name)
        self._open_staging().announce(bucket, group, sequence=request.sequence)

    def _stage_directory(self, path: str) -> None:
        headers = checkpoint_headers(Path(path))
        if not headers:
            raise ValueError(f"path must hold safetensors files, found none in {path!r}.")
        self._refuse_wrong_weights(headers, [shape for _, shape in headers.values()])
        dtypes = {
            name: _SAFETENSORS_DTYPES.get(dtype, dtype) for name, (dtype, _) in headers.items()
        }
        refuse_wrong_dtypes(dtypes.values())
        self._open_staging().read(dtypes, lambda: read_safetensors(path))

    def _open_staging(self) -> Staging:
        if self._staging is None:
            raise RuntimeError("No weight update is open: call /start_weight_update first.")
        return self._staging

    def _verify(self, version: str | None) -> None:
        """Waits for the announced buckets; raises unless all of them arrived as they were sent."""
        if version is None:
            raise ValueError("The action verify needs the version of the update.")
        staging = self._open_staging()
        if not staging.dtypes:
            raise ValueError("No weights were announced since /start_weight_update.")
        tensors = staging.collect(self._timeout_seconds or _DISK_SECONDS)
        if self._lora_scale is not None:
            assert self._adapted is not None, "adapters were announced without their base"
            # vLLM rebuilds whole layers, so weights without adapters are loaded as well.
            self._verified = version, dict(self._adapted.all_with(tensors, self._lora_scale))
            return
        # vLLM rebuilds whole layers, so tensors that a delta left unchanged are loaded as well.
        unchanged = staging.dtypes.keys() - tensors.keys()
        kept = {} if self._kept is None else self._kept.tensors
        self._verified = version, {**{name: kept[name] for name in unchanged}, **tensors}

    def _refuse_wrong_base(self, bucket: BucketSpec) -> None:
        bucket_bytes(bucket)
        kept = self._kept
        if kept is None or kept.version != str(bucket.base_version):
            raise ValueError(
                f"A delta must be against the version that this server kept, got base_version "
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
        """Moves a whole tensor to where it is loaded from. Runs on the staging threads."""
        if self._keeps:
            self._on_host[name] = tensor.cpu()
        if self._device.type != "cuda" or self._place.on_host:
            return tensor  # from host memory the load itself copies it
        with self._putting:  # one stream for all threads, since they share the bus
            if self._stream is None:
                self._stream = new_stream(self._device)
            with torch.cuda.stream(self._stream):
                tensor = tensor.to(self._device)
            self._stream.synchronize()  # this thread waits; the one that generates does not
        return tensor

    def _remember(self, version: str, tensors: dict[str, torch.Tensor]) -> None:
        """Keeps the committed version for deltas, and frees the buffers of the one before."""
        on_host, self._on_host = self._on_host, {}
        in_use = self._model.tensors()
        if self._keeps:
            held = {name: on_host.get(name, tensor) for name, tensor in tensors.items()}
            self._kept = _Kept(version, held)
            in_use += held.values()
        self._buffers.settle(in_use)

    # -- direct -----------------------------------------------------------------------

    def _load_received(self, bucket: BucketSpec, group: WeightGroup) -> None:
        # A group over gloo receives into host memory alone.
        device = self._device if group.is_nccl else torch.device("cpu")
        payload = torch.empty(bucket_bytes(bucket), dtype=torch.uint8, device=device)
        group.receive(payload, self._device)
        self._load(
            # Copied: vLLM keeps the tensors of unfinished layers beyond this bucket, and a view
            # would keep the memory of the whole bucket with them.
            (name, part.to(self._device, copy=True))
            for name, part in zip(bucket.names, split_bucket(payload, bucket), strict=True)
        )
        self._synchronize()

    # -- both -------------------------------------------------------------------------

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise RuntimeError(
                f"No weight group is called {name!r}: call /init_weight_transfer_engine first. "
                f"Joined are {list(self._groups)}."
            )
        return self._groups[name]

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self._loading:
            self._kept = None  # from here on it differs from what is served
            self._model.begin_load()
            self._loading = True
        self._model.load(weights)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _refuse_wrong_weights(
        self, names: Iterable[str], shapes: Iterable[tuple[int, ...]]
    ) -> None:
        """Compares names and shapes with the checkpoint that the server was started from."""
        if self._expected is None:
            folder = self._model.checkpoint_folder()
            headers = checkpoint_headers(Path(folder))
            self._expected = {name: shape for name, (_, shape) in headers.items()}
            if not self._expected:
                logger.warning(
                    "%s is not a directory with safetensors files: names and shapes of pushed "
                    "weights are not checked before they are loaded.",
                    folder,
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


def checkpoint_headers(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each tensor in a directory's safetensors files; nothing without any."""
    try:
        stored = WeightFiles(directory, "model").headers()
    except WeightsAbsent:
        return {}
    return {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
