# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Trains on the examples of ``[sft]``, without servers, rollout process or rewards.

Prompts go through the same code as those of rollouts (templates, system prompt), so that the model
learns with the same prompt tokens that it will be given later.

Example: a conversation of chat messages, ``sft.column = "messages"``::

    {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}

    prompt      <user> 2 + 3? <end> <assistant>      (no loss)
    completion  5 <end>                              (loss)

In a longer conversation, each turn of the assistant has a loss, and other tokens have none.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from torchtitan.grpo.config import SFT
from torchtitan.grpo.config.evaluation import evaluation_sets
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.planner import PlannedPart
from torchtitan.grpo.data.rows import Sample
from torchtitan.grpo.data.step_source import StepSource
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.rollout.chat_template import tools_of
from torchtitan.grpo.rollout.learned_turns import THOUGHTS, TurnFinder
from torchtitan.grpo.rollout.model_match import prompt_notes
from torchtitan.grpo.rollout.prompts import PromptLimits, PromptSet, PromptStream, check_rows
from torchtitan.grpo.rollout.prompts.prompt_set import PromptText, check_vocabulary, read_messages
from torchtitan.grpo.rollout.tables import open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.system.errors import DataError
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.types import PromptProgress

_OTHER_PARTS = ("tool_calls", "function_call", *THOUGHTS)
"""Keys under which messages hold what their author wrote besides ``content``."""
_IS_WHOLE, _SAMPLE = "sft/is_whole", "sft/sample"
"""Columns: whether a conversation has its completion, and the example as tokens."""
_REMEDY = "Raise sft.max_example_tokens or training.seq_len."


class ExampleSet(PromptSet):
    """Prompts with an additional column for the whole example; a row may be a conversation.

    ``left_out`` counts, for each part of a message, the examples where the chat template omits it.
    """

    def __init__(self, sft: SFT, eos_token_ids: tuple[int, ...], *of_set: Any) -> None:
        super().__init__(*of_set)
        self._completion_column, self._eos = sft.completion_column, eos_token_ids
        self.left_out: Counter[str] = Counter()

    def _text(self, columns: dict[str, Any], row: int) -> PromptText:
        with self._at(row):
            self._take_apart(columns)
        return super()._text(columns, row)

    def _tokens_of(self, text: PromptText, row: int, columns: dict[str, Any]) -> np.ndarray | None:
        token_ids = super()._tokens_of(text, row, columns)
        if token_ids is None:
            return None
        with self._at(row):
            columns[_SAMPLE] = sample = self._example(text, token_ids, columns)
        # An example has a completion of at least one token.
        return token_ids if sample.num_tokens <= self.limits.max_tokens + 1 else None

    def _take_apart(self, columns: dict[str, Any]) -> None:
        """Divides a conversation into prompt and completion."""
        column, completion_column = self._settings.column, self._completion_column
        messages = columns[column]
        if is_whole := _ends_with_assistant(messages):
            begin = len(messages)
            while begin and _ends_with_assistant(messages[:begin]):
                begin -= 1
            if columns.get(completion_column):
                raise ValueError(
                    f"{column!r} ends with the assistant, but the row has {completion_column!r} as well. "
                    "Set sft.completion_column to a name that no column has, if it is not learned."
                )
            columns[column], columns[completion_column] = messages[:begin], messages[begin:]
            if not begin:
                raise ValueError(
                    "a conversation must have a message before the assistant's last one, got "
                    f"{messages!r:.200}."
                )
        if completion_column not in columns:
            raise ValueError(
                f"there is no column {completion_column!r} (sft.completion_column), and {column!r} "
                "(sft.column) does not end with a message of the assistant. Existing columns: "
                f"{sorted(columns)}."
            )
        is_text = isinstance(columns[column], str)
        columns[completion_column] = _read_completion(columns[completion_column], is_text)
        columns[_IS_WHOLE] = is_whole

    def _example(self, text: PromptText, prompt_ids: np.ndarray, columns: dict[str, Any]) -> Sample:
        completion, sampled = columns[self._completion_column], None
        if isinstance(completion, str):
            ids = self._codec.encode_continuation(completion)
            if not ids or ids[-1] not in self._eos:
                ids.append(self._eos[0] if isinstance(text, str) else self._end_of_turn)
        else:
            assert not isinstance(text, str), "messages follow messages"
            first = 0 if columns[_IS_WHOLE] else len(text)
            turns = self._turns.find([*text, *completion], tools_of(columns), first)
            self.left_out.update(turns.left_out)
            if True not in turns.is_learned:
                raise ValueError(
                    "nothing is learned: the template prints nothing of the assistant, or its weight is 0."
                )
            begin = turns.is_learned.index(True)
            prompt_ids, ids = np.array(turns.token_ids[:begin], np.int32), turns.token_ids[begin:]
            sampled = np.array(turns.is_learned[begin:])
        check_vocabulary(ids, self.limits.vocab_size)
        return Sample(prompt_ids, np.array(ids, np.int32), None, sampled=sampled)

    @functools.cached_property
    def _turns(self) -> TurnFinder:
        return TurnFinder(self._codec, (*self._eos, self._end_of_turn))

    @functools.cached_property
    def _end_of_turn(self) -> int:
        """The template's end-of-turn token if that ends sequences, else the first end-of-sequence token."""
        token = self._codec.single_token(self._codec.end_of_turn() or "")
        return token if token in self._eos else self._eos[0]


