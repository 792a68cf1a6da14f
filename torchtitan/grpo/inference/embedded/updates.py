# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Weight updates of the embedded server.

Buckets are received while the engine generates. ``end`` then swaps all of them in between two
steps, but only if every bucket has arrived and was verified, and one of them has named the
``weight_version``. Otherwise ``end`` drops the update, and the model does not change. A restarted
trainer may therefore always call ``end`` or ``leave_all`` first.

Where a method raises :class:`UpdateError` or ValueError, the server answers with status 400.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch

from torchtitan.grpo.inference.embedded.bodies import GroupBody
from torchtitan.grpo.inference.embedded.engine import Engine
from torchtitan.grpo.inference.embedded.weights import Residence, WeightTable
from torchtitan.grpo.system.files import check_folder
from torchtitan.grpo.weight_wire.adapter_names import is_adapter, served_weight_of
from torchtitan.grpo.weight_wire.buckets import WIRE_DTYPES, is_exact_in
from torchtitan.grpo.weight_wire.session import UpdateSession
from torchtitan.grpo.weight_wire.staging import StagingPlace, UpdateError
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_LEAVE_SECONDS = 2.0
# Maximum duration of reading a version from disk, unless that of a broadcast is longer.
_DISK_SECONDS = 600.0


class WeightUpdater:
    """Receives weights and commits them to the engine.

    NCCL groups receive on ``device``, gloo groups on the CPU. ``timeout_seconds`` bounds a
    rendezvous, each broadcast, and the swap. Adapters are added to the weights in ``model_path``.
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
        self.table = table
        self._timeout_seconds = timeout_seconds
        self._busy = threading.Lock()
        place = StagingPlace(device, table.in_wire_dtype, self._prepared, stream=table.stream)
        self.session = UpdateSession(place, table.check, lambda: model_path)
        self._version: str | None = None  # of the open update
        self._pushed: set[str] = set()  # may differ from the directory

    def join(self, body: GroupBody) -> None:
        fields = msgspec.structs.asdict(body)
        self.session.join(WeightGroupInfo(**fields, timeout_seconds=self._timeout_seconds))

    def leave_all(self) -> None:
        self.session.leave_groups()
        # An operation that waited in a group has failed, and ends soon.
        with self._exclusive(_LEAVE_SECONDS):
            self.session.drop()

    def sleep(self) -> None:
        """Frees the memory of the weights and of the KV cache. Ends all requests, and drops an open update."""
        with self._exclusive(_LEAVE_SECONDS):
            self.session.release()
            self._pushed = set(self.table.parameters)  # adapters alone no longer make all weights
            self._wait(self._engine.sleep(self.table.release))

    def wake(self) -> None:
        """Lets a sleeping server receive weights. It serves again once an update of all weights is committed."""
        with self._exclusive(_LEAVE_SECONDS):
            self._wait(self._engine.wake(self.table.allocate))

    def begin(self) -> None:
        with self._exclusive():
            self._refuse_asleep()
            self.session.begin()
            self._version = None

    def announce(
        self, bucket: BucketSpec, group_name: str, *, sequence: int | None, version: str | None
    ) -> "Future[None]":
        """Queues or refuses one bucket. The future completes when the bucket has arrived and was verified."""
        future = self.session.announce(bucket, group_name, sequence)
        self._version = version or self._version
        return future

    def fail(self, reason: str) -> None:
        """Makes :meth:`end` drop the open update, because one of its buckets could not be parsed."""
        if self.session.is_open:
            self.session.staging.refuse(reason)

    def end(self, version: str | None = None) -> tuple[str, float]:
        """Commits or drops the whole update. Returns a message, and for how many seconds generation stopped."""
        with self._exclusive():
            if self.session.staging.is_receiving:
                raise UpdateError(_UNDER_WAY)
            with self._dropping():
                return self._commit(version or self._version, self._timeout_seconds)

    def load_from_disk(self, model_path: str, version: str) -> float:
        """Serves a Hugging Face directory's weights. Returns for how many seconds generation stopped."""
        with self._exclusive():
            self._refuse_asleep()
            self.session.begin()
            with self._dropping():
                check_folder(model_path)
                self.session.read(model_path)
                if missing := self.table.missing(self.session.staging.dtypes):
                    raise ValueError(
                        f"{len(missing)} parameters are missing, such as {missing[:3]}."
                    )
                return self._commit(version, max(self._timeout_seconds, _DISK_SECONDS))[1]

    @contextmanager
    def _exclusive(self, wait_seconds: float = 0.0) -> Iterator[None]:
        if not self._busy.acquire(timeout=wait_seconds):
            raise UpdateError(_UNDER_WAY)
        try:
            yield
        finally:
            self._busy.release()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Drops the update if the ``with`` block fails, and raises an error saying that nothing was changed."""
        try:
            with self.table.on_stream():  # adapters may have been staged on it
                yield
        except _SwapError:
            raise
        except (UpdateError, ValueError, OSError) as error:
            self.session.drop()
            raise UpdateError(f"Nothing was changed: {error}") from error

    def _prepared(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if is_adapter(name) else self.table.prepared(name, tensor)

    def _commit(self, version: str | None, timeout_seconds: float) -> tuple[str, float]:
        tensors = self.session.collect(timeout_seconds)
        dtypes = self.session.received
        if not dtypes:
            return "Ended; no weights were sent.", 0.0
        if version is None:
            raise UpdateError(
                f"{len(dtypes)} tensors arrived, but no chunk with a weight_version, which marks the "
                "last chunk."
            )
        pushed = self._pushed | set(tensors)
        if self.session.is_of_adapters:
            pushed = {served_weight_of(name) for name in tensors}
            # If others differ from the directory, because they were pushed before, all are replaced.
            tensors = {
                name: self.table.prepared(name, tensor)
                for name, tensor in self.session.with_adapters(
                    tensors, all_weights=not self._pushed <= pushed
                )
                if name in pushed or name in self.table.parameters
            }
        is_served = self._engine.residence is Residence.SERVED
        if not is_served and (missing := self.table.missing(tensors)):
            raise UpdateError(
                f"{Residence.EMPTY.refusal} {len(missing)} are missing, such as {missing[:3]}."
            )
        self.table.wait_prepared()
        swap = self._engine.swap_weights(lambda: self.table.adopt(tensors), version)
        seconds = self._wait(swap)
        self._pushed = pushed
        self.session.settle(
            self.table.parameters.values(), version if self._is_base(dtypes) else None
        )
        logger.info("Serving %d new tensors as version %s.", len(tensors), version)
        return f"Serving {len(dtypes)} tensors as version {version!r}.", seconds

    def _refuse_asleep(self) -> None:
        if self._engine.residence is Residence.ASLEEP:
            raise UpdateError(Residence.ASLEEP.refusal)

    def _wait(self, future: "Future[_T]") -> _T:
        """Waits for a call to the engine, and cancels the call if it has not begun within the timeout."""
        try:
            return future.result(self._timeout_seconds)
        except FutureTimeoutError as error:
            if future.cancel():
                raise UpdateError(
                    f"no step of the engine ended within {self._timeout_seconds} s."
                ) from error
        try:
            return future.result(self._timeout_seconds)
        except FutureTimeoutError as error:
            raise _SwapError(
                f"The change of the weights must end within {self._timeout_seconds} s after the last "
                "step, but it has not ended. Restart the server."
            ) from error

    def _is_base(self, dtypes: dict[str, str]) -> bool:
        """Returns whether later deltas can build on this update: it has all weights, and all are held exactly."""
        return (
            not self.session.is_of_adapters
            and not self.table.missing(dtypes)
            and all(
                is_exact_in(WIRE_DTYPES[dtype], self.table.parameters[name].dtype)
                for name, dtype in dtypes.items()
            )
        )


class _SwapError(UpdateError):
    """The engine has begun to swap weights and has not finished in time."""


_UNDER_WAY = (
    "Another weight operation is under way. Wait for its answer, or end it with a request to "
    "/leave_weight_groups."
)
