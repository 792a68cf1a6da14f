# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The weight updates of one vLLM worker, without vLLM itself; `engine.py` connects them to it.

An update is staged on the worker's device if that has room for a second copy of the weights, and
otherwise in pinned host memory:

    begin -> (stage | disk)* -> verify -> finish

``stage`` and ``disk`` return at once, so vLLM generates during the transfer. Only ``finish``
changes the served weights. A failure before it does not change them. Without room in either place, the
update is direct, and vLLM must be paused: ``begin -> check -> receive* -> finish``.

``abandon`` replaces the rest of either sequence. vLLM rebuilds a layer once all of the layer's weights
have been loaded. Until then the layer has no weights. After a failure during a load, every layer is
therefore given weights again: the new ones if they were complete, else the old ones. Such a mixture must
not be served under any version, so the client removes the version before the first layer is loaded.

Deltas are applied to a copy, in host memory, of the last committed version. The copy exists only if deltas
were announced when the group was joined. It is dropped when loading of the next version begins.
"""

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import torch

from torchtitan.grpo.system.device import new_stream
from torchtitan.grpo.weight_wire.adapters import is_of_adapters
from torchtitan.grpo.weight_wire.buckets import bucket_bytes, check_lengths, split_bucket
from torchtitan.grpo.weight_wire.model_files import WeightFiles
from torchtitan.grpo.weight_wire.model_folder import WeightsAbsent
from torchtitan.grpo.weight_wire.receiving import WeightGroup
from torchtitan.grpo.weight_wire.session import UpdateSession
from torchtitan.grpo.weight_wire.staging import StagingPlace
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

logger = logging.getLogger(__name__)

# Maximum duration of reading a version from disk if no group was joined, whose timeout applies.
_DISK_SECONDS = 600.0


class LoadableModel(Protocol):
    """The worker's model, and how new weights are loaded into it."""

    def tensors(self) -> list[torch.Tensor]:
        """All parameters and buffers that have their own memory."""
        ...

    def checkpoint_folder(self) -> str: ...

    def begin_load(self) -> None:
        """Removes the weights from the layers. A layer is rebuilt once all of its new weights are loaded."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads some of the new weights, by their Hugging Face names."""

    def finish_load(self) -> None:
        """Rebuilds the layers that can only be rebuilt at the end, and ends the load."""

    def restore(self) -> None:
        """Gives layers without a full set of new weights their old weights back, and ends the load."""


# Staging needs the weights once more, and some memory to work in.
_ROOM_FACTOR = 1.2
# Torch pins memory in powers of two, so that a version may take almost twice its size.
_PINNED_FACTOR = 2.0
_GIB = 1024**3


def staging_needs(model_bytes: int, num_workers: int, *, deltas: bool) -> tuple[int, int]:
    """Returns the bytes needed to stage the model on one GPU, or in host memory for all workers."""
    copies = _PINNED_FACTOR * (1 + deltas) * num_workers
    return int(_ROOM_FACTOR * model_bytes), int(copies * model_bytes)


def must_stage_on_host(
    needs: tuple[int, int], device: torch.device, free: int, free_on_host: int
) -> bool:
    """Returns whether only the host has room to stage updates. Raises RuntimeError if no place has.

    The client recognizes that RuntimeError by the words "no room to stage".
    """
    on_device, on_host = needs
    if free >= on_device:
        return False
    if free_on_host >= on_host:
        return True
    raise RuntimeError(
        f"There is no room to stage weights: {on_device / _GIB:.2f} GiB must be free on {device}, "
        f"and {free / _GIB:.2f} GiB are; or {on_host / _GIB:.2f} GiB of host memory must be free "
        f"for all workers, and {free_on_host / _GIB:.2f} GiB are. Lower --gpu-memory-utilization, "
        "or give the server more host memory, so that weights can be received while vLLM generates."
    )


@dataclass
class UpdateRequest:
    """The body of ``/update_weights``: an action, and the bucket or directory that the action needs."""

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
        """Returns the request's bucket. Raises ValueError if its lists differ in length."""
        bucket = msgspec.convert(vars(self), BucketSpec)
        check_lengths(bucket)
        return bucket


