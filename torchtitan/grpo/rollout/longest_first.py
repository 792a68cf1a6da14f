# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Within each batch, starts the prompts with the longest predicted answers first.

A long answer that starts last is generated alone at the end. If it starts first, short answers run
beside it (Graham's longest-processing-time rule).
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from torchtitan.grpo.rollout.fading_mean import FadingMean
from torchtitan.grpo.types import Prompt

_BUCKETS = 96
# The two further features are the prompt's length and its former answers.
_NUM_FEATURES = _BUCKETS + 2
_FADE = 0.999
_SKILL_FADE = 0.98
_RIDGE = 4.0
_FEWEST_GROUPS = 16
# The equations are solved again after this many groups, which takes 0.3 ms each time.
_SOLVE_EVERY = 4
# A prompt's history counts as if one more group had had the mean length.
_PRIOR_GROUPS = 1.0
_HISTORY_GAIN = 0.5
_LARGEST_DEVIATION = 3.0


class LongestFirst:
    """Sorts the prompts of each window by predicted length.

    The stream of prompts is divided into windows of one batch. Every prompt of a window is
    returned before any prompt of the next, so the set of prompts that a run has seen after a
    number of batches does not depend on the predictions. The caller repeats::

        while (prompt := order.pop()) is None:
            order.push(next(prompts))

    Example: with windows of 3, prompts 0 to 5 with predicted lengths 5, 9, 7, 1, 2, 8 are
    returned in the order 1, 2, 0, 5, 4, 3.

    ``predict`` is called once per prompt, in :meth:`push`. If it is ``None``, the prompts keep the
    order of the stream.
    """

    def __init__(self, window: int, predict: Callable[[Prompt], float] | None) -> None:
        self._window, self._predict = window, predict
        self._coming: list[tuple[float, Prompt]] = []
        self._ready: deque[Prompt] = deque()

    def push(self, prompt: Prompt) -> None:
        assert not self._ready, "all prompts of the previous window must be popped first"
        if self._predict is None:
            self._ready.append(prompt)
            return
        self._coming.append((self._predict(prompt), prompt))
        if len(self._coming) == self._window:
            # Prompts of equal length keep their order.
            self._coming.sort(key=lambda entry: entry[0], reverse=True)
            self._ready.extend(prompt for _, prompt in self._coming)
            self._coming.clear()

    def pop(self) -> Prompt | None:
        """Returns the next prompt to start, or ``None`` while its window is incomplete."""
        return self._ready.popleft() if self._ready else None


class LengthRanker:
    """Learns from finished groups and predicts answer lengths. It is deterministic.

    The idea is from StreamRL's output length ranker (2025, https://arxiv.org/abs/2504.15930), a
    language model trained beforehand. This one is a ridge regression that learns online from
    the run's own completions. That suffices, as only the order of the prompts matters.

    It predicts the logarithm of a prompt's mean answer length, relative to the running mean, from
    the prompt's tokens (counted in hashed buckets), its length, and the lengths of former answers.
    Old statistics fade, because the policy changes: about the last thousand groups count. Where
    lengths cannot be predicted, the ranker must do no harm. It therefore predicts each group before
    it learns from it, and multiplies every predicted deviation from the mean by the fraction of
    variance that recent predictions explained.

    Before the first group, the prediction is ``first_guess`` tokens. Former lengths are kept for the
    ``max_prompts`` prompts seen last, in about 160 bytes each.
    """

    def __init__(self, first_guess: float, max_prompts: int = 100_000) -> None:
        self._first_guess = first_guess
        self._max_prompts = max_prompts
        self.num_groups = 0
        self._mean_tokens = FadingMean(_FADE)
        self._mean_log = FadingMean(_FADE)
        self._mean_features = np.zeros(_NUM_FEATURES)
        self._moments = np.zeros((_NUM_FEATURES, _NUM_FEATURES))
        self._products = np.zeros(_NUM_FEATURES)
        self._weights = np.zeros(_NUM_FEATURES)
        self._error = FadingMean(_SKILL_FADE)
        self._variance = FadingMean(_SKILL_FADE)
        # Digest of the token ids -> (deviation of the log length, number of groups).
        self._history: dict[bytes, tuple[float, int]] = {}

    @property
    def skill(self) -> float:
        """The fraction of variance in log length that recent predictions explained, in [0, 1]."""
        if self.num_groups < _FEWEST_GROUPS or self._variance.value <= 0:
            return 0.0
        return min(max(1.0 - self._error.value / self._variance.value, 0.0), 1.0)

    def predict(self, prompt: Prompt) -> float:
        if self.num_groups == 0:
            return self._first_guess
        deviation = self.skill * self._deviation(self._features(prompt))
        return self._mean_tokens.value * math.exp(deviation)

    def observe(self, prompt: Prompt, lengths: Sequence[int]) -> None:
        """Learns from a finished group. ``lengths`` are those of its answers in tokens, each at least 1."""
        if not lengths:
            return
        features = self._features(prompt)
        log_length = float(np.mean(np.log(lengths)))
        if self.num_groups:
            deviation = log_length - self._mean_log.value
            self._error.add((deviation - self._deviation(features)) ** 2)
            self._variance.add(deviation**2)
        self._mean_tokens.add(float(np.mean(lengths)))
        self._mean_log.add(log_length)
        self.num_groups += 1
        self._learn(features, log_length - self._mean_log.value)
        self._remember(_digest(prompt), log_length - self._mean_log.value)

    def _deviation(self, features: np.ndarray) -> float:
        value = float(self._weights @ (features - self._mean_features))
        return min(max(value, -_LARGEST_DEVIATION), _LARGEST_DEVIATION)

    def _learn(self, features: np.ndarray, deviation: float) -> None:
        self._mean_features += self._mean_log.gain * (features - self._mean_features)
        centered = features - self._mean_features
        self._moments = _FADE * self._moments + np.outer(centered, centered)
        self._products = _FADE * self._products + deviation * centered
        if self.num_groups >= _FEWEST_GROUPS and self.num_groups % _SOLVE_EVERY == 0:
            ridge = _RIDGE * np.eye(_NUM_FEATURES)
            self._weights = np.linalg.solve(self._moments + ridge, self._products)

    def _features(self, prompt: Prompt) -> np.ndarray:
        """Returns the regression's features of a prompt, as a float64 array [_NUM_FEATURES]."""
        # A multiplicative hash spreads adjacent ids. Its upper bits are well mixed.
        mixed = prompt.token_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        buckets = (mixed >> np.uint64(40)) % np.uint64(_BUCKETS)
        counts = np.bincount(buckets.astype(np.int64), minlength=_BUCKETS)
        deviation, num_groups = self._history.get(_digest(prompt), (0.0, 0))
        trusted = deviation * num_groups / (num_groups + _PRIOR_GROUPS)
        return np.concatenate([np.log1p(counts), [math.log(len(prompt.token_ids)), trusted]])

    def _remember(self, key: bytes, deviation: float) -> None:
        former, num_groups = self._history.pop(key, (deviation, 0))
        gain = max(_HISTORY_GAIN, 1.0 / (num_groups + 1))
        self._history[key] = (former + gain * (deviation - former), num_groups + 1)
        if len(self._history) > self._max_prompts:
            del self._history[next(iter(self._history))]


def _digest(prompt: Prompt) -> bytes:
    """Identifies a prompt by its tokens, because its index changes from epoch to epoch."""
    return hashlib.blake2b(prompt.token_ids.tobytes(), digest_size=8).digest()
