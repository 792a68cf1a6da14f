# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What stands where the publisher does, in a run that has no servers."""

from collections.abc import Callable

from torchtitan.grpo.weight_sync.probe import Probes


class Unpublished:
    """A replayed run's publisher: its weights go nowhere."""

    num_failures = 0
    failure = None

    def __init__(self) -> None:
        self.probes = Probes()

    def is_attested(self, version: int) -> bool:
        """Nobody serves it."""
        return False

    def reserve_slot(self) -> int:
        return 0

    def raise_if_failed(self) -> None:
        """Nothing runs that could fail."""

    def fence(self) -> None:
        """Nothing is being copied."""

    def publish(self, version: int, slot: int) -> None:
        """Nobody waits for it."""

    def wait_for(
        self, version: int, timeout_seconds: float, should_stop: Callable[[], bool]
    ) -> None:
        """Nobody has to receive it."""

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing was started."""
