# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the columns of a data set that hold the prompts and the right answers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.grpo.command_line import ConfigError, refusing
from torchtitan.grpo.config import Prompts
from torchtitan.grpo.rewards.gold_answers import MAX_ROWS
from torchtitan.grpo.rewards.gold_values import COLUMN, right_answers
from torchtitan.grpo.rollout.prompts.prompt_set import PromptText, prompt_text
from torchtitan.grpo.rollout.tables import RowError, open_table
from torchtitan.grpo.rollout.tables.table import renamed

PROMPT_NAMES = ("prompt", "messages", "question", "problem", "instruction", "query", "input")
ANSWER_NAMES = (
    "answer", "final_answer", "ground_truth", "reward_model.ground_truth", "expected_answer",
    "gold", "target", "answers", "solution", "label", "output", "response", "completion",
)  # fmt: skip
MOST = 0.9
"""Share of the rows that must be as expected. The checks of a run name single bad rows."""

_BOTH = "--prompt-column NAME (and --answer-column NAME)"
_SHAPES = (
    ("user",), ("user", "assistant"), ("system", "user"), ("system", "user", "assistant"),
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A data set, and its first rows without those that cannot be read."""

    path: str
    name: str | None
    split: str
    num_rows: int
    rows: list[dict[str, Any]]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))


@dataclass(frozen=True)
class Columns:
    """Where prompts and answers are.

    ``prompt`` and ``answer`` are names as the user knows them, which may be paths such as
    ``messages.0.content``. ``system`` is the system message of all conversations whose user's message
    is the prompt. ``texts`` are the prompts of the first rows, and ``answers`` their right answers.
    """

    prompt: str
    texts: list[PromptText]
    system: str | None = None
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
        """The value of ``prompts.rename``; with ``reads_answer`` for a built-in reward."""
        names = {} if self.prompt in self.taken else {self.prompt: "prompt"}
        if reads_answer and self.answer is not None and self.answer != COLUMN:
            names[self.answer] = COLUMN
        for new in list(names.values()):
            old = next(old for old, name in names.items() if name == new)
            if new in self.taken and old.partition(".")[0] != new:
                names[new] = f"{new}_before"
        return names


def read_source(path: str, split: str, name: str | None) -> Source:
    """Reads the first rows of DATA; ConfigError if there is none."""
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
    """Raises ConfigError, which lists the columns, if one cannot be chosen."""
    columns = _choose_prompt(source, asked_prompt, has_template)
    if asked_answer is not None:
        answers = _answers(source.rows, asked_answer)
        if not any(answers):
            raise ConfigError(
                f"--answer-column must name a column with right answers, but {asked_answer!r} of "
                f"{source.path} has none in the first {len(source.rows)} rows: a text, a number, or a "
                f"list of those. Existing columns: {source.columns}. A value within a column is named "
                "by a path, such as reward_model.ground_truth."
            )
        return _with_answer(columns, asked_answer, answers)
    if columns.answer is not None:
        return columns
    for name in ANSWER_NAMES:
        answers = _answers(source.rows, name)
        if name != columns.prompt and sum(map(bool, answers)) >= MOST * len(answers):
            return _with_answer(columns, name, answers)
    return columns


def _with_answer(columns: Columns, name: str, answers: list[list[str]]) -> Columns:
    return Columns(
        columns.prompt, columns.texts, columns.system, name, answers, taken=columns.taken
    )


def _answers(rows: Sequence[Mapping[str, Any]], path: str) -> list[list[str]]:
    """The right answers of each row that are not blank; none where the path leads nowhere."""
    found = []
    for row in rows:
        try:
            value = renamed(row, {path: path}, None, "")[path]
        except RowError:
            value = None
        found.append([answer for answer in right_answers(value) if answer.strip()])
    return found


def _choose_prompt(source: Source, asked: str | None, has_template: bool) -> Columns:
    if asked is not None and not any(_values(source.rows, asked)):
        raise ConfigError(
            f"--prompt-column must name a column of {source.path}, got {asked!r}. Existing columns: "
            f"{source.columns}."
        )
    reasons: dict[str, str] = {}
    for name in [asked] if asked is not None else _candidates(source):
        found = _as_prompts(source, name, has_template, reasons)
        if found is not None:
            return found
    if asked is not None:
        raise ConfigError(
            f"--prompt-column {asked} of {source.path} cannot be used: {reasons[asked]}"
        )
    others = [name for name in source.columns if name not in (*reasons, *ANSWER_NAMES)]
    possible = [c for name in others if (c := _as_prompts(source, name, has_template, {}))]
    if len(possible) == 1 and not reasons:
        return possible[0]
    raise _no_prompts(source, reasons)


def _no_prompts(source: Source, reasons: Mapping[str, str]) -> ConfigError:
    """``reasons`` say why columns cannot be used that prompts usually have."""
    rule = "DATA must have a column with prompts, texts or lists of chat messages"
    if reasons:
        why = " ".join(f"{name}: {reason}" for name, reason in reasons.items())
        return ConfigError(
            f"{rule}. Of the columns {source.columns} of {source.path}, these cannot be used. {why} If "
            f"the prompts are in another column, name it: {_BOTH}."
        )
    return ConfigError(
        f"{rule}, and none of the columns {source.columns} of {source.path} has a name that prompts "
        f"usually have ({', '.join(PROMPT_NAMES)}). Name it: {_BOTH}."
    )


def _candidates(source: Source) -> Iterator[str]:
    return (name for name in PROMPT_NAMES if name in source.columns)


def _values(rows: Sequence[Mapping[str, Any]], path: str) -> list[list[Any]]:
    """The value of each row, in a list that is empty where the path leads nowhere."""
    found: list[list[Any]] = []
    for row in rows:
        try:
            found.append([renamed(row, {path: path}, None, "")[path]])
        except RowError:
            found.append([])
    return found


def _as_prompts(
    source: Source, name: str, has_template: bool, reasons: dict[str, str]
) -> Columns | None:
    """Takes a column as it is, or a message of its conversations; ``reasons`` receives why not."""
    values = [value for found in _values(source.rows, name) for value in found]
    texts, reason = [], f"it is missing in most of the first {len(source.rows)} rows."
    for value in values:
        try:
            texts.append(prompt_text({name: value}, Prompts(column=name)))
        except ValueError as error:
            reason = str(error)
    taken = tuple(source.columns)
    kinds = {isinstance(text, str) for text in texts}
    if len(texts) >= MOST * len(source.rows) and len(kinds) == 1:
        if has_template or kinds == {True}:
            return Columns(name, texts, taken=taken)
        reason = (
            "it holds chat messages, and the model has no chat template. Only conversations of one user's "
            "message, with or without the same system message, are used as texts. Name a model with a "
            "chat template, or another column."
        )
    reasons[name] = reason
    return _message_as_prompt(name, values, taken)


def _message_as_prompt(name: str, values: list[Any], taken: tuple[str, ...]) -> Columns | None:
    """Takes the user's message as the prompt, and the assistant's, if any, as the answer."""
    shapes = {_shape(value) for value in values}
    if len(shapes) != 1 or (roles := shapes.pop()) not in _SHAPES:
        return None
    first = roles.index("user")
    systems = {value[0]["content"] for value in values} if first else {None}
    texts = [value[first]["content"] for value in values]
    if len(systems) > 1 or not all(text.strip() for text in texts):
        return None
    columns = Columns(f"{name}.{first}.content", texts, system=systems.pop(), taken=taken)
    if roles[-1] != "assistant":
        return columns
    answers = [[value[-1]["content"]] for value in values]
    return _with_answer(columns, f"{name}.{first + 1}.content", answers)


def _shape(value: Any) -> tuple[str, ...]:
    """The roles of a conversation in which each message is a text; empty for anything else."""
    if not isinstance(value, list):
        return ()
    roles = [
        m["role"]
        for m in value
        if isinstance(m, dict) and isinstance(m.get("content"), str) and isinstance(m.get("role"), str)
    ]  # fmt: skip
    return tuple(roles) if len(roles) == len(value) else ()
