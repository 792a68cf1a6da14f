# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Weight updates: the process groups they come through, and their sessions.

    (no session) -- begin --> OPEN -- receive, ... --> OPEN -- end --> (no session)

What is received lies in staging buffers until ``end`` swaps all of it in at once, between
two steps of the engine. ``end`` commits only what is known to be whole: every chunk
arrived, and one of them (the last) named the ``weight_version``. Otherwise all of it is
dropped and the model is as it was. So a trainer that comes back after a crash may always
call ``end`` first.

The methods block (a broadcast waits for the trainer), and are called from threads of their
own. They raise :class:`UpdateError` for everything that the caller is told with 400.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from torchtitan.grpo.inference.client import BucketSpec
from torchtitan.grpo.inference.embedded.engine import Engine
from torchtitan.grpo.inference.embedded.groups import WeightGroup
from torchtitan.grpo.inference.embedded.weights import (
    WIRE_DTYPES,
    WeightTable,
    read_safetensors,
    split_bucket,
    tensor_bytes,
)

logger = logging.getLogger(__name__)


class UpdateError(RuntimeError):
    """An update was refused or failed; the weights served are what they were."""


@dataclass
class _Session:
    staged: dict[str, torch.Tensor] = field(default_factory=dict)
    version: str | None = None
    abort_all: bool = False
    failure: str | None = None


class WeightUpdater:
    """Receives weights and commits them to the engine.

    Args:
        engine: Whose weights they are.
        table: Its model's parameters.
        device: The model's device; NCCL groups receive there, gloo groups on the CPU.
        timeout_seconds: Bound of a rendezvous, of each broadcast, and of the swap.
    """

    def __init__(
        self, engine: Engine, table: WeightTable, device: torch.device, timeout_seconds: float
    ) -> None:
        self._engine = engine
        self._table = table
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._busy = threading.Lock()
        self._session: _Session | None = None
        # None while the group's rendezvous is under way.
        self._groups: dict[str, WeightGroup | None] = {}

    def init_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Joins a group; returns when all its peers have."""
        if backend not in ("gloo", "nccl"):
            raise UpdateError(f"backend must be gloo or nccl, got {backend!r}.")
        if backend == "nccl" and self._device.type != "cuda":
            raise UpdateError("backend nccl needs a server on CUDA; this one is on CPU. Use gloo.")
        if not 0 < rank < world_size:
            raise UpdateError(f"rank_offset must be in [1, {world_size}), got {rank}.")
        if group_name in self._groups:
            raise UpdateError(f"Group {group_name!r} exists. Destroy it or use another name.")
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
            )
        except (RuntimeError, ValueError, OSError) as error:
            del self._groups[group_name]
            raise UpdateError(
                f"Group {group_name!r} at {master_address}:{master_port} was not joined within "
                f"{self._timeout_seconds} s: {error}"
            ) from error

    def destroy_group(self, group_name: str) -> None:
        """Leaves a group; a broadcast that waits in it fails."""
        group = self._groups.get(group_name)
        if group is None:
            state = "is being joined" if group_name in self._groups else "does not exist"
            raise UpdateError(f"Group {group_name!r} {state}.")
        del self._groups[group_name]
        group.leave()

    def begin(self) -> None:
        """Opens a session."""
        with self._exclusive():
            if self._session is not None:
                raise UpdateError("A weight update is open. Call end_weight_update first.")
            self._session = _Session()

    def receive(
        self,
        bucket: BucketSpec,
        *,
        group_name: str,
        flattened: bool,
        version: str | None,
        abort_all: bool,
    ) -> None:
        """Receives one chunk into staging; refuses it before any broadcast is waited for."""
        with self._exclusive():
            session = self._session
            if session is None:
                raise UpdateError("No weight update is open. Call begin_weight_update first.")
            try:
                group = self._checked_group(bucket, group_name, session)
                session.staged.update(self._receive(bucket, group, flattened))
            except (RuntimeError, ValueError) as error:
                # Also on a refusal: a commit without this chunk would serve a mixture.
                session.failure = str(error)
                raise UpdateError(str(error)) from error
            session.version = session.version if version is None else version
            session.abort_all |= abort_all

    def fail(self, reason: str) -> None:
        """Makes :meth:`end` drop the open session: a chunk of it could not even be read."""
        if self._session is not None:
            self._session.failure = reason

    def end(self) -> str:
        """Commits the session, or drops it whole; returns what to tell the caller."""
        with self._exclusive():
            session, self._session = self._session, None
            if session is None:
                raise UpdateError("No weight update is open.")
            if session.failure is not None:
                raise UpdateError(f"Nothing was changed, since a chunk failed: {session.failure}")
            if not session.staged:
                return "Ended; no weights were sent."
            if session.version is None:
                raise UpdateError(
                    f"Nothing was changed: {len(session.staged)} tensors came, but no chunk with a "
                    "weight_version, which marks the last one."
                )
            self._commit(session.staged, session.version, session.abort_all)
            return f"Serving {len(session.staged)} new tensors as version {session.version!r}."

    def load_from_disk(self, model_path: str, version: str | None, abort_all: bool) -> None:
        """Serves the weights of a Hugging Face directory."""
        with self._exclusive():
            if self._session is not None:
                raise UpdateError("A weight update is open. Call end_weight_update first.")
            try:
                tensors = read_safetensors(model_path)
                names = list(tensors)
                dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors.values()]
                self._table.check(names, dtypes, [list(t.shape) for t in tensors.values()])
                self._table.check_complete(names)
            except (ValueError, OSError) as error:
                raise UpdateError(f"Nothing was changed. {error}") from error
            self._commit(tensors, version, abort_all)

    def close(self) -> None:
        """Leaves all groups."""
        for name, group in list(self._groups.items()):
            if group is not None:
                self.destroy_group(name)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise UpdateError(
                "Another weight operation is under way. Wait for its answer, or end it with "
                "destroy_weights_update_group."
            )
        try:
            yield
        finally:
            self._busy.release()

    def _checked_group(self, bucket: BucketSpec, group_name: str, session: _Session) -> WeightGroup:
        group = self._groups.get(group_name)
        if group is None:
            raise ValueError(f"Group {group_name!r} does not exist. Known: {list(self._groups)}.")
        shapes = [list(shape) for shape in bucket.shapes]
        self._table.check(list(bucket.names), list(bucket.dtypes), shapes)
        again = session.staged.keys() & set(bucket.names)
        if again:
            raise ValueError(f"{sorted(again)[0]} came twice in one update.")
        return group

    def _receive(
        self, bucket: BucketSpec, group: WeightGroup, flattened: bool
    ) -> dict[str, torch.Tensor]:
        device = group.buffer_device(self._device)
        names, dtypes = list(bucket.names), list(bucket.dtypes)
        shapes = [list(shape) for shape in bucket.shapes]
        if flattened:
            size = sum(tensor_bytes(dtypes, shapes))
            flat = torch.empty(size, dtype=torch.uint8, device=device)
            group.receive(flat)
            tensors = split_bucket(flat, names, dtypes, shapes)
        else:
            tensors = {
                name: torch.empty(shape, dtype=WIRE_DTYPES[dtype], device=device)
                for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
            }
            for tensor in tensors.values():
                group.receive(tensor)
        return tensors

    def _commit(
        self, tensors: dict[str, torch.Tensor], version: str | None, abort_all: bool
    ) -> None:
        self._engine.swap_weights(
            lambda: self._table.load(tensors), version, abort_all=abort_all
        ).result(self._timeout_seconds)
        logger.info("Serving %d new tensors as version %s.", len(tensors), self._engine.version)
