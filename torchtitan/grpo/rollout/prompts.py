# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The prompt set as an endless, shuffled, resumable stream of tokenised prompts."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.grpo.config import Prompts, RolloutProcessConfig
from torchtitan.grpo.rollout.rows import Rows, open_rows
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Prompt

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
    """Rows turned into prompts, each tokenised when it is first asked for.

    Args:
        rows: The table.
        settings: Column, renamed columns, template.
        codec: The model's tokenizer.
        limits: Longest prompt, and vocabulary size.
        key: TOML key of the table's path, for messages.
    """

    def __init__(
        self, rows: Rows, settings: Prompts, codec: TextCodec, limits: PromptLimits, key: str
    ) -> None:
        self._rows = rows
        self._settings = settings
        self._codec = codec
        self._limits = limits
        self.key = key
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
    ) -> "PromptSet":
        """Opens and checks the table at ``path``.

        Raises:
            ValueError: It is missing, empty, unreadable or lacks the prompt column.
        """
        settings = config.prompts
        rows = open_rows(path, split, settings.rename, settings.column, key, name)
        return cls(rows, settings, codec, PromptLimits.of(config), key)

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
            ValueError: The row is no prompt, or its tokens are not the model's.
        """
        if row in self._too_long:
            return None
        columns = dict(self._rows.row(row))
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


class PromptStream:
    """Endless: epoch after epoch, each in a permutation of its own, given by the seed.

    A prompt's ``index`` counts rows, those left out included, so a resumed stream that
    starts at ``position`` continues exactly.

    Args:
        prompts: The set.
        seed: ``debug.seed``.
        shuffle: ``prompts.shuffle``.
        position: Index of the first row to look at.
    """

    def __init__(self, prompts: PromptSet, *, seed: int, shuffle: bool, position: int = 0) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._position = position
        self._epoch = -1
        self._order: np.ndarray = np.arange(len(prompts))
        self.num_too_long = 0

    def next(self) -> Prompt:
        """The next prompt that is short enough.

        Raises:
            ValueError: A row is bad, or a whole epoch holds no prompt short enough.
        """
        for _ in range(len(self._prompts)):
            index = self._position
            self._position += 1
            prompt = self._prompts.prompt(self._row(index), index)
            if prompt is not None:
                return prompt
            self.num_too_long += 1
        raise ValueError(
            f"{self._prompts.key}: none of the {len(self._prompts)} prompts in "
            f"{self._prompts.path} is at most {self._prompts.max_tokens} tokens long. Raise "
            "prompts.max_prompt_tokens or training.seq_len, or lower rollout.max_new_tokens."
        )

    def _row(self, index: int) -> int:
        epoch, offset = divmod(index, len(self._prompts))
        if self._shuffle and epoch != self._epoch:
            rng = np.random.default_rng([self._seed, epoch])
            self._order = rng.permutation(len(self._prompts))
            self._epoch = epoch
        return int(self._order[offset])


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
