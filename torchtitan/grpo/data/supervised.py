# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Trains on the examples of ``[sft]``, without servers, rollout process or rewards.

Prompts go through the same code as those of rollouts (templates, system prompt), so that the model
is taught the tokens that it will be prompted with.

Example: a conversation of chat messages, ``sft.column = "messages"``::

    {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}

    prompt      <user> 2 + 3? <end> <assistant>      (no loss)
    completion  5 <end>                              (loss)
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torchtitan.grpo.config import SFT
from torchtitan.grpo.config.evaluation import evaluation_sets
from torchtitan.grpo.data.planner import PlannedPart
from torchtitan.grpo.data.ptx import supervised_sample
from torchtitan.grpo.data.rows import Sample
from torchtitan.grpo.data.step_source import StepSource
from torchtitan.grpo.errors import DataError
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.rollout.model_match import prompt_notes
from torchtitan.grpo.rollout.prompts import PromptLimits, PromptSet, PromptStream, check_rows
from torchtitan.grpo.rollout.prompts.prompt_stream import Skipped
from torchtitan.grpo.rollout.tables import RowError, Table, open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.types import Prompt, PromptProgress

_OTHER_PARTS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys under which messages hold what their author wrote besides ``content``."""
_REMEDY = "Raise sft.max_example_tokens or training.seq_len."


class ExampleTable(Table):
    """A table whose conversations are taken apart into prompt and completion."""

    def __init__(self, table: Table, settings: SFT) -> None:
        self.path, self.num_bytes = table.path, table.num_bytes
        self._table, self._settings = table, settings

    def __len__(self) -> int:
        return len(self._table)

    def row(self, i: int) -> dict[str, Any]:
        return self._example(dict(self._table.row(i)), i)

    def rows(self, first: int, end: int) -> Iterator[dict[str, Any] | RowError]:
        for i, row in enumerate(self._table.rows(first, end), start=first):
            try:
                yield row if isinstance(row, RowError) else self._example(dict(row), i)
            except RowError as error:
                yield error

    def _example(self, row: dict[str, Any], i: int) -> dict[str, Any]:
        column, completion_column = self._settings.column, self._settings.completion_column
        messages = row[column]
        if _ends_with_assistant(messages):
            row[column], row[completion_column] = messages[:-1], messages[-1:]
            if not row[column]:
                raise RowError(
                    f"{self.where(i)}: a conversation must have a message before the assistant's "
                    f"last one, got {messages!r:.200}."
                )
        if completion_column not in row:
            raise RowError(
                f"{self.where(i)}: there is no column {completion_column!r} "
                f"(sft.completion_column), and {column!r} (sft.column) does not end with a message "
                f"of the assistant. Existing columns: {sorted(row)}."
            )
        row[completion_column] = self._text(row[completion_column], i)
        return row

    def where(self, i: int) -> str:
        return self._table.where(i)

    def close(self) -> None:
        self._table.close()

    def _text(self, completion: Any, i: int) -> str:
        if _ends_with_assistant(completion) and len(completion) == 1:
            if lost := [key for key in _OTHER_PARTS if completion[0].get(key)]:
                raise RowError(
                    f"{self.where(i)}: a completion is the content of the assistant's message alone, but "
                    f"this one has {', '.join(lost)} besides, which would not be learned. Write all of "
                    "it into content, as the model is to write it."
                )
            completion = completion[0]["content"]
        if isinstance(completion, str) and completion:
            return completion
        raise RowError(
            f"{self.where(i)}: a completion must be a string that is not empty, or a list with one "
            f"message of the assistant, got {completion!r:.200}."
        )


def _ends_with_assistant(value: Any) -> bool:
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, dict) and last.get("role") == "assistant" and "content" in last


class ExampleStream:
    """The examples of a file, shuffled anew in each epoch, resumable by their position.

    Raises :class:`DataError` if the file, a row that was checked, or every example is unusable.
    ``path`` is the value of ``key``. ``date`` is what chat templates take for now; empty is the
    time of the first rendering. ``num_too_long`` and ``num_unusable`` count the rows left out so
    far, the latter those that are no examples and that the check has not found.
    """

    def __init__(
        self,
        config: JobConfig,
        model: HFModel,
        path: str,
        key: str,
        progress: PromptProgress | None = None,
        *,
        date: str = "",
    ) -> None:
        self._settings, prompts, row_len = config.sft, config.prompts, config.training.seq_len
        self._codec = TextCodec(
            str(model.path), model.eos_token_ids, prompts.chat_template_kwargs, date
        )
        self._path, self._key = path, key
        self._eos, self._vocab_size = model.eos_token_ids, model.vocab_size
        self._max_tokens = min(config.sft.max_example_tokens or row_len, row_len)
        self._end_of_turn: int | None = None
        self.num_too_long = self.num_unusable = 0
        # An example has a completion of at least one token.
        limits = PromptLimits(
            max(1, self._max_tokens - 1),
            model.vocab_size,
            source="sft.max_example_tokens, or training.seq_len, minus one",
            remedy=_REMEDY,
        )
        column = config.sft.column
        try:
            table = ExampleTable(
                open_table(path, prompts.split, {}, column, key, prompts.name), config.sft
            )
            self._set = PromptSet(table, replace(prompts, column=column), self._codec, limits, key)
            self.checked = check_rows(self._set, fits=self._fits)
        except ValueError as error:
            raise DataError(str(error)) from error
        if self.checked.num_fitting == 0:
            raise self._none_fits()
        self._stream = PromptStream(
            [self._set],
            seed=config.debug.seed or 0,
            shuffle=prompts.shuffle,
            position=progress.position if progress is not None else 0,
        )

    def __len__(self) -> int:
        """Returns the number of examples of an epoch, those that are too long included."""
        return len(self._set)

    def notes(self) -> list[str]:
        """Returns what a reader of the examples would not expect of their prompts' tokens."""
        try:
            is_chat = not isinstance(self._set.sample().text, str)
            return list(prompt_notes(self._codec, is_chat=is_chat))
        except ValueError as error:
            raise DataError(str(error)) from error

    @property
    def position(self) -> int:
        """Number of rows that were read, of all epochs."""
        return self._stream.position

    def next(self) -> Sample:
        begin = self.position
        while self.position < begin + len(self):
            try:
                prompt = self._stream.next()
            except ValueError as error:
                raise DataError(str(error)) from error
            for skipped in self._stream.take_skipped():
                self._count(skipped)
            sample = self._sample(prompt)
            if sample.num_tokens <= self._max_tokens:
                return sample
            self.num_too_long += 1
        raise self._none_fits()

    def all(self) -> list[Sample]:
        samples = [self.next()]
        while self.position < len(self):
            sample = self.next()
            if self.position > len(self):
                break  # the last rows of the epoch were too long, and this one is of the next
            samples.append(sample)
        return samples

    def close(self) -> None:
        self._stream.close()

    def _none_fits(self) -> DataError:
        return DataError(
            f"{self._key}: none of the {len(self)} examples in {self._path} is at most "
            f"{self._max_tokens} tokens long. {_REMEDY}"
        )

    def _count(self, skipped: Skipped) -> None:
        if skipped.reason == "too long":
            self.num_too_long += 1
            return
        self.num_unusable += 1
        if self.num_unusable == 1:
            logger.warning(
                f"{self._key}: first of the examples that cannot be used: {skipped.detail}"
            )

    def _fits(self, prompt: Prompt) -> bool:
        return self._sample(prompt).num_tokens <= self._max_tokens

    def _sample(self, prompt: Prompt) -> Sample:
        text = prompt.columns[self._settings.completion_column]
        completion = self._codec.encode_continuation(text)
        if not completion or completion[-1] not in self._eos:
            completion.append(self._end(is_chat=not isinstance(prompt.text, str)))
        where = f"{self._key}: {self._path}"
        return supervised_sample(prompt.token_ids, completion, self._vocab_size, where)

    def _end(self, *, is_chat: bool) -> int:
        """The token that ends a completion: of chat messages, what the template writes."""
        if not is_chat:
            return self._eos[0]
        if self._end_of_turn is None:
            mark = self._codec.end_of_turn()
            token = None if mark is None else self._codec.single_token(mark)
            self._end_of_turn = token if token in self._eos else self._eos[0]
        return self._end_of_turn


