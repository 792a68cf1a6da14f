# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Weight updates of the embedded server: their process groups and their sessions.

    (no session) -- begin --> OPEN -- announce, ... --> OPEN -- end --> (no session)

Announced chunks are received into staging, in order, while the engine generates. ``end`` swaps all
of them in at once, between two steps of the engine. It commits only an update that is known to be
whole: every chunk has arrived and was verified, and the last one has named the ``weight_version``.
Any other update is dropped, and the model does not change. A trainer that was restarted may
therefore always call ``end`` or ``leave_all`` first.

A delta is applied to a copy of the served weights. It is refused unless the server serves its base
version, completely received in the dtype of the delta, with a model whose dtype represents these
values exactly.

The methods raise :class:`UpdateError` for every failure that is answered with status 400.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from safetensors import SafetensorError

from torchtitan.grpo.inference.embedded.engine import Engine
from torchtitan.grpo.inference.embedded.weights import WeightTable
from torchtitan.grpo.system.files import check_folder
from torchtitan.grpo.weight_wire.adapter_names import is_adapter, served_weight_of
from torchtitan.grpo.weight_wire.adapters import BaseWeights, is_of_adapters
from torchtitan.grpo.weight_wire.buckets import (
    WIRE_DTYPES,
    bucket_bytes,
    check_lengths,
    read_safetensors,
    refuse_wrong_dtypes,
)
from torchtitan.grpo.weight_wire.buffers import BufferPool
from torchtitan.grpo.weight_wire.receiving import WeightGroup, leave_groups
from torchtitan.grpo.weight_wire.staging import Staging, StagingError, StagingPlace
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 2.0
_MAX_WORLD_SIZE = 4096
_UNDER_WAY = (
    "Another weight operation is under way. Wait for its answer, or end it with a request to "
    "/destroy_weights_update_group."
)


class UpdateError(RuntimeError):
    """An update was refused or failed. The weights that are served have not changed."""


@dataclass
class _Session:
    staging: Staging
    version: str | None = None
    abort_all: bool = False
    lora_scale: float | None = None


@dataclass(frozen=True)
class _Served:
    """The version of all parameters, and the dtype in which each of them was sent."""

    version: str
    dtypes: dict[str, str]


