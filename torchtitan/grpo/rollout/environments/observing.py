# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From an environment's observation to the context of the model's next turn.

A chat template may write earlier turns differently from the model, for example without their
thinking (``rollout.earlier_turns``). The context of the next turn then begins a new training
row, so that each turn is trained on with the context with which it was generated. What the model was
shown is left out of training where the rows are made, in `agents/rows.py`.
"""

from torchtitan.grpo.rollout.agents.answering import EpisodeSettings
from torchtitan.grpo.rollout.agents.exchange import ModelAnswer, ModelRequest
from torchtitan.grpo.rollout.agents.failures import EnvironmentFailed
from torchtitan.grpo.rollout.agents.transcript import Context, Message, Transcript
from torchtitan.grpo.rollout.chat_template import LeftOut, tools_of
from torchtitan.grpo.rollout.environments.protocol import Observation
from torchtitan.grpo.rollout.tokenizer import TextTooLong
from torchtitan.grpo.types import Prompt


class Observer:
    """The contexts of one episode's turns, and the room for them. ``num_rewritten`` began rows."""

    def __init__(self, settings: EpisodeSettings, prompt: Prompt) -> None:
        rollout = settings.config.rollout
        self.num_rewritten = 0
        self._codec, self._vocab_size = settings.codec, settings.config.vocab_size
        self._row = prompt.token_ids.tolist()
        self._row_len = settings.sampling.max_total_tokens
        self._num_left, self._turns_left = settings.sampling.max_new_tokens, rollout.max_turns
        self._messages: list[Message] = [] if isinstance(prompt.text, str) else [*prompt.text]
        self._templated = bool(self._messages) and rollout.earlier_turns == "as_templated"
        self._transcript = Transcript(settings.codec, templated=self._templated)
        self._tools = tools_of(prompt.columns)
        self._context: Context | None = None
        # Of the assistant's message that the next turn continues.
        self._message_ids: list[int] = []
        self._message_text = ""

    def first(self) -> ModelRequest:
        return ModelRequest(token_ids=self._row, max_tokens=self._num_left, may_call=False)

    def observe(self, turn: ModelAnswer, observation: Observation) -> ModelRequest | None:
        """Returns the request for the next turn; None if none can follow.

        Raises EnvironmentFailed if the model cannot be shown the observation.
        """
        self._turns_left -= 1
        try:
            shown = self._shown(turn, observation)
        except LeftOut:  # so would the next one be, and no rollout must be trained on without it
            raise
        except TextTooLong:
            return None
        except ValueError as error:
            raise EnvironmentFailed("bad observation", str(error)) from error
        row = [*self._row, *turn.token_ids]
        is_rewritten = shown[: len(row)] != row
        new = shown if is_rewritten else shown[len(row) :]
        if new and not (min(new) >= 0 and max(new) < self._vocab_size):
            raise EnvironmentFailed(
                "bad observation",
                f"The token ids of an observation must be in [0, {self._vocab_size}), the model's "
                f"vocabulary, got {min(new)} to {max(new)}.",
            )
        # A context that begins a row does not count as written.
        self._num_left -= len(turn.token_ids) + (0 if is_rewritten else len(new))
        self._row = shown
        room = min(self._num_left, self._row_len - len(shown))
        if turn.finish_reason == "length" or self._turns_left <= 0 or room <= 0:
            return None
        self.num_rewritten += is_rewritten
        return ModelRequest(token_ids=shown, max_tokens=room, may_call=False)

    def _shown(self, turn: ModelAnswer, observation: Observation) -> list[int]:
        """Returns the whole context of the next turn."""
        codec, text = self._codec, observation.text
        if observation.messages is None:
            ids = observation.token_ids or []
            if text is not None:
                has_special = observation.has_special_tokens
                ids = codec.encode_observation(text, has_special_tokens=has_special)
            if self._templated:
                self._message_text += turn.text + codec.decode_exactly(ids)
            self._message_ids += [*turn.token_ids, *ids]
            return [*self._row, *turn.token_ids, *ids]
        message = {"role": "assistant", "content": self._message_text + turn.text}
        context = self._context or self._first_context()
        written = self._transcript.turn(context, [*self._message_ids, *turn.token_ids])
        self._messages.append(message)
        context = self._transcript.context_behind(
            written, self._messages, observation.messages, self._tools
        )
        self._messages += observation.messages
        self._context, self._message_ids, self._message_text = context, [], ""
        return context.token_ids

    def _first_context(self) -> Context:
        num_prompt = len(self._row) - len(self._message_ids)
        text = ""
        if self._templated:
            text = self._codec.template.render(self._messages, tools=self._tools)
        return Context(self._row[:num_prompt], text)
