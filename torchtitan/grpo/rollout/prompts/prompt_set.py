# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rows of a table as prompts. Each prompt is tokenized when it is first used."""

import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.grpo.config import Prompts, RolloutProcessConfig
from torchtitan.grpo.rollout.prompts.checked_rows import CheckedRows
from torchtitan.grpo.rollout.tables import RowError, Table, open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Prompt

SET_COLUMN = "prompt_set"
_MAX_CACHED_PROMPTS = 100_000
_SYSTEM_ROLES = ("system", "developer")
_VISIBLE = re.compile(r"[^\s\0\u200b-\u200f\u2060\ufeff]")

PromptText = str | list[dict[str, str]]
"""A prompt as its author wrote it: text, or chat messages."""


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
        checked: What the check of the rows has found; ``None`` before it.
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
        self._unusable: dict[int, str] = {}
        self.checked: CheckedRows | None = None
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
    def num_bytes(self) -> int:
        """Size of the table as far as it is known."""
        return self._table.num_bytes

    @property
    def limits(self) -> PromptLimits:
        """The limits that prompts must satisfy."""
        return self._limits

    @property
    def most_characters(self) -> int:
        """Prompts of more characters are certainly too long, and are not tokenized."""
        return self._limits.max_tokens * self._codec.longest_token

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a prompt."""
        return self._limits.max_tokens

    def prompt(self, row: int, index: int) -> Prompt | None:
        """Returns row ``row`` as prompt ``index`` of the stream, or ``None`` if it is too long.

        Raises:
            RowError: If the row is not a valid prompt, or a token ID is not in the model's vocabulary.
            ValueError: If the table cannot be read any more, or no prompt can be rendered.
        """
        if row in self._too_long:
            return None
        try:
            return self._prompt(row, index)
        except RowError as error:
            self._unusable.setdefault(row, "" if self._unusable else str(error))
            raise

    def _prompt(self, row: int, index: int) -> Prompt | None:
        columns = dict(self._table.row(row))
        if self._set_name is not None:
            columns.setdefault(SET_COLUMN, self._set_name)
        text = self._text(columns, row)
        token_ids = self._token_ids.get(row)
        if token_ids is None:
            # First of all, because a tokenizer takes hundreds of bytes for each character.
            number, most = num_characters(text), self.most_characters
            if number > most:
                self._too_long.add(row)
                self.too_long_reason = self.too_long_reason or (
                    f"{self._table.where(row)}: the prompt has {number} characters. It is not "
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
        return Prompt(group_id=index, text=text, token_ids=token_ids, columns=columns)

    def _describe_long(self, row: int, token_ids: np.ndarray) -> str:
        return (
            f"{self._table.where(row)}: the prompt has {len(token_ids)} tokens, and at most "
            f"{self.max_tokens} are taken ({self._limits.source})."
        )

    def texts(self, first: int, end: int) -> Iterator[tuple[dict[str, Any], PromptText] | RowError]:
        """Yields columns and text of the rows ``first`` to ``end - 1``, or why a row is no prompt.

        Chat messages are not rendered, and nothing is tokenized.
        """
        for row, columns in enumerate(self._table.rows(first, end), start=first):
            if isinstance(columns, RowError):
                yield columns
                continue
            try:
                yield columns, self._text(columns, row)
            except RowError as error:
                yield error

    def sample(self) -> Prompt:
        """Returns the first prompt that can be used, for checks of reward functions.

        Raises:
            ValueError: If there is none.
        """
        for row in range(len(self)):
            try:
                prompt = self.prompt(row, row)
            except RowError:
                continue
            if prompt is not None:
                return prompt
        raise self.none_usable_error()

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
    def none_usable(self) -> bool:
        """Whether all rows were read, and none is a prompt that is short enough."""
        return len(self._too_long) + len(self._unusable) == len(self)

    def none_usable_error(self) -> ValueError:
        """Returns the error for a set in which no prompt can be used."""
        unusable = len(self._unusable)
        reason = next(iter(self._unusable.values()), "")
        if unusable == len(self):
            return ValueError(
                f"{self.key}: none of the {unusable} rows of {self.path} can be used. The first that was "
                f"read: {reason}"
            )
        others = f", and {unusable} rows cannot be used (such as {reason})" if unusable else ""
        return ValueError(
            f"{self.key}: none of the {len(self)} prompts in {self.path} is at most "
            f"{self.max_tokens} tokens long{others}. {self._limits.remedy}"
        )

    def close(self) -> None:
        """Closes the table."""
        self._table.close()

    def _text(self, columns: dict[str, Any], row: int) -> PromptText:
        value = columns[self._settings.column]
        where = self._table.where(row)
        if isinstance(value, str):
            self._refuse_chat_settings(where)
            return self._apply_template(value, columns, where)
        if fault := _fault_of_messages(value):
            raise RowError(
                f"{where}: column {self._settings.column!r} (prompts.column) must be a string, or "
                f"a list of messages with role and content, {fault}."
            )
        if self._settings.template is not None:
            raise RowError(
                f"{where}: prompts.template applies to string prompts only, but this prompt is a "
                "list of chat messages. Remove prompts.template."
            )
        value = [m for m in value if m["role"] not in _SYSTEM_ROLES or not _is_blank(m["content"])]
        if value[-1]["role"] == "assistant":
            raise RowError(
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
            raise RowError(
                f"{where}: prompts.system_prompt is set, but this prompt begins with a system message "
                f"of its own, {messages[0]['content']!r:.80}. Remove prompts.system_prompt, or the "
                "message."
            )
        return [{"role": "system", "content": text}, *messages]

    def _refuse_chat_settings(self, where: str) -> None:
        for key, setting in self._settings.chat_settings().items():
            if setting:
                raise RowError(
                    f"{where}: prompts.{key} needs prompts that are lists of chat messages, but this "
                    "prompt is a string, to which no chat template is applied. Write the prompt as "
                    '[{"role": "user", "content": ...}], or use prompts.template and remove '
                    f"prompts.{key}."
                )

    def _apply_template(self, value: str, columns: dict[str, Any], where: str) -> str:
        template = self._settings.template or ""
        try:
            text = (
                _Template().format(template, **columns | {"prompt": value}) if template else value
            )
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise RowError(
                f"{where}: prompts.template {template!r} cannot be filled in: "
                f"{error!r}. It may contain {{prompt}} and the columns {sorted(columns)}. Write "
                "{{ and }} for literal braces."
            ) from error
        if _is_blank(text) or (_is_blank(value) and "{prompt" in template):
            raise RowError(
                f"{where}: column {self._settings.column!r} (prompts.column) must hold text, got "
                f"{value!r:.200}: the prompt has no text. Remove the row."
            )
        return text

    def _tokenize(self, text: PromptText, row: int) -> np.ndarray:
        if isinstance(text, str):
            token_ids = np.asarray(self._codec.encode(text), dtype=np.int32)
        else:
            try:
                token_ids = np.asarray(self._codec.encode_chat(text), dtype=np.int32)
            except ValueError as error:
                raise RowError(f"{self._table.where(row)}: {error}") from error
        if len(token_ids) == 0:
            raise RowError(f"{self._table.where(row)}: the prompt has no tokens. Remove the row.")
        largest = int(token_ids.max())
        if largest >= self._limits.vocab_size:
            raise RowError(
                f"{self._table.where(row)}: the tokenizer produced token id {largest}, but the "
                f"model's vocabulary has only {self._limits.vocab_size} entries. Check that the "
                "tokenizer and config.json in model.hf_assets_path belong to the same model."
            )
        return token_ids


Judge = Callable[[Mapping[str, Any]], str | None]
"""Says why a row's columns cannot be used; ``None`` if they can."""