def _ends_with_assistant(value: Any) -> bool:
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _read_completion(value: Any, is_text: bool) -> str | list[dict[str, Any]]:
    """Returns a row's completion as text, or as messages that continue the prompt's messages."""
    if isinstance(value, str) and value:
        return value
    fault = f"got {value!r:.200}"
    try:
        messages = read_messages(value) if _ends_with_assistant(value) else []
    except ValueError as error:
        messages, fault = [], str(error)
    if messages and not is_text:
        return messages
    alone = messages[0] if len(messages) == 1 else {}
    if alone.get("content") and not any(map(alone.get, _OTHER_PARTS)):
        return alone["content"]
    raise ValueError(
        "a completion must be a string that is not empty, or a list of messages that ends with one of "
        f"the assistant (behind a prompt that is text, a single one with content alone), {fault}."
    )


class ExampleStream:
    """The examples of a file, shuffled anew in each epoch, resumable by their position.

    Raises :class:`DataError` if the file or a row checked at the start is unusable, or if no example fits.
    ``path`` is the value of the setting ``key``. ``date`` is the current date for chat templates; if it
    is empty, it is the time of the first rendering. ``num_too_long`` and ``num_unusable`` count
    the rows left out so far. Unusable rows are invalid examples beyond those checked at the start.
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
        sft, prompts, row_len = config.sft, config.prompts, config.training.seq_len
        self._codec = TextCodec(
            str(model.path), model.eos_token_ids, prompts.chat_template_kwargs, date,
            special_tokens=prompts.special_tokens,
        )  # fmt: skip
        self._key, self.num_too_long, self.num_unusable = key, 0, 0
        max_tokens = min(sft.max_example_tokens or row_len, row_len)
        limits = PromptLimits(
            max_tokens - 1,
            model.vocab_size,
            source="sft.max_example_tokens, or training.seq_len, minus one",
            remedy=_REMEDY,
        )
        try:
            table = open_table(path, prompts.split, {}, sft.column, key, prompts.name)
            prompts = replace(prompts, column=sft.column)
            self._set = ExampleSet(
                sft, model.eos_token_ids, table, prompts, self._codec, limits, key
            )
            self.checked = check_rows(self._set)
            self._told_left_out = sorted(self._set.left_out.items())
        except ValueError as error:
            raise DataError(str(error)) from error
        if self.checked.num_fitting == 0:
            raise DataError(
                f"{key}: none of the {len(self)} examples in {path} is at most {max_tokens} tokens "
                f"long. {_REMEDY}"
            )
        self._stream = PromptStream(
            [self._set],
            seed=config.debug.seed or 0,
            shuffle=prompts.shuffle,
            position=progress.position if progress is not None else 0,
        )

    def __len__(self) -> int:
        """Returns the number of examples of an epoch, including those that are too long."""
        return len(self._set)

    def notes(self) -> list[str]:
        """Returns notes on what templates and tokenization do to examples that users may not expect."""
        is_chat = not isinstance(self._set.sample().text, str)
        notes = [*self._set.notes(), *prompt_notes(self._codec, is_chat=is_chat)]
        for what, number in self._told_left_out:
            notes.append(
                f"{self._key}: in {number:,} of the {self.checked.num_tokenized:,} examples that were "
                f"tokenized, the chat template does not print {what} of the assistant, which is "
                "therefore not learned."
            )
        return notes

    def describe_first(self) -> str:
        """Counts the tokens of the first example, and shows it with its trained parts marked."""
        sample: Sample = self._set.sample().columns[_SAMPLE]
        ids, own, parts = [*sample.prompt_ids, *sample.completion_ids], sample.sampled, []
        is_own = [False] * len(sample.prompt_ids)
        is_own += [True] * len(sample.completion_ids) if own is None else own.tolist()
        for learned, run in groupby(zip(ids, is_own, strict=True), lambda pair: pair[1]):
            text = self._codec.excerpt([token for token, _ in run])
            parts.append(f"[trained: {text}]" if learned else text)
        return (
            f"its first: {len(ids)} tokens, {sum(is_own)} of them trained: {' '.join(parts[:12])}"
        )

    @property
    def position(self) -> int:
        """Number of rows read so far, over all epochs."""
        return self._stream.position

    def next(self) -> Sample:
        try:
            prompt = self._stream.next()
        except ValueError as error:
            raise DataError(str(error)) from error
        for skipped in self._stream.take_skipped():
            self.num_too_long += skipped.reason == "too long"
            self.num_unusable += skipped.reason == "unusable"
            if skipped.reason == "unusable" and self.num_unusable == 1:
                logger.warning(
                    f"{self._key}: first of the examples that cannot be used: {skipped.detail}"
                )
        return prompt.columns[_SAMPLE]

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


class SupervisedSource(StepSource):
    """Plans steps of supervised examples; see :class:`StepSource`.

    The loss is that of ``grpo.ptx_path``, so that rows, layouts and loss are the same code.
    ``progress.position`` counts the rows read, over all epochs. Raises :class:`DataError` if
    ``sft.path`` is unusable.
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
        """Logs the number of examples. Each example is read when its step needs it."""
        path, checked = self.config.sft.path, self._examples.checked
        logger.info(f"sft.path: {path}, {checked.describe()}")
        for note in self._examples.notes():
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
