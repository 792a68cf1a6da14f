# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The form of the prompts: the chat template, and the instruction that the reward needs."""

from contextlib import closing
from dataclasses import dataclass

import numpy as np

from torchtitan.grpo.commands.init.columns import Columns, Source
from torchtitan.grpo.commands.init.reward_choice import (
    Form,
    RewardChoice,
    are_results,
    opens_answer,
    say_form,
)
from torchtitan.grpo.config import Prompts
from torchtitan.grpo.config.command_line import ConfigError, refusing
from torchtitan.grpo.rollout.prompts import PromptLimits, PromptSet
from torchtitan.grpo.rollout.prompts.row_check import sample_rows
from torchtitan.grpo.rollout.tables import RowError, open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec

_INSTRUCTIONS: dict[Form, str] = {
    "boxed": "Reason step by step, and write the final answer in \\boxed{}.",
    "number": "Reason step by step, and write the final answer at the end.",
    "calculation": "Write the calculation and its result in one line.",
    "alone": "Write the answer alone, without any other text.",
    "free": "",
}
_THINKING = "enable_thinking"
# Placeholder for a prompt when the chat template is rendered. Templates keep letters as is.
_MARK = "THEPROMPTOFTHEROW"


@dataclass
class PromptForm:
    """The settings of ``[prompts]`` that shape a prompt.

    ``thinks`` says whether the model always thinks, because its template cannot switch thinking off.
    """

    settings: Prompts
    why_template: str = ""
    thinks: bool = False


def choose_form(
    folder: str, source: Source, columns: Columns, reward: RewardChoice
) -> tuple[PromptForm, TextCodec]:
    """Returns the form, and the codec with which the run will tokenize prompts of this form."""
    codec, variables = TextCodec(folder, ()), {}
    with refusing():  # transformers may not be able to load the tokenizer
        if codec.has_chat_template() and codec.template.reads(_THINKING):
            variables = {_THINKING: False}
            codec = TextCodec(folder, (), variables)
    settings = Prompts(
        source.path,
        name=source.name,
        split=source.split,
        column=columns.column,
        rename=columns.rename(reward.is_builtin),
    )
    form = PromptForm(settings)
    is_said = say_form(columns) or (reward.form == "alone" and opens_answer(columns))
    instruction = "" if is_said else _INSTRUCTIONS[reward.form]
    if columns.is_chat:
        with refusing():
            first = next(text for text in columns.texts if not isinstance(text, str))
            form.thinks = _begins_thinking(codec.template.render(first))
        if instruction:  # a template may refuse system messages, and prompts may have their own
            settings.template = f"{{prompt}}\n\n{_escaped(instruction)}"
            form.why_template = "the user's turn ends with the form that the reward reads"
        settings.chat_template_kwargs = dict(variables)
    elif codec.has_chat_template():
        _shape_texts(form, codec, instruction)
    elif instruction or not opens_answer(columns):
        lines = ("Question: {prompt}", _escaped(instruction), "Answer:")
        settings.template = "\n".join(line for line in lines if line)
        form.why_template = "the model has no chat template, so it continues this text"
    return form, codec


def _begins_thinking(rendered: str) -> bool:
    return rendered.rstrip().endswith("<think>")


def _shape_texts(form: PromptForm, codec: TextCodec, instruction: str) -> None:
    """Copies the chat template into the prompt template: a run applies the former to chat messages only."""
    content = f"{_MARK}\n\n{instruction}" if instruction else _MARK
    with refusing():
        parts = codec.template.render([{"role": "user", "content": content}]).split(_MARK)
    if len(parts) != 2:
        raise ConfigError(
            "The chat template of MODEL must print a user's message once to be written out for prompts "
            f"that are texts, and prints it {len(parts) - 1} times. Make the prompts lists of messages: "
            '[{"role": "user", "content": ...}].'
        )
    form.settings.template = _escaped(parts[0]) + "{prompt}" + _escaped(parts[1])
    date = f"; it prints the day, {codec.template.date}" if codec.template.date else ""
    form.why_template = (
        f"the model's chat template, written out: prompts that are texts get none{date}"
    )
    form.thinks = _begins_thinking(parts[1])


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def measure(codec: TextCodec, settings: Prompts, limit: int) -> np.ndarray:
    """Counts the tokens of prompts from all over the data set; a count above ``limit`` is ``limit + 1``.

    Raises ConfigError if no prompt is at most ``limit`` tokens long, or if none can be rendered.
    """
    # Ids beyond the vocabulary are found by the checks of the run.
    limits = PromptLimits(
        limit, 1 << 31, "max_position_embeddings", "Name another model or column."
    )
    lengths, first = [], None
    with refusing():
        table = open_table(
            settings.path, settings.split, settings.rename, settings.column, "DATA", settings.name
        )
        with closing(PromptSet(table, settings, codec, limits, "DATA")) as prompts:
            for row in sample_rows(len(prompts)):
                try:
                    prompt = prompts.prompt(row, row)
                except RowError as error:
                    first = first or error
                    if not lengths and row > 0:
                        raise first from None  # each of them would most likely fail, and slowly
                    continue
                lengths.append(limit + 1 if prompt is None else len(prompt.token_ids))
            if not lengths or min(lengths) > limit:
                raise prompts.none_usable_error()
    return np.asarray(lengths)


def answer_tokens(codec: TextCodec, columns: Columns, reward: RewardChoice) -> int:
    """The 99th percentile of the number of tokens of right answers in the first rows.

    It is 0 if right answers lack the reasoning that completions have, and so say nothing about lengths.
    """
    if reward.form not in ("alone", "free") and are_results(columns):
        return 0
    counts = sorted(max(map(codec.count, found)) for found in columns.answers if found)
    return counts[-(-99 * len(counts) // 100) - 1] if counts else 0
