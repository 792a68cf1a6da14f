# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The interface of an environment, which reads the model's turns and answers them.

An episode is one completion of a prompt::

    reset(prompt) -> step(first turn) -> step(second turn) -> ... -> close()
                        |                   |
                        v                   v
                  observation, which    is_done: the episode ends
                  the model reads

A turn ends with a stop token: one of the model's, one of ``rollout.stop_token_ids``, or one of the
environment's own ``stop_strings``. The context of the next turn consists of the prompt, the tokens
exactly as the model wrote them, and the tokens of the observations. Text that the model wrote is
never tokenized again, unless ``rollout.earlier_turns`` lets the chat template rewrite it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchtitan.grpo.types import Generation, Prompt
from torchtitan.grpo.workers.owner import CallFailed


@dataclass(frozen=True)
class Observation:
    """An environment's answer to a turn.

    At most one of ``text``, ``token_ids`` and ``messages`` may be given. If none of them is given
    and ``is_done`` is false, the model continues to write.

    Attributes:
        text: Text that is tokenized by itself and appended to the turn. The spelling of a special
            token is plain text unless ``has_special_tokens`` is set.
        token_ids: Token ids that are appended to the turn unchanged.
        messages: Chat messages with ``role`` and ``content``. The model's chat template appends
            them to the turn and opens the next turn.
        is_done: Whether the episode ends with this turn. The observation is then dropped, because
            no trained token would follow it.
        reward: Added to the completion's ``environment_reward``; ``None`` adds nothing.
        has_special_tokens: Whether ``text`` may contain special tokens, such as ``<|im_end|>``. Do
            not set it for the output of a tool, which could then end a turn.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = field(default=None)
    is_done: bool = False
    reward: float | None = None
    has_special_tokens: bool = False


class Environment(Protocol):
    """The environment of one episode. Each completion gets a new object.

    All methods run in a worker process, in a thread and an event loop that belong to the episode,
    so they may block without delaying other episodes. If a call raises an exception or takes longer
    than ``rollout.environment_timeout_seconds``, the completion fails.

    After a resume, or if its process was lost, an episode begins a second time. A new environment
    then gets the same prompt and the same turns, up to where the completion was. From the first
    observation that differs, the model writes its turns anew.
    """

    stop_strings: Sequence[str] = ()
    """Strings that end a turn and are part of it. Each must be one token of the model's tokenizer."""

    async def reset(self, prompt: Prompt) -> None:
        """Begins the episode. This method runs while the model writes its first turn."""
        ...

    async def step(self, text: str, token_ids: list[int]) -> Observation:
        """Reads a turn and returns the observation.

        ``text`` is the turn without special tokens, and ``token_ids`` are exactly what the model wrote. A
        turn that was cut off at the length limit is also passed, but no turn follows it.
        """
        ...

    async def cut_off(self) -> float | None:
        """Ends an episode that has reached the length limit or ``rollout.max_turns``.

        This method is optional. It is called after the last step. If it returns a reward, this is added
        to the episode's reward.
        """
        return None

    async def close(self) -> None:
        """Releases the episode's resources. It is called once, even after a failure."""
        ...


# Exit statuses and signals of programs that something else has ended, or that ask for another try.
_ENDED_BY_OTHERS = (-9, -15, -2, -1, 75, 124, 125, 126, 127, 129, 130, 137, 143)


class EnvironmentFailed(CallFailed):
    """One episode cannot continue. ``written`` is its completion, if the completion caused the failure."""

    written: Generation | None = None

    def blame(self, written: Generation | None) -> None:
        """Sets ``written``, unless this machine, a service or the data may have caused the failure."""
        what, _, number = self.kind.rpartition(" ")
        is_status = what == "exit status" and int(number) not in _ENDED_BY_OTHERS
        if is_status or self.kind.startswith(("raised ", "bad reward", "bad observation")):
            self.written = written


class EnvironmentsFailing(RuntimeError):
    """The environment does not work at all, so the run must stop."""
