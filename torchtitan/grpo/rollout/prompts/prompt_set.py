# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rows of a table as prompts. Each prompt is tokenized when it is first used."""

import re
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.grpo.config import Prompts, RolloutProcessConfig
from torchtitan.grpo.rollout.chat_template import media_in, text_of, tools_of
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
    """Limits for each prompt of a set. ``source`` names the settings that determine ``max_tokens``.

    ``remedy`` is a sentence on what to do if prompts are too long.
    """

    max_tokens: int
    vocab_size: int
    source: str = "prompts.max_prompt_tokens, or training.seq_len minus rollout.max_new_tokens"
    remedy: str = (
        "Raise prompts.max_prompt_tokens or training.seq_len, or lower rollout.max_new_tokens."
    )

    @classmethod
    def of(cls, config: RolloutProcessConfig) -> "PromptLimits":
        # A prompt leaves room for at least one token.
        wanted = config.prompts.max_prompt_tokens or config.seq_len - config.rollout.max_new_tokens
        return cls(max(1, min(wanted, config.seq_len - 1)), config.vocab_size)


@dataclass(frozen=True)
class CheckedRows:
    """Counts of checked rows. ``num_tokenized`` includes prompts with too many characters to tokenize."""

    num_rows: int
    num_checked: int
    num_tokenized: int
    num_fitting: int
    limits: PromptLimits

    def describe(self) -> str:
        text = f"all {self.num_rows:,} rows checked"
        if self.num_checked < self.num_rows:
            text = (
                f"{self.num_checked:,} of {self.num_rows:,} rows checked, and a bad one among the others "
                "will be left out"
            )
        sampled = "" if self.num_tokenized == self.num_rows else " that were tokenized"
        return f"{text}; {self.num_fitting:,} of {self.num_tokenized:,} prompts{sampled} fit"


