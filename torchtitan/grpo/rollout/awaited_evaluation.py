# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The evaluation that rank 0 has requested and whose result it has not taken yet."""

from collections.abc import Sequence

from torchtitan.grpo.rollout.link_messages import Answer, Evaluate, EvaluationDone
from torchtitan.grpo.rollout.results import EvaluationResult


class AwaitedEvaluation:
    """Matches the answer of an evaluation with its request, of which there is at most one."""

    def __init__(self) -> None:
        self.request: Evaluate | None = None
        self._num_requests = 0

    def make_request(self, version: int, pinned: Sequence[str]) -> Evaluate:
        """Returns a new request, the only one that is awaited from now on."""
        self._num_requests += 1
        self.request = Evaluate(self._num_requests, version, list(pinned))
        return self.request

    def take_from(self, answers: list[tuple[Answer, list[bytes]]]) -> EvaluationResult | None:
        """Removes the answers to evaluations from a list; returns the result that was awaited.

        A request that was renewed or given up may be answered as well.
        """
        found = [answer for answer, _ in answers if isinstance(answer, EvaluationDone)]
        answers[:] = [each for each in answers if not isinstance(each[0], EvaluationDone)]
        for done in found:
            if self.request is not None and done.request_id == self.request.request_id:
                self.request = None
                return done.result
        return None

    def describe(self) -> str:
        assert self.request is not None, "an evaluation must be requested first"
        return f"evaluate version {self.request.version}"