class WorkerUpdates:
    """Carries out weight updates on one worker: holds the groups it has joined, and at most one open update."""

    def __init__(self, model: LoadableModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._timeout_seconds = _DISK_SECONDS
        self._expected: dict[str, tuple[int, ...]] | None = None
        self._loading = False
        self.session = UpdateSession(
            StagingPlace(device, self._base, self._put),
            self._refuse_wrong_weights,
            model.checkpoint_folder,
        )
        self._verified: tuple[str, dict[str, torch.Tensor]] | None = None
        self._keeps = False
        # The committed version as it was sent, on the host, and the part of the next one that was staged.
        self._kept: dict[str, torch.Tensor] = {}
        self._on_host: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None  # of the staging threads
        self._putting = threading.Lock()

    def stage_on_host(self, is_on_host: bool) -> None:
        self.session.place = replace(self.session.place, on_host=is_on_host)

    def join(self, info: WeightGroupInfo, worker_rank: int) -> None:
        self.session.join(info, worker_rank)
        self._timeout_seconds = info.timeout_seconds
        self._keeps = info.deltas
        if not self._keeps:
            self._forget_kept()

    def begin(self) -> None:
        """Opens an update. Does not change the model."""
        self.abandon()
        self.session.begin()

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
            self.session.announce(request.bucket(), request.group_name, request.sequence)
        elif action == "disk":
            self.session.read(request.path)
        elif action == "verify":
            self._verify(request.version)
        else:
            bucket = request.bucket()
            if is_of_adapters(bucket):
                raise ValueError(
                    "Adapters without their base weights need room to stage a second copy of the weights, "
                    "on the GPU or in host memory. Make room for it, or set lora.push = 'merged'."
                )
            self._refuse_wrong_weights(bucket.names, bucket.shapes)
            if action == "receive":
                self._load_received(bucket, self.session.group(request.group_name))

    def finish(self) -> None:
        """Loads the verified weights, and ends the update.

        Raises RuntimeError if no weights were verified or loaded. Otherwise a late request to finish an
        abandoned update would make vLLM give the old weights the new version.
        """
        verified, self._verified = self._verified, None
        if verified is None and self.session.is_open and not self._loading:
            raise RuntimeError("Nothing was received and verified in this update.")
        if verified is not None:
            self._load(verified[1].items())
        if self._loading:
            self._model.finish_load()
            self._loading = False
            self._synchronize()
        if verified is not None:
            self._remember(*verified)
        self.session.drop()  # nothing was staged in it

    def leave(self) -> None:
        self.session.leave_groups()
        self.abandon()

    def abandon(self) -> None:
        """Drops staged weights, and gives layers that have no weights their old weights back."""
        self.session.drop()
        self._verified, self._on_host = None, {}
        if self._loading:
            self._model.restore()
            self._loading = False

    # -- staged -----------------------------------------------------------------------

    def _verify(self, version: str | None) -> None:
        """Waits for the announced buckets. Raises an error unless all of them arrived undamaged."""
        if version is None:
            raise ValueError("The action verify needs the version of the update.")
        tensors = self.session.collect(self._timeout_seconds)
        received = self.session.received
        if not received:
            raise ValueError("No weights were announced since /start_weight_update.")
        # vLLM rebuilds whole layers, so weights that did not change are loaded as well.
        if self.session.is_of_adapters:
            tensors = dict(self.session.with_adapters(tensors, all_weights=True))
        else:
            unchanged = received.keys() - tensors.keys()
            tensors = {**{name: self._kept[name] for name in unchanged}, **tensors}
        self._verified = version, tensors

    def _base(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        assert self._kept[name].dtype == dtype
        return self._kept[name].clone()

    def _put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Moves a received tensor to the memory from which it will be loaded. Runs on a staging thread."""
        if self._keeps:
            self._on_host[name] = tensor.cpu()
        if self._device.type != "cuda" or self.session.place.on_host:
            return tensor  # from host memory the load itself copies it
        with self._putting:  # one stream for all threads, since they share the bus
            if self._stream is None:
                self._stream = new_stream(self._device)
            with torch.cuda.stream(self._stream):
                tensor = tensor.to(self._device)
            self._stream.synchronize()  # this thread waits; the one that generates does not
        return tensor

    def _remember(self, version: str, tensors: dict[str, torch.Tensor]) -> None:
        """Keeps the committed version as the base of deltas, and frees the previous version's buffers."""
        on_host, self._on_host = self._on_host, {}
        is_base = self._keeps and not self.session.is_of_adapters
        if is_base:
            self._kept = {name: on_host.get(name, tensor) for name, tensor in tensors.items()}
        in_use = [*self._model.tensors(), *self._kept.values()]
        self.session.settle(in_use, version if is_base else None)

    def _forget_kept(self) -> None:
        self._kept = {}
        self.session.forget_base()

    # -- direct -----------------------------------------------------------------------

    def _load_received(self, bucket: BucketSpec, group: WeightGroup) -> None:
        # A group over gloo receives only into host memory.
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

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self._loading:
            self._forget_kept()  # from here on it differs from what is served
            self._model.begin_load()
            self._loading = True
        self._model.load(weights)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _refuse_wrong_weights(self, names: Iterable[str], shapes: Iterable[Sequence[int]]) -> None:
        """Raises ValueError if a name or shape does not fit the checkpoint that the server started from."""
        if self._expected is None:
            folder = self._model.checkpoint_folder()
            try:
                stored = WeightFiles(Path(folder), "model").headers()
            except WeightsAbsent:
                stored = {}
                logger.warning(
                    "%s is not a directory with safetensors files: names and shapes of pushed "
                    "weights are not checked before they are loaded.",
                    folder,
                )
            self._expected = {name: tensor.shape for name, tensor in stored.items()}
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
