# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What an environment is: it reads what the model wrote, and answers.

An episode is one completion of a prompt::

    reset(prompt) -> step(first turn) -> step(second turn) -> ... -> close()
                        |                   |
                        v                   v
                  observation, which    is_done: the episode ends
                  the model reads

A turn ends with a stop token: of the model, of ``rollout.stop_token_ids``, or the environment's
own ``stop_strings``. The context of the next turn is the prompt, the tokens that the model wrote,
as they are, and the tokens of the observations: text that the model wrote is never tokenised
again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchtitan.grpo.types import Prompt


@dataclass(frozen=True)
class Observation:
    """What an environment answers to a turn. At most one of the first three is given.

    Without any of them, and without ``is_done``, the model just goes on writing.

    Attributes:
        text: Tokenised by itself and put behind the turn. What spells a special token of the
            tokenizer is plain text, unless ``has_special_tokens``.
        token_ids: Put behind the turn as they are.
        messages: Chat messages, ``role`` and ``content`` each; the model's chat template writes
            them behind the turn, and opens the next one.
        is_done: The episode ends with this turn. Its observation is then not put anywhere:
            nothing would be trained after it.
        reward: Added to the completion's ``environment_reward``; None adds nothing.
        has_special_tokens: ``text`` may name special tokens, such as ``<|im_end|>``. Do not set
            it for what a tool has answered: it could then end a turn.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = field(default=None)
    is_done: bool = False
    reward: float | None = None
    has_special_tokens: bool = False


class Environment(Protocol):
    """One episode; made anew for each completion.

    All methods run in a worker process, on an event loop and a thread of the episode's own, so
    they may block: other episodes go on. Each call is bounded by
    ``rollout.environment_timeout_seconds``; one that takes longer, or raises, fails its
    completion, and a thread that hangs ends with its process.

    An episode may be begun a second time, after a resume or where its process was lost: a new
    environment is given the same prompt and the same turns. Where it then observes the same, the
    completion is gone on with; where it does not, the completion is begun anew.
    """

    stop_strings: Sequence[str] = ()
    """Each one token of the model's tokenizer: it ends a turn, and is part of it."""

    async def reset(self, prompt: Prompt) -> None:
        """Begins the episode. It runs while the model writes its first turn."""
        ...

    async def step(self, text: str, token_ids: list[int]) -> Observation:
        """Reads a turn.

        Args:
            text: Of the turn, without special tokens and end of sequence. A turn that was cut
                off at the length limit is read as well, and nothing comes after it.
            token_ids: The turn as the model wrote it.
        """
        ...

    async def cut_off(self) -> float | None:
        """The episode ends without ``is_done``: out of room, or of ``rollout.max_turns``.

        Called after the last step, if the environment has it. Returns a further reward, or None.
        """
        return None

    async def close(self) -> None:
        """Releases what the episode holds. Called once, also after a failure."""
        ...
