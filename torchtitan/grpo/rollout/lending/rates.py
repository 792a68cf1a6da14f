# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how fast lent and other servers generate, in groups per second.

A group here means as many tokens as a trained group has on average. Tokens count when their completion
ends or is cut. Speeds are measured only while the trainer waits, because the staleness bound holds
other servers back while it trains.
"""

from collections.abc import Callable, Collection

from torchtitan.grpo.rollout.fading_mean import FadingMean
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server

_FADE = 0.8  # each step counts so many times as much as the one after it


class _Speed:
    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self.of_step = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        self._tokens += num_tokens
        self._seconds += seconds

    def fade(self) -> None:
        self._tokens *= _FADE
        self._seconds *= _FADE

    @property
    def per_second(self) -> float | None:
        return self._tokens / self._seconds if self._tokens and self._seconds else None


class Rates:
    """Measures the speeds of all lent and of all other servers. ``lent`` returns the lent servers' URLs."""

    def __init__(self, dispatcher: Dispatcher, lent: Callable[[], Collection[str]]) -> None:
        self._dispatcher, self._lent = dispatcher, lent
        self._tokens_per_group = FadingMean(_FADE)
        self._speeds = {True: _Speed(), False: _Speed()}  # by whether servers are lent
        self._counted: dict[str, int] = {}
        self._noted_at: float | None = None

    def note(self, now: float, *, is_asked: bool, are_awake: bool) -> None:
        """Counts the tokens that servers generated since the last call.

        ``is_asked`` and ``are_awake`` say whether, since then, the trainer waited and lent servers served.
        """
        seconds = 0.0 if self._noted_at is None else now - self._noted_at
        self._noted_at = now
        urls = self._lent()
        tokens = {True: 0, False: 0}
        for url, server in self._dispatcher.servers.items():
            tokens[url in urls] += server.num_tokens - self._counted.get(url, 0)
            self._counted[url] = server.num_tokens
        for is_lent, counts in ((True, are_awake), (False, is_asked)):
            speed = self._speeds[is_lent]
            speed.of_step += tokens[is_lent]
            if counts:
                speed.add(tokens[is_lent], seconds)

    def take_step(self, tokens_per_group: float) -> tuple[float, float]:
        """Returns how many groups lent servers generated since the last call, and their share of all tokens."""
        self._tokens_per_group.add(tokens_per_group)
        lent, other = (self._speeds[is_lent].of_step for is_lent in (True, False))
        for speed in self._speeds.values():
            speed.fade()
            speed.of_step = 0
        return self._groups(lent), lent / max(lent + other, 1)

    @property
    def lent(self) -> float | None:
        if not self._lent_and_others()[0]:
            return 0.0
        return self._rate(self._speeds[True])

    @property
    def other(self) -> float | None:
        if not any(server.version is not None for server in self._lent_and_others()[1]):
            return 0.0
        return self._rate(self._speeds[False])

    def _rate(self, speed: _Speed) -> float | None:
        is_known = speed.per_second is not None and self._tokens_per_group.value > 0
        return self._groups(speed.per_second or 0.0) if is_known else None

    def elsewhere(self) -> set[int | None]:
        """Returns the ids of the groups that run on servers that are not lent."""
        others = self._lent_and_others()[1]
        jobs = (job for server in others for job in server.jobs)
        return {job.group_id for job in jobs if not job.is_evaluation}

    def _groups(self, tokens: float) -> float:
        return tokens / max(self._tokens_per_group.value, 1.0)

    def _lent_and_others(self) -> tuple[list[Server], list[Server]]:
        urls = self._lent()
        servers = self._dispatcher.servers
        lent = [server for url, server in servers.items() if url in urls]
        return lent, [server for url, server in servers.items() if url not in urls]
