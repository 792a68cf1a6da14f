# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The receiving end of weight updates: a server's groups, and at most one open update.

    (none) -- begin --> OPEN -- announce or read, ... --> OPEN -- collect or drop --> (none)

Announced buckets are received into staging while the old weights are served. ``collect``
returns only a whole, verified update. The server swaps it in, and then calls ``settle``. Any other
update is dropped, and the served weights do not change. A delta is applied to a copy of the weights
that were settled last. It is refused unless these weights are the delta's base version and
were completely received in the delta's dtype.

vLLM's workers and the embedded server differ in the :class:`StagingPlace`, the check against
the model, and the swap.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path

import torch

from torchtitan.grpo.weight_wire.adapters import BaseWeights, is_of_adapters
from torchtitan.grpo.weight_wire.buckets import bucket_bytes, check_lengths, refuse_wrong_dtypes
from torchtitan.grpo.weight_wire.buffers import BufferPool
from torchtitan.grpo.weight_wire.model_files import WeightFiles
from torchtitan.grpo.weight_wire.receiving import WeightGroup, leave_groups
from torchtitan.grpo.weight_wire.staging import Staging, StagingPlace, UpdateError
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo
from torchtitan.grpo.weight_wire.version_files import read_weights

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class UpdateSession:
    """Receives weight updates for one server, one update at a time.

    ``check`` raises ValueError unless tensors of the given names and shapes fit the model.
    ``folder`` returns the directory of the model, to whose weights adapters are added. ``received``
    holds the dtypes of the collected update, by name.
    """

    def __init__(
        self,
        place: StagingPlace,
        check: Callable[[Iterable[str], Iterable[Sequence[int]]], None],
        folder: Callable[[], str],
    ) -> None:
        self.place = place
        self.buffers = BufferPool(pinned=place.device.type == "cuda")
        self._check_fit, self._folder = check, folder
        self._groups: dict[str, WeightGroup] = {}
        self._staging: Staging | None = None
        self.received: dict[str, str] = {}
        # A settled version all of whose weights were received, and the dtypes in which they were sent.
        self._base_version: str | None = None
        self._base_dtypes: dict[str, str] = {}
        self._lora_scale: float | None = None

    # -- groups -----------------------------------------------------------------------

    @property
    def group_names(self) -> list[str]:
        return list(self._groups)

    def join(self, info: WeightGroupInfo, worker: int = 0) -> None:
        """Joins one of the trainer's groups; a group of the same name is left first."""
        if info.backend == "nccl" and self.place.device.type != "cuda":
            raise UpdateError(
                "backend must be gloo, because this server runs on a CPU, got nccl. Set "
                "weight_sync.transport = 'host'."
            )
        self._leave([info.group_name])
        try:
            self._groups[info.group_name] = WeightGroup(info, worker)
        except Exception as error:
            raise UpdateError(
                f"Group {info.group_name!r} at {info.master_address}:{info.master_port} was not "
                f"joined within {info.timeout_seconds} s: {error}"
            ) from error

    def group(self, name: str) -> WeightGroup:
        try:
            return self._groups[name]
        except KeyError:
            raise ValueError(
                f"Weight group {name!r} does not exist. Joined are {self.group_names}."
            ) from None

    def leave_groups(self) -> None:
        """Leaves all groups, so that broadcasts that wait in them fail."""
        self._leave(self.group_names)

    def _leave(self, names: Iterable[str]) -> None:
        # Popped, because another thread may leave a group at the same time.
        groups = [self._groups.pop(name, None) for name in names]
        leave_groups(group for group in groups if group is not None)

    # -- the update -------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._staging is not None

    @property
    def staging(self) -> Staging:
        if self._staging is None:
            raise UpdateError("No weight update is open. Begin one first.")
        return self._staging

    def begin(self) -> None:
        if self._staging is not None:
            raise UpdateError("A weight update is open. End it first.")
        self._staging, self._lora_scale = Staging(self.place, self.buffers), None

    def announce(self, bucket: BucketSpec, group_name: str, sequence: int | None) -> "Future[None]":
        """Queues a bucket before its broadcast. If it raises ValueError, the whole update is refused."""
        staging = self.staging
        try:
            self._check(bucket)
            future = staging.announce(bucket, self.group(group_name), sequence=sequence)
        except ValueError as error:
            staging.refuse(str(error))
            raise
        self._lora_scale = bucket.lora_scale
        return future

    def read(self, folder: str) -> None:
        """Queues the reading of a directory. Raises ValueError if a weight does not fit the model."""
        headers = WeightFiles(Path(folder), "model_path").headers()
        self._check_fit(headers, [stored.shape for stored in headers.values()])
        dtypes = {
            name: _SAFETENSORS_DTYPES.get(stored.dtype, stored.dtype)
            for name, stored in headers.items()
        }
        refuse_wrong_dtypes(dtypes.values())
        self.staging.read(dtypes, lambda: read_weights(folder))

    def collect(self, timeout_seconds: float) -> dict[str, torch.Tensor]:
        """Returns the new tensors, or adapters' factors. If one failed, drops all and raises UpdateError."""
        staging, self._staging = self.staging, None
        try:
            tensors = staging.collect(timeout_seconds)
        except UpdateError:
            staging.drop()
            raise
        self.received = staging.dtypes
        return tensors

    @property
    def is_of_adapters(self) -> bool:
        return self._lora_scale is not None

    def with_adapters(
        self, factors: Mapping[str, torch.Tensor], *, all_weights: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields base weights with the adapters added: all of them, or only those that adapters change."""
        assert self._lora_scale is not None, "no adapters were announced"
        add = self._base_weights.all_with if all_weights else self._base_weights.adapted
        return add(factors, self._lora_scale)

    def settle(self, in_use: Iterable[torch.Tensor], version: str | None) -> None:
        """Notes that the collected update is served; ``in_use`` tensors keep their buffers.

        Later deltas may be applied to ``version``. With ``None`` they may not, for instance because only
        a part of the weights was received.
        """
        self._base_version, self._base_dtypes = version, self.received
        self.buffers.settle(in_use)

    def forget_base(self) -> None:
        """Refuses deltas until the next update is settled."""
        self._base_version = None

    def release(self) -> None:
        """Drops an open update and frees all buffers. The next update must send all weights."""
        self.drop()
        self.forget_base()
        self.buffers.release()

    def drop(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.drop()
        self.buffers.forget()

    # -- checks -----------------------------------------------------------------------

    @cached_property
    def _base_weights(self) -> BaseWeights:
        return BaseWeights(self._folder())

    def _check(self, bucket: BucketSpec) -> None:
        check_lengths(bucket)
        refuse_wrong_dtypes(bucket.dtypes)
        if is_of_adapters(bucket):
            self._base_weights.check(bucket)
            return
        self._check_fit(bucket.names, bucket.shapes)
        if bucket.num_changed is not None:
            bucket_bytes(bucket)
            self._check_base(bucket)

    def _check_base(self, bucket: BucketSpec) -> None:
        if self._base_version != str(bucket.base_version):
            raise ValueError(
                "A delta must be against the served version, all of whose weights were received in a dtype "
                f"that the server holds exactly, got base_version {bucket.base_version}; deltas can be "
                f"applied to version {self._base_version}. Send all of the weights."
            )
        for name, dtype in zip(bucket.names, bucket.dtypes, strict=True):
            if (sent := self._base_dtypes.get(name)) != dtype:
                raise ValueError(
                    f"{name}: a delta in {dtype} needs weights that were sent in {dtype}, but they were "
                    f"sent in {sent}. Send all of the weights."
                )
