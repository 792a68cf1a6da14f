# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses which columns of a data set hold prompts and right answers, and which rows are held out."""

import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.grpo.config import Prompts
from torchtitan.grpo.config.command_line import ConfigError, refusing
from torchtitan.grpo.rewards.gold_values import COLUMN, MAX_ROWS, right_answers
from torchtitan.grpo.rollout.prompts.prompt_set import PromptText, prompt_text
from torchtitan.grpo.rollout.tables import RowError, open_table
from torchtitan.grpo.rollout.tables.table import renamed

PROMPT_NAMES = (
    "prompt", "messages", "question", "problem", "instruction", "query", "input", "text",
)  # fmt: skip
ANSWER_NAMES = (
    "answer", "final_answer", "ground_truth", "reward_model.ground_truth", "expected_answer",
    "gold", "target", "answers", "solution", "label", "output", "response", "completion",
)  # fmt: skip
TEST_NAMES = ("test", "heldout", "held_out", "validation", "valid", "val", "dev", "eval")
HELD_OUT_PART, _FEWEST, _FEWEST_ROWS = 0.02, 8, 64
MOST = 0.9
"""Share of the rows that must be as expected. The checks of a run name single bad rows."""


@dataclass(frozen=True)
class Source:
    """A data set, with those of its first rows that can be read."""

    path: str
    name: str | None
    split: str
    num_rows: int
    rows: list[dict[str, Any]]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def held_out(self, columns: "Columns") -> tuple["Source", str] | None:
        """Returns a test split and "", or else rows of a large data set and the slice of its other rows."""
        for path, split in _test_splits(self):
            with suppress(ValueError):  # there is none, or it has other columns
                found = read_source(path, split, self.name)
                own = choose_columns(found, columns.prompt, columns.answer, has_template=True)
                if found.rows != self.rows and own.is_chat == columns.is_chat:
                    return found, ""
        number = max(_FEWEST, round(HELD_OUT_PART * self.num_rows))
        if self.num_rows < _FEWEST_ROWS or "[" in self.split:
            return None
        return read_source(self.path, f"{self.split}[:{number}]", self.name), f"[{number}:]"

    def describe(self) -> str:
        return f"{self.num_rows:,} rows of {self.path}" + ", not trained on" * ("[" in self.split)


@dataclass(frozen=True)
class Columns:
    """Where prompts and answers are: names of columns, or paths such as ``messages.0.content``.

    ``texts`` are the prompts of the first rows, and ``answers`` their right answers.
    """

    prompt: str
    texts: list[PromptText]
    answer: str | None = None
    answers: list[list[str]] = field(default_factory=list)
    taken: tuple[str, ...] = ()
    """Names of the data's own columns."""

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.texts[0], str)

    @property
    def column(self) -> str:
        """The value of ``prompts.column``."""
        return self.prompt if self.prompt in self.taken else "prompt"

    def rename(self, reads_answer: bool) -> dict[str, str]:
        """The value of ``prompts.rename``; ``reads_answer`` says that a built-in reward reads the answers."""
        names = {} if self.prompt in self.taken else {self.prompt: "prompt"}
        if reads_answer and self.answer is not None and self.answer != COLUMN:
            names[self.answer] = COLUMN
        for old, new in list(names.items()):
            if new in self.taken and old.partition(".")[0] != new:
                names[new] = f"{new}_before"
        return names


def read_source(path: str, split: str, name: str | None) -> Source:
    """Reads the first rows of DATA; raises ConfigError if DATA cannot be read."""
    try:
        table = open_table(path, split, {}, None, "DATA", name)
    except ValueError as error:
        is_file = Path(path).is_file()
        hint = "" if is_file else " --name and --split choose a part of a data set."
        raise ConfigError(f"{error}{hint}") from error
    with refusing(), closing(table):
        found = list(table.rows(0, min(MAX_ROWS, len(table))))
        rows = [row for row in found if not isinstance(row, RowError)]
        for bad in found:
            if isinstance(bad, RowError) and len(rows) < MOST * len(found):
                raise ConfigError(str(bad))
        return Source(path, name, split, len(table), rows)


