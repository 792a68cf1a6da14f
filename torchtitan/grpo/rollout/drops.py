# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Counts and announces what a run drops, such as groups or prompts, so that nothing is lost in silence.

The first drop of each kind is announced at once, with its reason, and the others are logged. The counts
since the last batch are reported as metrics, and the counts of the whole run in its summary.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchtitan.grpo.inference.client import LogprobsError, ServerError
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.types import CAUSES, Prompt, Rollout
from torchtitan.grpo.workers.owner import CallFailed

logger = logging.getLogger(__name__)

# Announced for one kind: a server or a reward function may each have a different reason.
_MAX_ANNOUNCED = 3


@dataclass(frozen=True)
class DropKind:
    """Names of a kind of drop: ``words`` in a step's log line and the summary, ``phrase`` in announcements.

    ``name`` is the last part of the metric's name. By default it is made from ``words``.
    """

    words: str
    phrase: str
    name: str = ""

    @property
    def metric(self) -> str:
        return f"rollout/{self.name or self.words.replace('-', '').replace(' ', '_')}"


DROP_KINDS: dict[str, DropKind] = {
    "reward raised": DropKind("rewards raised", "rewards that raised"),
    "reward timed out": DropKind("rewards timed out", "rewards that took too long"),
    "reward postponed": DropKind(
        "rewards postponed (computed again)", "rewards that have to wait", "rewards_postponed"
    ),
    "reward unusable": DropKind("rewards unusable", "rewards that cannot be used"),
    "episode failed": DropKind("episodes failed", "episodes that failed"),
    "request refused": DropKind("requests refused", "requests that a server refused"),
    "request unanswered": DropKind(
        "requests unanswered (made again)", "requests without an answer", "requests_unanswered"
    ),
    "rating failed": DropKind(
        "ratings failed (made again)", "ratings that a teacher did not give", "failed_ratings"
    ),
    "logprobs unusable": DropKind("logprobs unusable", "answers without usable logprobs"),
    "answer unusable": DropKind("answers unusable", "answers that cannot be used"),
    "answer cut": DropKind("answers cut by a server", "answers cut by a server's length"),
    "held-out prompt": DropKind(
        "held-out unscored", "completions of held-out prompts without a score"
    ),
    "too long": DropKind("prompts too long", "prompts that are too long"),
    "unusable": DropKind("prompts unusable", "prompts that cannot be used"),
    "failed": DropKind("groups failed", "groups without enough completions", "failed_groups"),
    "unscored": DropKind("groups unscored", "groups without enough rewards", "unscored_groups"),
    "unrated": DropKind("groups unrated", "groups without a teacher's rating", "unrated_groups"),
    "expired": DropKind("groups expired", "groups with outdated tokens", "expired_groups"),
    "overdue": DropKind("groups overdue", "groups that were overdue", "overdue_groups"),
    "filtered": DropKind("groups filtered", "groups that were filtered out", "filtered_groups"),
    # The judge counts these, and nothing announces them one by one.
    **{c: DropKind(f"completions unscored by {c}", "", m.split("/")[1]) for c, m in CAUSES.items()},
}
"""The reasons for which the ledger closes a prompt are among them."""


class DropLog:
    """Announces the first drops of each kind, and counts all drops in ``counts``."""

    def __init__(self, announce: Callable[[str], None] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._announce = announce or logger.warning
        self._announced: defaultdict[str, set[str]] = defaultdict(set)
        self._last: Counter[str] = Counter()

    def record(self, kind: str, reason: str, *, source: str = "", number: int = 1) -> None:
        """Counts drops of one ``kind``, a key of :data:`DROP_KINDS`.

        ``source`` is where a drop came from, such as a server. For the first few sources of a kind, the
        first drop is announced. All other drops are logged. ``reason`` is a sentence.
        """
        self.counts[kind] += number
        announced = self._announced[kind]
        if source not in announced and len(announced) < _MAX_ANNOUNCED:
            announced.add(source)
            self._announce(f"First of the {DROP_KINDS[kind].phrase}: {reason}")
        else:
            logger.info("%s: %s", DROP_KINDS[kind].words, reason)

    def record_scoring(self, failure: CallFailed) -> None:
        kind = "reward raised" if " raised " in failure.kind else "reward unusable"
        known = {"timeout": "reward timed out", "postponed": "reward postponed"}
        self.record(known.get(failure.kind, kind), str(failure), source=failure.kind)

    def record_episode(self, failure: CallFailed) -> None:
        self.record("episode failed", str(failure), source=failure.kind)

    def record_request(self, url: str, error: ServerError) -> None:
        self.record(kind_of_request(error), str(error), source=url)

    def record_closed(
        self, group_id: int, reason: CloseReason, detail: str, environment: str = "", row: str = ""
    ) -> None:
        of = f" ({row})" * bool(row) + f" of environments.{environment}" * bool(environment)
        why = detail.removeprefix(f"{row}: ")
        self.record(reason, f"group {group_id}{of} is not trained on. {why}", source=environment)

    def log_unscored(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        for one in (one for one in rollouts if one.reward is None):
            where = prompt.group_id, prompt.row, one.unscored, ascii(one.completion)[:500]
            logger.info("group %d (%s), unscored by %s: %s", *where)

    def take_metrics(self) -> dict[str, float]:
        last, self._last = self._last, self.counts.copy()
        return {k.metric: float(self.counts[name] - last[name]) for name, k in DROP_KINDS.items()}


def kind_of_request(error: ServerError) -> str:
    if isinstance(error, LogprobsError):
        return "logprobs unusable"
    if isinstance(error, RouteError):
        return "request refused" if error.is_refusal else "request unanswered"
    return "request unanswered" if isinstance(error.__cause__, TimeoutError) else "answer unusable"


def run_summary(counts: Mapping[str, int]) -> str:
    found = [f"{n} {kind.words}" for name, kind in DROP_KINDS.items() if (n := counts.get(name))]
    if not found:
        return ""
    return f"Dropped in this run: {', '.join(found)}. The reasons are above and in rollout_process.log."
