# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rows of a table as prompts. Each prompt is tokenized when it is first used."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.grpo.config import Prompts, RolloutProcessConfig
from torchtitan.grpo.rollout.tables import Table, open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Prompt

SET_COLUMN = "prompt_set"
_MAX_CACHED_PROMPTS = 100_000
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class PromptLimits:
    """Limits that every prompt must satisfy.

    Attributes:
        max_tokens: Prompts with more tokens are left out.
        vocab_size: All token IDs must be below this number.
        source: Settings from which ``max_tokens`` follows, for messages.
        remedy: What to change if prompts are too long, as a sentence for messages.
    """

    max_tokens: int
    vocab_size: int
    source: str = "prompts.max_prompt_tokens, or training.seq_len minus rollout.max_new_tokens"
    remedy: str = (
        "Raise prompts.max_prompt_tokens or training.seq_len, or lower rollout.max_new_tokens."
    )

    @classmethod
    def of(cls, config: RolloutProcessConfig) -> "PromptLimits":
        """Returns the limits of a configuration. A prompt leaves room for at least one token."""
        wanted = config.prompts.max_prompt_tokens or config.seq_len - config.rollout.max_new_tokens
        return cls(max(1, min(wanted, config.seq_len - 1)), config.vocab_size)


class PromptSet:
    """Converts the rows of a table to prompts. Only one thread at a time may use it.

    Args:
        table: The table.
        settings: Prompt column, renamed columns and template.
        codec: Tokenizer of the model.
        limits: Maximum prompt length and vocabulary size.
        key: TOML key of the table's path, for messages.
        set_name: Value of the column ``prompt_set`` that is added to each row, unless the row has
            such a column. ``None`` adds no column.

    Attributes:
        too_long_reason: Which prompt is too long, as a sentence. Empty if none was so far.
    """

    def __init__(
        self,
        table: Table,
        settings: Prompts,
        codec: TextCodec,
        limits: PromptLimits,
        key: str,
        set_name: str | None = None,
    ) -> None:
        self._table = table
        self._settings = settings
        self._codec = codec
        self._limits = limits
        self.key = key
        self._set_name = set_name
        self._token_ids: dict[int, np.ndarray] = {}
        self._too_long: set[int] = set()
        self.too_long_reason = ""

    @classmethod
    def open(
        cls,
        path: str,
        split: str,
        config: RolloutProcessConfig,
        codec: TextCodec,
        key: str,
        name: str | None = None,
        set_name: str | None = None,
    ) -> "PromptSet":
        """Opens and checks the table at ``path``.

        Raises:
            ValueError: If the table is missing, empty or unreadable, or lacks the prompt column.
        """
        settings = config.prompts
        table = open_table(path, split, settings.rename, settings.column, key, name)
        return cls(table, settings, codec, PromptLimits.of(config), key, set_name)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def path(self) -> str:
        """Location of the table, for messages."""
        return self._table.path

    @property
    def _most_characters(self) -> int:
        return self._limits.max_tokens * self._codec.longest_token

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a prompt."""
        return self._limits.max_tokens

    def prompt(self, row: int, index: int) -> Prompt | None:
        """Returns row ``row`` as prompt ``index`` of the stream, or ``None`` if it is too long.

        Raises:
            ValueError: If the row is not a valid prompt, if a token ID is not in the model's
                vocabulary, or if the background check has found an invalid row.
        """
        self._table.check()
        if row in self._too_long:
            return None
        columns = dict(self._table.row(row))
        if self._set_name is not None:
            columns.setdefault(SET_COLUMN, self._set_name)
        text = self._text(columns, row)
        token_ids = self._token_ids.get(row)
        if token_ids is None:
            # First of all, because a tokenizer takes hundreds of bytes for each character.
            num_characters, most = _num_characters(text), self._most_characters
            if num_characters > most:
                self._too_long.add(row)
                self.too_long_reason = self.too_long_reason or (
                    f"{self._table.where(row)}: the prompt has {num_characters} characters. It is not "
                    f"tokenized, because {self.max_tokens} tokens ({self._limits.source}) of the "
                    f"model's longest token hold at most {most}."
                )
                return None
            token_ids = self._tokenize(text, row)
            if len(token_ids) > self._limits.max_tokens:
                self._too_long.add(row)
                self.too_long_reason = self.too_long_reason or self._describe_long(row, token_ids)
                return None
            if len(self._token_ids) < _MAX_CACHED_PROMPTS:
                self._token_ids[row] = token_ids
        columns.pop(self._settings.column)
        return Prompt(index=index, text=text, token_ids=token_ids, columns=columns)

    def _describe_long(self, row: int, token_ids: np.ndarray) -> str:
        return (
            f"{self._table.where(row)}: the prompt has {len(token_ids)} tokens, and at most "
            f"{self.max_tokens} are taken ({self._limits.source})."
        )

    def sample(self) -> Prompt:
        """Returns the first prompt that is short enough, for checks of reward functions.

        Raises:
            ValueError: If a row is invalid, or if all prompts are too long.
        """
        for row in range(len(self)):
            prompt = self.prompt(row, row)
            if prompt is not None:
                return prompt
        raise self.none_fits_error()

    def columns(self, row: int) -> dict[str, Any]:
        """A row's columns without its prompt, which is neither read nor tokenized.

        Raises:
            ValueError: If the row cannot be read.
        """
        columns = dict(self._table.row(row))
        columns.pop(self._settings.column)
        return columns

    def where(self, row: int) -> str:
        """Names a row in messages."""
        return self._table.where(row)

    @property
    def none_fits(self) -> bool:
        """Whether all rows were read and all are too long."""
        return len(self._too_long) == len(self)

    def none_fits_error(self) -> ValueError:
        """Returns the error for a set in which all prompts are too long."""
        return ValueError(
            f"{self.key}: none of the {len(self)} prompts in {self.path} is at most "
            f"{self.max_tokens} tokens long. {self._limits.remedy}"
        )

    def close(self) -> None:
        """Closes the table."""
        self._table.close()

    def _text(self, columns: dict[str, Any], row: int) -> str | list[dict[str, str]]:
        value = columns[self._settings.column]
        where = self._table.where(row)
        if isinstance(value, str):
            self._refuse_chat_settings(where)
            return self._apply_template(value, columns, where)
        if not _is_conversation(value):
            raise ValueError(
                f"{where}: column {self._settings.column!r} (prompts.column) must be a string, or "
                f"a list of messages with role and content, got {value!r:.200}."
            )
        if self._settings.template is not None:
            raise ValueError(
                f"{where}: prompts.template applies to string prompts only, but this prompt is a "
                "list of chat messages. Remove prompts.template."
            )
        value = [message for message in value if not _is_empty_system(message)]
        if not value:
            raise ValueError(f"{where}: a prompt must say something, but its messages are empty.")
        if value[-1]["role"] == "assistant":
            raise ValueError(
                f"{where}: a prompt must end before the turn that the model is to write, but this one "
                "ends with a message of the assistant. Remove that message from column "
                f"{self._settings.column!r}, and keep its text in a column of its own if the reward "
                "needs it."
            )
        return self._with_system_prompt(value, where)

    def _with_system_prompt(
        self, messages: list[dict[str, str]], where: str
    ) -> list[dict[str, str]]:
        text = self._settings.chat_settings()["system_prompt"]
        if text is None:
            return messages
        if messages[0]["role"] in _SYSTEM_ROLES:
            raise ValueError(
                f"{where}: prompts.system_prompt is set, but this prompt begins with a system message "
                f"of its own, {messages[0]['content']!r:.80}. Remove prompts.system_prompt, or the "
                "message."
            )
        return [{"role": "system", "content": text}, *messages]

    def _refuse_chat_settings(self, where: str) -> None:
        for key, setting in self._settings.chat_settings().items():
            if setting:
                raise ValueError(
                    f"{where}: prompts.{key} needs prompts that are lists of chat messages, but this "
                    "prompt is a string, to which no chat template is applied. Write the prompt as "
                    '[{"role": "user", "content": ...}], or use prompts.template and remove '
                    f"prompts.{key}."
                )

    def _apply_template(self, value: str, columns: dict[str, Any], where: str) -> str:
        if self._settings.template is None:
            return value
        try:
            return self._settings.template.format(**{**columns, "prompt": value})
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{where}: prompts.template {self._settings.template!r} cannot be filled in: "
                f"{error!r}. It may contain {{prompt}} and the columns {sorted(columns)}. Write "
                "{{ and }} for literal braces."
            ) from error

    def _tokenize(self, text: str | list[dict[str, str]], row: int) -> np.ndarray:
        if isinstance(text, str):
            token_ids = np.asarray(self._codec.encode(text), dtype=np.int32)
        else:
            token_ids = np.asarray(self._codec.encode_chat(text), dtype=np.int32)
        if len(token_ids) == 0:
            raise ValueError(f"{self._table.where(row)}: the prompt has no tokens. Remove the row.")
        largest = int(token_ids.max())
        if largest >= self._limits.vocab_size:
            raise ValueError(
                f"{self._table.where(row)}: the tokenizer produced token id {largest}, but the "
                f"model's vocabulary has only {self._limits.vocab_size} entries. Check that the "
                "tokenizer and config.json in model.hf_assets_path belong to the same model."
            )
        return token_ids


def first_prompts(prompts: PromptSet, num_prompts: int) -> tuple[list[Prompt], int]:
    """Returns the first ``num_prompts`` prompts in file order (0 means all).

    Returns:
        The prompts, and the number of prompts that were left out because they are too long.

    Raises:
        ValueError: If a row is invalid, or if all prompts are too long.
    """
    num_rows = min(num_prompts or len(prompts), len(prompts))
    found = [prompts.prompt(row, row) for row in range(num_rows)]
    usable = [prompt for prompt in found if prompt is not None]
    if not usable:
        raise ValueError(
            f"{prompts.key}: none of the first {num_rows} prompts in {prompts.path} is at most "
            f"{prompts.max_tokens} tokens long. Raise prompts.max_prompt_tokens or "
            "training.seq_len, or evaluate more prompts (evaluation.num_prompts)."
        )
    return usable, num_rows - len(usable)


def _num_characters(text: str | list[dict[str, str]]) -> int:
    """Returns the length of a prompt, which its chat template can only add to."""
    if isinstance(text, str):
        return len(text)
    contents = (message["content"] for message in text)
    return sum(len(content) for content in contents if isinstance(content, str))


def _is_empty_system(message: dict[str, Any]) -> bool:
    """Whether the template would render a system turn in which nothing is said."""
    content = message["content"]
    if isinstance(content, list):
        parts = (part.get("text", part) if isinstance(part, dict) else part for part in content)
        content = "".join(map(str, parts))
    is_empty = content is None or (isinstance(content, str) and not content.strip())
    return is_empty and message["role"] in _SYSTEM_ROLES


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in value)
    )