class SupervisedSource(StepSource):
    """Plans steps of supervised examples; see :class:`StepSource`.

    Their loss is that of ``grpo.ptx_path``, so that rows, layouts and loss are the same code.
    ``progress.position`` counts the rows read, of all epochs. :class:`DataError`: ``sft.path`` is
    unusable.
    """

    def __init__(
        self,
        config: JobConfig,
        model: HFModel,
        *,
        start_version: int,
        progress: PromptProgress,
        date: str,
        should_stop: Callable[[], bool],
    ) -> None:
        assert config.sft.path is not None
        self._examples = ExampleStream(
            config, model, config.sft.path, "sft.path", progress, date=date
        )
        super().__init__(config, model, start_version, progress, should_stop)

    def start(self) -> None:
        """Says how many examples there are; each is read when its step comes."""
        path, checked = self.config.sft.path, self._examples.checked
        logger.info(f"sft.path: {path}, {checked.describe()}")
        notes = [checked.warning("sft.path", str(path)), *self._examples.notes()]
        for note in filter(None, notes):
            logger.warning(note)
        if evaluation_sets(self.config.evaluation):
            logger.info(
                "[evaluation] is not used with sft.path: there is no server to ask. "
                "sft.held_out_path measures the loss of held-out examples."
            )

    def next_step(self, version: int, num_ranks: int) -> PlannedPart | None:
        if self._should_stop():
            return None
        examples = [self._examples.next() for _ in range(self.config.sft.examples_per_step)]
        self.progress = PromptProgress(self._examples.position)
        step = self._planner.plan_supervised(examples, num_ranks=num_ranks)
        return replace(step, metrics=step.metrics | self._metrics(examples))

    def _metrics(self, examples: list[Sample]) -> dict[str, float]:
        return {
            "sft/epoch": self._examples.position / len(self._examples),
            "sft/example_tokens_mean": sum(e.num_tokens for e in examples) / len(examples),
            "sft/too_long_examples": float(self._examples.num_too_long),
            "sft/unusable_examples": float(self._examples.num_unusable),
        }

    def close(self) -> None:
        self._examples.close()
        super().close()