def first_prompts(
    prompts: PromptSet, num_prompts: int, judge: Judge = lambda columns: None
) -> tuple[list[Prompt], int]:
    """Returns the first ``num_prompts`` prompts in file order (0 means all).

    Args:
        prompts: The set.
        num_prompts: Number of rows to read.
        judge: Judges the columns of each row.

    Returns:
        The prompts, and the number of prompts that were left out because they are too long.

    Raises:
        ValueError: If a row cannot be used, or if all prompts are too long.
    """
    num_rows = min(num_prompts or len(prompts), len(prompts))
    usable, bad = [], []
    for row in range(num_rows):
        try:
            prompt = prompts.prompt(row, row)
        except RowError as error:
            refuse_bad_rows(prompts, [*bad, str(error)], row + 1)
            raise
        problem = None if prompt is None else judge(prompt.columns)
        if problem is not None:
            bad.append(f"{prompts.where(row)}: {problem}")
        elif prompt is not None:
            usable.append(prompt)
    refuse_bad_rows(prompts, bad, num_rows)
    if not usable:
        raise ValueError(
            f"{prompts.key}: none of the first {num_rows} prompts in {prompts.path} is at most "
            f"{prompts.max_tokens} tokens long. Raise prompts.max_prompt_tokens or "
            "training.seq_len, or evaluate more prompts (evaluation.num_prompts)."
        )
    return usable, num_rows - len(usable)