class PromptSet:
    """Converts the rows of a table to prompts. Only one thread at a time may use it.

    ``key`` is the TOML key of the table's path. ``set_name`` is the value of the column
    ``prompt_set`` for rows that lack it. ``environment`` is the name of the set's environment, if the
    run has several. ``too_long_reason`` is a sentence on the first prompt that was too long, if any.
    """

    def __init__(
        self,
        table: Table,
        settings: Prompts,
        codec: TextCodec,
        limits: PromptLimits,
        key: str,
        set_name: str | None = None,
        environment: str = "",
    ) -> None:
        self._table, self._settings, self._codec = table, settings, codec
        self.path, self.num_bytes = table.path, table.num_bytes
        self.where, self.close = table.where, table.close
        self.limits, self.key = limits, key
        self._set_name, self.environment = set_name, environment
        self._token_ids: dict[int, np.ndarray] = {}
        self._too_long: set[int] = set()
        self._unusable: dict[int, str] = {}
        self._unread = ""  # what the tokenizer cannot read of the first such row
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
        environment: str = "",
    ) -> "PromptSet":
        """Opens the table at ``path``. Raises ValueError if it cannot be used."""
        settings = config.prompts
        table = open_table(path, split, settings.rename, settings.column, key, name)
        return cls(table, settings, codec, PromptLimits.of(config), key, set_name, environment)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def most_characters(self) -> int:
        """The number of characters above which a prompt must be too long, and is not tokenized."""
        return self.limits.max_tokens * self._codec.longest_token

    def prompt(self, row: int, index: int) -> Prompt | None:
        """Returns row ``row`` as prompt ``index`` of the stream, or ``None`` if it is too long.

        Raises :class:`RowError` if the row has no valid prompt, or token IDs outside the vocabulary.
        """
        if row in self._too_long:
            return None
        self._codec.unread.clear()
        try:
            columns = dict(self._table.row(row))
            if self._set_name is not None:
                columns.setdefault(SET_COLUMN, self._set_name)
            text = self._text(columns, row)
            token_ids = self._tokens_of(text, row, columns)
        except RowError as error:
            self._unusable.setdefault(row, "" if self._unusable else str(error))
            raise
        if token_ids is None:
            self._too_long.add(row)
            return None
        if unread := self._codec.unread:
            self._unread = (
                self._unread or f"{', '.join(map(repr, sorted(unread))):.200} in {self.where(row)}"
            )
        columns.pop(self._settings.column)
        return Prompt(index, text, token_ids, columns, self.where(row))

    def texts(self, first: int, end: int) -> Iterator[tuple[dict[str, Any], PromptText] | RowError]:
        """Yields, for each of the rows [first, end), its columns and prompt, or the error if it has none."""
        for row, columns in enumerate(self._table.rows(first, end), start=first):
            try:
                if isinstance(columns, RowError):
                    raise columns
                yield columns, self._text(columns, row)
            except RowError as error:
                yield error

    def sample(self) -> Prompt:
        """The first prompt that can be used, for checks of reward functions."""
        for row in range(len(self)):
            try:
                prompt = self.prompt(row, row)
            except RowError:
                continue
            if prompt is not None:
                return prompt
        raise self.none_usable_error()

    def notes(self) -> Iterator[str]:
        """Yields what a user should know about the prompts that were checked."""
        if (checked := self.checked) and 2 * checked.num_fitting < checked.num_tokenized:
            yield (
                f"{self.key}: only {checked.num_fitting:,} of {checked.num_tokenized:,} prompts of "
                f"{self.path} fit: at most {self.limits.max_tokens} tokens ({self.limits.source}) are taken. "
                f"The others are left out. {self.limits.remedy}"
            )
        if self._unread:
            yield (
                f"{self.key}: the tokenizer has no token for {self._unread}, and maybe for text of other rows. "
                "The model reads its unknown token there. Change the text, or what adds it (a template)."
            )

    def columns(self, row: int) -> dict[str, Any]:
        """The columns of a row except its prompt. Nothing is tokenized."""
        columns = dict(self._table.row(row))
        columns.pop(self._settings.column)
        return columns

    @property
    def none_usable(self) -> bool:
        """Whether all rows were read, and each was unusable or too long."""
        return len(self._too_long) + len(self._unusable) == len(self)

    def none_usable_error(self) -> ValueError:
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
            f"{self.limits.max_tokens} tokens long{others}. {self.limits.remedy}"
        )

    @contextmanager
    def _at(self, row: int) -> Iterator[None]:
        """Turns a ValueError into a RowError, which names the row."""
        try:
            yield
        except ValueError as error:
            raise RowError(f"{self.where(row)}: {error}") from error

    def _text(self, columns: dict[str, Any], row: int) -> PromptText:
        with self._at(row):
            return prompt_text(columns, self._settings)

    def _tokens_of(self, text: PromptText, row: int, columns: dict[str, Any]) -> np.ndarray | None:
        if row in self._token_ids:
            return self._token_ids[row]
        limits = self.limits
        # First of all, because a tokenizer takes hundreds of bytes for each character.
        number, most = num_characters(text), self.most_characters
        if number > most:
            self.too_long_reason = self.too_long_reason or (
                f"{self.where(row)}: the prompt has {number} characters. It is not tokenized, because "
                f"{limits.max_tokens} tokens ({limits.source}) of the model's longest token hold at most "
                f"{most}."
            )
            return None
        with self._at(row):
            token_ids = self._tokenize(text, columns)
        if len(token_ids) > limits.max_tokens:
            self.too_long_reason = self.too_long_reason or (
                f"{self.where(row)}: the prompt has {len(token_ids)} tokens, and at most "
                f"{limits.max_tokens} are taken ({limits.source})."
            )
            return None
        if len(self._token_ids) < _MAX_CACHED_PROMPTS:
            self._token_ids[row] = token_ids
        return token_ids

    def _tokenize(self, text: PromptText, columns: dict[str, Any]) -> np.ndarray:
        codec = self._codec
        tools = [] if isinstance(text, str) else tools_of(columns)
        if tools and not codec.template.reads("tools"):
            raise ValueError(
                "column 'tools' has functions, which the model's chat template does not print. If the "
                "model need not see them, rename the column (prompts.rename)."
            )
        ids = codec.encode(text) if isinstance(text, str) else codec.encode_chat(text, tools)
        if not ids:
            raise ValueError("the prompt has no tokens. Remove the row.")
        check_vocabulary(ids, self.limits.vocab_size)
        return np.asarray(ids, dtype=np.int32)


def check_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    if max(token_ids) >= vocab_size:
        raise ValueError(
            f"the tokenizer gives token id {max(token_ids)}, but the model's vocabulary has only "
            f"{vocab_size} entries. The tokenizer and config.json in model.hf_assets_path do not "
            "belong together."
        )


def num_characters(text: PromptText) -> int:
    """The number of characters of a prompt, without those that its chat template adds."""
    if isinstance(text, str):
        return len(text)
    return sum(len(message["content"] or "") for message in text)