def choose_columns(
    source: Source, asked_prompt: str | None, asked_answer: str | None, *, has_template: bool
) -> Columns:
    """Chooses columns by their names and values; ConfigError lists all columns if that fails."""
    prompt, texts = _choose_prompt(source, asked_prompt, has_template)
    taken = tuple(source.columns)
    for name in ANSWER_NAMES if asked_answer is None else (asked_answer,):
        values = [right_answers(value) for value in _values(source.rows, name)]
        answers = [[answer for answer in found if answer.strip()] for found in values]
        if name != prompt and sum(map(bool, answers)) >= MOST * len(answers):
            return Columns(prompt, texts, name, answers, taken)
    if asked_answer is not None:
        raise ConfigError(
            f"--answer-column must name another column than the prompts', with right answers, but "
            f"{asked_answer!r} of {source.path} has none in most of the first {len(source.rows)} rows: a "
            f"text, a number, or a list of those. Existing columns: {source.columns}. A value within a "
            "column is named by a path, such as reward_model.ground_truth."
        )
    return Columns(prompt, texts, taken=taken)


def _choose_prompt(
    source: Source, asked: str | None, has_template: bool
) -> tuple[str, list[PromptText]]:
    usual = [name for name in PROMPT_NAMES if name in source.columns]
    tried = usual if asked is None else [asked]
    reasons = []
    for name in tried:
        texts, reason = _as_prompts(source, name, has_template)
        if not reason:
            return name, texts
        reasons.append(f"{name}: {reason}")
    if any(isinstance(value, list) for name in tried for value in _values(source.rows, name)):
        raise ConfigError(
            f"{source.path} cannot be used. {' '.join(reasons)}"
        )  # the column is right
    why = " ".join(reasons) or f"None has a name that is usual ({', '.join(PROMPT_NAMES)})."
    must = "DATA must have" if asked is None else "--prompt-column must name"
    raise ConfigError(
        f"{must} a column with prompts, texts or lists of chat messages. {source.path} has the columns "
        f"{source.columns}. {why} Name one: --prompt-column NAME (and --answer-column NAME). A value within "
        "a column is named by a path, such as messages.0.content."
    )


def _as_prompts(source: Source, name: str, has_template: bool) -> tuple[list[PromptText], str]:
    """Returns the prompts of a column; if it cannot be used, no prompts and the reason."""
    texts, reason = [], ""
    for value in _values(source.rows, name):
        try:
            texts.append(prompt_text({name: value}, Prompts(column=name)))
        except ValueError as error:
            reason = str(error)
    if len(texts) < MOST * len(source.rows):
        return [], reason
    kinds = {isinstance(text, str) for text in texts}
    if len(kinds) > 1:
        return [], "it holds both texts and chat messages."
    if kinds == {False} and not has_template:
        return [], (
            "it holds chat messages, and MODEL has no chat template. Name an instruct model, or add a "
            "chat_template to its tokenizer_config.json."
        )
    return texts, ""


def _values(rows: Sequence[Mapping[str, Any]], path: str) -> list[Any]:
    """Returns the value at ``path`` in each row, or None for rows that have none."""
    found = []
    for row in rows:
        try:
            found.append(renamed(row, {path: path}, None, "")[path])
        except RowError:
            found.append(None)
    return found


def _test_splits(source: Source) -> list[tuple[str, str]]:
    """Paths and splits that may hold a test set of the same data."""
    file = Path(source.path)
    if not file.is_file():
        return [(source.path, name) for name in TEST_NAMES if name != source.split]
    stems = [re.sub("train(ing)?", name, file.stem, flags=re.IGNORECASE) for name in TEST_NAMES]
    stems += [f"{file.stem}{mark}{name}" for name in TEST_NAMES for mark in "_-."]
    others = (file.with_name(stem + file.suffix) for stem in stems if stem != file.stem)
    return [(str(other), source.split) for other in others if other.is_file()]