def refuse_bad_rows(prompts: PromptSet, bad: Sequence[str], num_checked: int) -> None:
    """Refuses a set with rows that cannot be used.

    Args:
        prompts: The set.
        bad: Why each of these rows cannot be used, in the order of the file.
        num_checked: Number of rows that were looked at.

    Raises:
        ValueError: If there is such a row. The message names the first.
    """
    if bad:
        raise ValueError(
            f"{prompts.key}: {len(bad)} of the {num_checked} rows of {prompts.path} that were checked "
            f"cannot be used. The first: {bad[0]}"
        )


def num_characters(text: PromptText) -> int:
    """Returns the length of a prompt, which its chat template can only add to."""
    if isinstance(text, str):
        return len(text)
    contents = (message["content"] for message in text)
    return sum(len(content) for content in contents if isinstance(content, str))


def _fault_of_messages(value: Any) -> str | None:
    """Says what a list of chat messages lacks; ``None`` if it is one."""
    if not isinstance(value, list) or not value:
        return f"got {value!r:.200}"
    for number, message in enumerate(value, start=1):
        if not (isinstance(message, dict) and "role" in message and "content" in message):
            return f"got {value!r:.200}"
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or not role:
            return f"but message {number} has the role {role!r:.80}"
        has_more = any(value for key, value in message.items() if key not in ("role", "content"))
        may_be_null = role in _SYSTEM_ROLES or (role == "assistant" and has_more)
        if not (isinstance(content, str | list) or (content is None and may_be_null)):
            return f"but the content of message {number} ({role}) is {content!r:.80}"
    last = value[-1]
    if last["role"] not in ("tool", "assistant") and _is_blank(last["content"]):
        return f"but the last message ({last['role']}) has no text"
    return None


def _is_blank(content: Any) -> bool:
    """Whether a prompt, or what a message holds, has no visible text and nothing but text."""
    if isinstance(content, list):
        return all(map(_is_blank, content))
    if isinstance(content, dict):
        return content.get("type", "text") == "text" and _is_blank(content.get("text"))
    return content is None or (isinstance(content, str) and _VISIBLE.search(content) is None)


class _Template(string.Formatter):
    """Fills in ``prompts.template``. A value that is missing would be printed as None or nan."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        found = value, _ = super().get_field(field_name, args, kwargs)
        if value is None or value != value:
            raise ValueError(f"{field_name} is {'null' if value is None else 'NaN'} in this row")
        return found
