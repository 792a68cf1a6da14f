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
_NUM_TOKENS = 48
_SEED = 20


def attested_tokens(config: JobConfig, vocab_size: int) -> list[int]:
    """Returns the probe tokens of a run, the same in every process.

    They are few enough for the trainer and the servers, and are drawn from the whole
    vocabulary, so that differences in any of the embedding's rows may show.
    """
    longest = config.inference.max_model_len or config.training.seq_len
    num_tokens = max(2, min(_NUM_TOKENS, longest - 1, config.training.seq_len))
    generator = random.Random(_SEED)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]


def is_attested(version: int, every: int) -> bool:
    return every > 0 and version % every == 0


class Probes:
    """The trainer's log-probabilities of attested versions; safe to use from any thread.

    The newest ``num_kept`` versions are kept, and those of version 0, with which a run begins,
    are kept for good.
    """

    def __init__(self, num_kept: int = 4) -> None:
        self._num_kept = num_kept
        self._lock = threading.Lock()
        self._expected: dict[int, tuple[float, ...]] = {}
        self._initial: tuple[float, ...] | None = None

    @property
    def initial(self) -> tuple[float, ...] | None:
        """The log-probabilities under version 0; ``None`` in a run that was resumed."""
        with self._lock:
            return self._initial

    def put(self, version: int, logprobs: Sequence[float]) -> None:
        """Stores log-probabilities, [num_tokens - 1]; called by the training thread."""
        with self._lock:
            self._expected[version] = tuple(float(logprob) for logprob in logprobs)
            if version == 0:
                self._initial = self._expected[0]
            for oldest in sorted(self._expected)[: -self._num_kept]:
                del self._expected[oldest]

    async def wait_for(self, version: int, timeout_seconds: float) -> tuple[float, ...] | None:
        """Waits until the training thread has stored the log-probabilities under ``version``.

        Returns ``None`` if newer ones have replaced them: a lane that is so late will soon be
        given its next version. Raises ``TimeoutError``.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            with self._lock:
                expected = self._expected.get(version)
                is_full = len(self._expected) == self._num_kept
                is_past = is_full and version < min(self._expected)
            if expected is not None or is_past:
                return expected
            if time.monotonic() > deadline:
                raise TimeoutError(
                    "The trainer must compute its own log-probabilities of the probe tokens under "
                    f"policy_version {version} within {timeout_seconds:g} s, but they are missing, "
                    "so no server can be attested with this version (weight_sync.attest_every)."
                )
            # Polled, so that the training thread need not wake up another thread's loop.
            await asyncio.sleep(_POLL_SECONDS)
