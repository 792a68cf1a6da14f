# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tokens that trainer and servers rate, and the trainer's log-probabilities of them."""

import asyncio
import random
import threading
import time
from collections.abc import Sequence

from torchtitan.grpo.job_config import JobConfig

_POLL_SECONDS = 0.02
_PROBE_LENGTH = 48


def attested_tokens(config: JobConfig, vocab_size: int) -> list[int]:
    """Returns the probe tokens of a run, short enough for the trainer and the servers."""
    longest = config.inference.max_model_len or config.training.seq_len
    return probe_tokens(
        vocab_size, max(2, min(_PROBE_LENGTH, longest - 1, config.training.seq_len))
    )


def probe_tokens(vocab_size: int, num_tokens: int = 48, seed: int = 20) -> list[int]:
    """Returns fixed token ids, the same in every process; [num_tokens].

    They are drawn from the whole vocabulary, so that differences in any of the embedding's
    rows may show.

    Raises:
        ValueError: If the vocabulary is empty, or if there is no token to predict.
    """
    if vocab_size < 1 or num_tokens < 2:
        raise ValueError(
            "Probe tokens need a vocabulary of at least 1 token and a length of at least 2, "
            f"got {vocab_size} and {num_tokens}."
        )
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]


def is_attested(version: int, every: int) -> bool:
    """Returns whether ``version`` is attested under ``weight_sync.attest_every``."""
    return every > 0 and version % every == 0


class Probes:
    """The trainer's log-probabilities of attested versions; safe to use from any thread.

    Those of version 0, the weights with which a run begins, are kept for good.

    Args:
        num_kept: Number of versions that are kept, which are the newest ones.
    """

    def __init__(self, num_kept: int = 4) -> None:
        if num_kept < 1:
            raise ValueError(f"At least one version must be kept, got num_kept = {num_kept}.")
        self._num_kept = num_kept
        self._changed = threading.Lock()
        self._expected: dict[int, tuple[float, ...]] = {}
        self._initial: tuple[float, ...] | None = None

    @property
    def initial(self) -> tuple[float, ...] | None:
        """The log-probabilities under version 0; ``None`` in a run that was resumed."""
        with self._changed:
            return self._initial

    def put(self, version: int, logprobs: Sequence[float]) -> None:
        """Stores the log-probabilities under ``version``; called by the training thread.

        Args:
            version: Policy version.
            logprobs: Log-probability of each probe token but the first, [num_tokens - 1].
        """
        with self._changed:
            self._expected[version] = tuple(float(logprob) for logprob in logprobs)
            if version == 0:
                self._initial = self._expected[0]
            for oldest in sorted(self._expected)[: -self._num_kept]:
                del self._expected[oldest]

    def get(self, version: int) -> tuple[float, ...] | None:
        """Returns the log-probabilities under ``version``; ``None`` if they are not stored."""
        with self._changed:
            return self._expected.get(version)

    async def wait_for(self, version: int, timeout_seconds: float) -> tuple[float, ...] | None:
        """Waits until the training thread has stored the log-probabilities under ``version``.

        Returns:
            The log-probabilities, or ``None`` if newer ones have replaced them. A lane that is
            so late will soon be given its next version.

        Raises:
            TimeoutError: If they are not stored within ``timeout_seconds``.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            expected = self.get(version)
            if expected is not None or self._is_past(version):
                return expected
            if time.monotonic() > deadline:
                raise TimeoutError(
                    "The trainer must compute its own log-probabilities of the probe tokens under "
                    f"policy_version {version} within {timeout_seconds:g} s, but they are missing, "
                    "so no server can be attested with this version (weight_sync.attest_every)."
                )
            # Polled, so that the training thread need not wake up another thread's loop.
            await asyncio.sleep(_POLL_SECONDS)

    def _is_past(self, version: int) -> bool:
        with self._changed:
            kept = self._expected
            return len(kept) == self._num_kept and version < min(kept) and version not in kept
