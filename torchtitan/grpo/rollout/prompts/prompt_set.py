# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A table's rows as prompts, each tokenised when it is first asked for."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.grpo.config import Prompts, RolloutProcessConfig
from torchtitan.grpo.rollout.tables import Table, open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Prompt

SET_COLUMN = "prompt_set"
_MAX_CACHED_PROMPTS = 100_000


@dataclass(frozen=True)
class PromptLimits:
    """What a prompt must fit into.

    Attributes:
        max_tokens: Longer prompts are left out.
        vocab_size: Token ids must be below it.
    """

    max_tokens: int
    vocab_size: int

    @classmethod
    def of(cls, config: RolloutProcessConfig) -> "PromptLimits":
        """``prompts.max_prompt_tokens`` or its default, with room for one token at least."""
        wanted = config.prompts.max_prompt_tokens or config.seq_len - config.rollout.max_new_tokens
        return cls(max(1, min(wanted, config.seq_len - 1)), config.vocab_size)


class PromptSet:
    """Rows turned into prompts. Used by one thread at a time.

    Args:
        rows: The table.
        settings: Column, renamed columns, template.
        codec: The model's tokenizer.
        limits: Longest prompt, and vocabulary size.
        key: TOML key of the table's path, for messages.
        set_name: Given to each row as the column ``prompt_set``, unless the row has one of
            that name; None adds nothing.
    """

    def __init__(
        self,
        rows: Table,
        settings: Prompts,
        codec: TextCodec,
        limits: PromptLimits,
        key: str,
        set_name: str | None = None,
    ) -> None:
        self._rows = rows
        self._settings = settings
        self._codec = codec
        self._limits = limits
        self.key = key
        self._set_name = set_name
        self._token_ids: dict[int, np.ndarray] = {}
        self._too_long: set[int] = set()

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
            ValueError: It is missing, empty, unreadable or lacks the prompt column.
        """
        settings = config.prompts
        rows = open_table(path, split, settings.rename, settings.column, key, name)
        return cls(rows, settings, codec, PromptLimits.of(config), key, set_name)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def path(self) -> str:
        """Where the rows come from, for messages."""
        return self._rows.path

    @property
    def max_tokens(self) -> int:
        """Longest prompt that is used, in tokens."""
        return self._limits.max_tokens

    def prompt(self, row: int, index: int) -> Prompt | None:
        """Row ``row`` as the stream's prompt ``index``; None where it is too long.

        Raises:
            ValueError: The row is no prompt, or its tokens are not the model's; or a check in
                the background has found a bad row.
        """
        self._rows.check()
        if row in self._too_long:
            return None
        columns = dict(self._rows.row(row))
        if self._set_name is not None:
            columns.setdefault(SET_COLUMN, self._set_name)
        text = self._text(columns, row)
        token_ids = self._token_ids.get(row)
        if token_ids is None:
            token_ids = self._tokenise(text, row)
            if len(token_ids) > self._limits.max_tokens:
                self._too_long.add(row)
                return None
            if len(self._token_ids) < _MAX_CACHED_PROMPTS:
                self._token_ids[row] = token_ids
        columns.pop(self._settings.column)
        return Prompt(index=index, text=text, token_ids=token_ids, columns=columns)

    def sample(self) -> Prompt:
        """The first row that is short enough, to try reward functions on.

        Raises:
            ValueError: A row is bad, or none is short enough.
        """
        for row in range(len(self)):
            prompt = self.prompt(row, row)
            if prompt is not None:
                return prompt
        raise self.none_fits_error()

    def columns(self, row: int) -> dict[str, Any]:
        """A row's columns without its prompt, which is neither read nor tokenised.

        Raises:
            ValueError: If the row cannot be read.
        """
        columns = dict(self._rows.row(row))
        columns.pop(self._settings.column)
        return columns

    def where(self, row: int) -> str:
        """Names a row in messages."""
        return self._rows.where(row)

    @property
    def none_fits(self) -> bool:
        """Every row was looked at, and is too long."""
        return len(self._too_long) == len(self)

    def none_fits_error(self) -> ValueError:
        """What is wrong where no row is short enough."""
        return ValueError(
            f"{self.key}: none of the {len(self)} prompts in {self.path} is at most "
            f"{self.max_tokens} tokens long. Raise prompts.max_prompt_tokens or training.seq_len, "
            "or lower rollout.max_new_tokens."
        )

    def close(self) -> None:
        """Lets go of the table."""
        self._rows.close()

    def _text(self, columns: dict[str, Any], row: int) -> str | list[dict[str, str]]:
        value = columns[self._settings.column]
        where = self._rows.where(row)
        if isinstance(value, str):
            return self._apply_template(value, columns, where)
        if not _is_conversation(value):
            raise ValueError(
                f"{where}: column {self._settings.column!r} (prompts.column) must be a string, or "
                f"a list of messages with role and content, got {value!r:.200}."
            )
        if self._settings.template is not None:
            raise ValueError(
                f"{where}: prompts.template applies to string prompts, and this prompt is a list "
                "of chat messages. Leave prompts.template out."
            )
        return value

    def _apply_template(self, value: str, columns: dict[str, Any], where: str) -> str:
        if self._settings.template is None:
            return value
        try:
            return self._settings.template.format(**{**columns, "prompt": value})
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{where}: prompts.template {self._settings.template!r} cannot be filled in: "
                f"{error!r}. It may name {{prompt}} and the columns {sorted(columns)}; write "
                "{{ and }} for braces."
            ) from error

    def _tokenise(self, text: str | list[dict[str, str]], row: int) -> np.ndarray:
        if isinstance(text, str):
            token_ids = np.asarray(self._codec.encode(text), dtype=np.int32)
        else:
            token_ids = np.asarray(self._codec.encode_chat(text), dtype=np.int32)
        if len(token_ids) == 0:
            raise ValueError(f"{self._rows.where(row)}: the prompt has no token. Remove the row.")
        largest = int(token_ids.max())
        if largest >= self._limits.vocab_size:
            raise ValueError(
                f"{self._rows.where(row)}: the tokenizer gives token id {largest}, and the "
                f"model's vocabulary has {self._limits.vocab_size} entries. The tokenizer and "
                "config.json in model.hf_assets_path do not belong together."
            )
        return token_ids


def first_prompts(prompts: PromptSet, num_prompts: int) -> tuple[list[Prompt], int]:
    """The first ``num_prompts`` rows (0: all) in file order, and how many were too long.

    Raises:
        ValueError: A row is bad, or none is short enough.
    """
    num_rows = min(num_prompts or len(prompts), len(prompts))
    found = [prompts.prompt(row, row) for row in range(num_rows)]
    usable = [prompt for prompt in found if prompt is not None]
    if not usable:
        raise ValueError(
            f"{prompts.key}: none of the first {num_rows} prompts in {prompts.path} is at most "
            f"{prompts.max_tokens} tokens long."
        )
    return usable, num_rows - len(usable)


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in value)
    )