class WeightUpdater:
    """Receives weights and commits them to the engine.

    Args:
        engine: Engine whose weights are updated.
        table: Parameters of the engine's model.
        device: Device of the model. NCCL groups receive there, gloo groups on the CPU.
        timeout_seconds: Maximum duration of a rendezvous, of each broadcast, and of the swap.
        model_path: Directory of the model, to whose weights adapters are added.
    """

    def __init__(
        self,
        engine: Engine,
        table: WeightTable,
        device: torch.device,
        timeout_seconds: float,
        model_path: str,
    ) -> None:
        self._engine = engine
        self._table = table
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._busy = threading.Lock()
        self._buffers = BufferPool(pinned=device.type == "cuda")
        self._model_path = model_path
        self._place = StagingPlace(device, table.in_wire_dtype, self._prepared, stream=table.stream)
        self._session: _Session | None = None
        self._served: _Served | None = None
        self._pushed: set[str] = set()  # may differ from the directory
        # A value is None while the group is being joined.
        self._groups: dict[str, WeightGroup | None] = {}

    @cached_property
    def _base(self) -> BaseWeights:
        return BaseWeights(self._model_path)

    @property
    def group_names(self) -> list[str]:
        """Names of the groups that this server has joined or is joining."""
        return list(self._groups)

    def init_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str,
        piece_bytes: int = 0,
    ) -> None:
        """Joins a group; see :func:`create_weight_group`."""
        if backend not in ("gloo", "nccl"):
            raise UpdateError(f"backend must be gloo or nccl, got {backend!r}.")
        if backend == "nccl" and self._device.type != "cuda":
            raise UpdateError(
                "backend must be gloo, because this server runs on a CPU, got nccl. Set "
                "weight_sync.transport = 'host'."
            )
        if not 0 < rank < world_size:
            raise UpdateError(f"rank_offset must be in [1, {world_size}), got {rank}.")
        if not 0 < master_port < 2**16:
            raise UpdateError(f"master_port must be in [1, 65535], got {master_port}.")
        if piece_bytes < 0:
            raise UpdateError(f"piece_bytes must be at least 0, got {piece_bytes}.")
        if world_size > _MAX_WORLD_SIZE:
            raise UpdateError(f"world_size must be at most {_MAX_WORLD_SIZE}, got {world_size}.")
        if group_name in self._groups:
            raise UpdateError(
                f"Group {group_name!r} exists already. Destroy it or use another name."
            )
        self._groups[group_name] = None
        try:
            self._groups[group_name] = WeightGroup(
                master_address,
                master_port,
                rank,
                world_size,
                group_name,
                backend,
                self._timeout_seconds,
                piece_bytes,
            )
        except Exception as error:
            # Whatever it was, the name must be free for the next attempt.
            del self._groups[group_name]
            raise UpdateError(
                f"Group {group_name!r} at {master_address}:{master_port} was not joined within "
                f"{self._timeout_seconds} s: {error}"
            ) from error

    def destroy_group(self, group_name: str) -> None:
        """Leaves a process group. A broadcast that waits in it fails."""
        group = self._groups.get(group_name)
        if group is None:
            state = "is being joined" if group_name in self._groups else "does not exist"
            raise UpdateError(
                f"Group {group_name!r} cannot be destroyed, because it {state}. This server knows "
                f"the groups {list(self._groups)}."
            )
        del self._groups[group_name]
        group.leave()

    def leave_all(self) -> None:
        """Leaves all groups and drops an open session. Does nothing if there are none."""
        self._leave_groups()
        # An operation that waited in a group has failed by now and ends soon.
        with self._exclusive(_LEAVE_SECONDS):
            session, self._session = self._session, None
            if session is not None:
                session.staging.drop()

    def begin(self) -> None:
        """Opens a session, into which chunks can then be received."""
        with self._exclusive():
            if self._session is not None:
                raise UpdateError("A weight update is open. Call end_weight_update first.")
            self._session = _Session(Staging(self._place, self._buffers))

    def announce(
        self,
        bucket: BucketSpec,
        *,
        group_name: str,
        flattened: bool,
        sequence: int | None,
        version: str | None,
        abort_all: bool,
    ) -> "Future[None]":
        """Queues one chunk for staging, or refuses it before its broadcast is awaited.

        Returns at once. The future ends when the chunk has arrived and is verified.
        """
        session = self._session
        if session is None:
            raise UpdateError("No weight update is open. Call begin_weight_update first.")
        try:
            group = self._checked_group(bucket, group_name)
            future = session.staging.announce(bucket, group, sequence=sequence, flattened=flattened)
        except ValueError as error:
            # The session fails too, because a commit without this chunk would serve a mixture.
            session.staging.refuse(str(error))
            raise UpdateError(str(error)) from error
        session.version = session.version if version is None else version
        session.abort_all |= abort_all
        session.lora_scale = bucket.lora_scale
        return future

    def fail(self, reason: str) -> None:
        """Makes :meth:`end` drop the open session, one of whose chunks could not be parsed."""
        if self._session is not None:
            self._session.staging.refuse(reason)

    def end(self, version: str | None = None) -> tuple[str, float]:
        """Commits the session, or drops it whole.

        Args:
            version: Name of the new version, if no chunk has named it.

        Returns:
            Message for the caller, and the seconds for which the engine stopped.
        """
        with self._exclusive():
            session = self._session
            if session is None:
                raise UpdateError("No weight update is open. Call begin_weight_update first.")
            if session.staging.is_receiving:
                raise UpdateError(_UNDER_WAY)
            self._session = None
            try:
                with self._table.on_stream():  # adapters may have been staged on it
                    return self._end(session, version)
            except UpdateError:
                session.staging.drop()
                raise

    def _end(self, session: _Session, version: str | None) -> tuple[str, float]:
        staging = session.staging
        try:
            tensors = staging.collect(self._timeout_seconds)
        except StagingError as error:
            raise UpdateError(f"Nothing was changed, because a chunk failed: {error}") from error
        if not staging.dtypes:
            return "Ended; no weights were sent.", 0.0
        version = version or session.version
        if version is None:
            raise UpdateError(
                f"Nothing was changed: {len(staging.dtypes)} tensors arrived, but no chunk with a "
                "weight_version, which marks the last chunk."
            )
        targets = None
        if session.lora_scale is not None:
            targets = {served_weight_of(name) for name in tensors}
            tensors = self._adapted(tensors, session.lora_scale, targets)
        seconds = self._commit(tensors, version, session.abort_all)
        self._pushed = targets if targets is not None else self._pushed | set(tensors)
        self._remember(version, staging.dtypes)
        return f"Serving {len(staging.dtypes)} tensors as version {version!r}.", seconds

    def _adapted(
        self, factors: dict[str, torch.Tensor], scale: float, targets: set[str]
    ) -> dict[str, torch.Tensor]:
        """Returns the weights that adapters change, ready to be served.

        If others differ from the directory, because they were pushed before, all weights are returned.
        """
        add = self._base.adapted if self._pushed <= targets else self._base.all_with
        try:
            return {
                name: self._table.prepared(name, tensor)
                for name, tensor in add(factors, scale)
                if name in targets or self._table.has(name)
            }
        except (ValueError, OSError) as error:
            raise UpdateError(f"Nothing was changed: {error}") from error

    def load_from_disk(self, model_path: str, version: str | None, abort_all: bool) -> float:
        """Serves the weights of a Hugging Face directory; returns the duration of the swap."""
        with self._exclusive():
            if self._session is not None:
                raise UpdateError("A weight update is open. Call end_weight_update first.")
            try:
                check_folder(model_path)
                read = read_safetensors(model_path)
                dtypes = {n: str(t.dtype).removeprefix("torch.") for n, t in read.items()}
                self._table.check(
                    list(read), list(dtypes.values()), [list(t.shape) for t in read.values()]
                )
                if missing := self._table.missing(read):
                    raise ValueError(
                        f"{len(missing)} parameters are missing, such as {missing[:3]}."
                    )
            except (ValueError, OSError, SafetensorError) as error:
                raise UpdateError(f"The served weights were not changed. {error}") from error
            prepared = {name: self._table.prepared(name, t) for name, t in read.items()}
            seconds = self._commit(prepared, version, abort_all)
            self._pushed = set(prepared)
            self._remember(self._engine.version, dtypes)
            return seconds

    def close(self) -> None:
        """Leaves all groups."""
        self._leave_groups()

    def _leave_groups(self) -> None:
        # Another request may leave a group at the same time.
        leave_groups(
            group
            for name, group in list(self._groups.items())
            if group is not None and self._groups.pop(name, None) is group
        )

    @contextmanager
    def _exclusive(self, wait_seconds: float = 0.0) -> Iterator[None]:
        if not self._busy.acquire(timeout=wait_seconds):
            raise UpdateError(_UNDER_WAY)
        try:
            yield
        finally:
            self._busy.release()

    def _checked_group(self, bucket: BucketSpec, group_name: str) -> WeightGroup:
        group = self._groups.get(group_name)
        if group is None:
            raise ValueError(f"Group {group_name!r} does not exist. Known: {list(self._groups)}.")
        check_lengths(bucket)
        if is_of_adapters(bucket):
            refuse_wrong_dtypes(bucket.dtypes)
            self._base.check(bucket)
            return group
        self._table.check(bucket.names, bucket.dtypes, bucket.shapes)
        if bucket.num_changed is not None:
            self._check_base(bucket)
        return group

    def _prepared(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if is_adapter(name) else self._table.prepared(name, tensor)

    def _check_base(self, bucket: BucketSpec) -> None:
        """Raises ValueError unless a delta can be applied to the served weights."""
        bucket_bytes(bucket)
        served = self._served
        base = str(bucket.base_version)
        if served is None or not base == served.version == self._engine.version:
            raise ValueError(
                f"A delta must be against the served version, all of whose weights were received, "
                f"got base_version {bucket.base_version}; served is {self._engine.version!r}, "
                f"completely received is {served.version if served else None!r}. Send all of the "
                "weights."
            )
        for name, dtype in zip(bucket.names, bucket.dtypes, strict=True):
            came_in = served.dtypes.get(name)
            if came_in != dtype or not self._table.is_exact(name, WIRE_DTYPES[dtype]):
                raise ValueError(
                    f"{name}: a delta in {dtype} needs weights that were sent in {dtype} (they "
                    f"were sent in {came_in}) and a model whose dtype represents them exactly. "
                    "Send all of the weights."
                )

    def _remember(self, version: str, dtypes: dict[str, str]) -> None:
        # A delta cannot be applied to a version of which only a part was received.
        is_whole = not any(is_adapter(name) for name in dtypes) and not self._table.missing(dtypes)
        self._served = _Served(version, dtypes) if is_whole else None

    def _commit(
        self, tensors: dict[str, torch.Tensor], version: str | None, abort_all: bool
    ) -> float:
        self._table.wait_prepared()
        future = self._engine.swap_weights(
            lambda: self._table.adopt(tensors), version, abort_all=abort_all
        )
        seconds = self._swap_seconds(future)
        self._buffers.settle(self._table.tensors())
        logger.info("Serving %d new tensors as version %s.", len(tensors), self._engine.version)
        return seconds

    def _swap_seconds(self, future: "Future[float]") -> float:
        """Waits for a swap, first for its begin and then for its end."""
        try:
            return future.result(self._timeout_seconds)
        except FutureTimeoutError as error:
            if future.cancel():
                raise UpdateError(
                    f"Nothing was changed: no step of the engine ended within "
                    f"{self._timeout_seconds} s."
                ) from error
        try:
            return future.result(self._timeout_seconds)
        except FutureTimeoutError as error:
            raise UpdateError(
                f"The new weights must be in place within {self._timeout_seconds} s after the last "
                "step, but they are not. Restart the server."
            ) from error