def prompt_text(columns: dict[str, Any], settings: Prompts) -> PromptText:
    """Returns a row's prompt. Raises ValueError, which does not name the row, if it has none."""
    column = settings.column
    value = columns[column]
    # A number may describe the row.
    if media := media_in({k: v for k, v in columns.items() if not isinstance(v, int | float)}):
        raise ValueError(
            f"column {media!r} may belong to the prompt, and the model reads text alone. Rename it "
            "(prompts.rename) if it does not, or remove the row."
        )
    if isinstance(value, str):
        for key, setting in settings.chat_settings().items():
            if setting:
                raise ValueError(
                    f"prompts.{key} needs prompts that are lists of chat messages, but this prompt is a "
                    "string, to which no chat template is applied. Write the prompt as "
                    '[{"role": "user", "content": ...}], or use prompts.template and remove '
                    f"prompts.{key}."
                )
        return _filled_in(value, columns, settings)
    try:
        said = read_messages(value)
    except ValueError as error:
        raise ValueError(
            f"column {column!r} (prompts.column) must be a string, or a list of messages with role and "
            f"content, {error}."
        ) from error
    tools_of(columns)
    messages = [m for m in said if m["role"] not in _SYSTEM_ROLES or not _is_blank(m["content"])]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "a prompt must end before the turn that the model is to write, but this one ends with a "
            f"message of the assistant. Remove that message from column {column!r}, and keep its text in "
            "another column if the reward needs it. Whole conversations are for torchtitan-grpo sft."
        )
    if settings.template is not None:
        place = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
        turn = messages[place]
        if turn["role"] != "user":
            raise ValueError("prompts.template needs a text in a prompt's last turn of the user.")
        messages[place] = turn | {"content": _filled_in(turn["content"], columns, settings)}
    system_prompt = settings.chat_settings()["system_prompt"]
    if system_prompt is None:
        return messages
    if messages[0]["role"] in _SYSTEM_ROLES:
        raise ValueError(
            "prompts.system_prompt is set, but this prompt begins with a system message of its own, "
            f"{messages[0]['content']!r:.80}. Remove prompts.system_prompt, or the message."
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def _filled_in(value: str, columns: dict[str, Any], settings: Prompts) -> str:
    template = settings.template or ""
    try:
        text = _Template().format(template, **columns | {"prompt": value}) if template else value
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"prompts.template {template!r} cannot be filled in: {error!r}. It may contain {{prompt}} and "
            f"the columns {sorted(columns)}. Write {{{{ and }}}} for literal braces."
        ) from error
    if _is_blank(text) or (_is_blank(value) and "{prompt" in template):
        raise ValueError(
            f"column {settings.column!r} (prompts.column) must hold text, got {value!r:.200}: the prompt has "
            "no text. Remove the row."
        )
    return text


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Returns messages without null fields and with joined text parts. Raises ValueError if invalid."""
    if not isinstance(value, list) or not value or not all(map(_has_content, value)):
        raise ValueError(f"got {value!r:.200}")
    messages = [_read_message(message, number) for number, message in enumerate(value, start=1)]
    last = messages[-1]
    if last["role"] not in ("tool", "assistant") and _is_blank(last["content"]):
        raise ValueError(f"but the last message ({last['role']}) has no text")
    return messages


def _has_content(message: Any) -> bool:
    """Whether a message has a role and content. The assistant's messages may lack content."""
    has_role = isinstance(message, dict) and "role" in message
    return has_role and ("content" in message or message["role"] == "assistant")


def _read_message(message: dict[str, Any], number: int) -> dict[str, Any]:
    role = message["role"]
    if not isinstance(role, str) or not role:
        raise ValueError(f"but message {number} has the role {role!r:.80}")
    try:
        content = text_of(message)
    except ValueError as error:
        raise ValueError(
            f"and the model reads text alone, but message {number} ({role}) has {error}"
        ) from error
    has_more = any(value for key, value in message.items() if key not in ("role", "content"))
    may_be_null = role in _SYSTEM_ROLES or (role == "assistant" and has_more)
    if not (isinstance(content, str) or (content is None and may_be_null)):
        raise ValueError(f"but the content of message {number} ({role}) is {content!r:.80}")
    said = {key: of_key for key, of_key in message.items() if of_key is not None}
    return said | {"content": content}


def _is_blank(content: Any) -> bool:
    """Whether a prompt, or the content of a message, has no visible character."""
    return content is None or (isinstance(content, str) and _VISIBLE.search(content) is None)


class _Template(string.Formatter):
    """Fills in ``prompts.template``. Rejects missing values, which would be printed as None or nan."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        found = value, _ = super().get_field(field_name, args, kwargs)
        if value is None or value != value:
            raise ValueError(f"{field_name} is {'null' if value is None else 'NaN'} in this row")
        return found
