# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The publisher of a run that has no servers."""

from collections.abc import Callable

from torchtitan.grpo.attestation import Probes
from torchtitan.grpo.weight_sync.publisher import Publisher


class Unpublished(Publisher):
    """The publisher of a replay or of supervised training, which sends no weights."""

    def __init__(self) -> None:
        self.probes = Probes()

    @property
    def failure(self) -> None:
        return None

    @property
    def num_failures(self) -> int:
        return 0

    def is_attested(self, version: int) -> bool:
        return False

    def reserve_slot(self) -> int:
        return 0

    def fence(self) -> None:
        """Does nothing, because nothing is copied."""

    def publish(self, version: int, slot: int) -> None:
        """Does nothing, because there is no server to which to push."""

    def wait_for(
        self, version: int, timeout_seconds: float, should_stop: Callable[[], bool]
    ) -> None:
        """Returns immediately, because no server has to take the version."""

    def metrics(self) -> dict[str, float]:
        return {}

    def raise_if_failed(self) -> None:
        """Does nothing, because no thread runs that could fail."""

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Does nothing, because nothing was started."""
