# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The form of the prompts: the chat template, and the instruction that the reward needs."""

from dataclasses import dataclass

import numpy as np

from torchtitan.grpo.command_line import ConfigError, refusing
from torchtitan.grpo.config import Prompts
from torchtitan.grpo.init_config.columns import Columns, Source
from torchtitan.grpo.init_config.reward_choice import Form, RewardChoice, opens_answer
from torchtitan.grpo.rollout.prompts import PromptLimits, PromptSet
from torchtitan.grpo.rollout.prompts.row_check import sample_rows
from torchtitan.grpo.rollout.tables import RowError, open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec

_INSTRUCTIONS: dict[Form, str] = {
    "boxed": "Reason step by step, and write the final answer in \\boxed{}.",
    "hash": "Reason step by step, then write the final number alone on the last line, as `#### <number>`.",
    "alone": "Write the answer alone, without any other text.",
    "free": "",
}
_MARKS: dict[Form, str] = {"boxed": "boxed", "hash": "####"}
_THINKING = "enable_thinking"
# Placeholder for a prompt when the chat template is rendered. Templates keep letters as is.
_MARK = "THEPROMPTOFTHEROW"


@dataclass(frozen=True)
class PromptForm:
    """The settings of ``[prompts]`` that shape a prompt, and the sentences that explain them.

    ``thinks`` says whether the model cannot be told to answer without thinking.
    """

    settings: Prompts
    why: dict[str, str]
    thinks: bool = False
    warning: str = ""


@dataclass(frozen=True)
class Lengths:
    """Tokens of ``num_rows`` prompts; those above ``limit`` are not in ``tokens``, which is sorted."""

    tokens: np.ndarray
    num_rows: int
    limit: int

    def percentile(self, percent: float) -> int:
        """A length that ``percent`` of all prompts do not exceed, or ``limit``."""
        position = max(0, int(np.ceil(self.num_rows * percent / 100)) - 1)
        return int(self.tokens[position]) if position < len(self.tokens) else self.limit

    def num_longer(self, tokens: int) -> int:
        return self.num_rows - int(np.searchsorted(self.tokens, tokens, side="right"))


def choose_form(
    folder: str, source: Source, columns: Columns, reward: RewardChoice
) -> tuple[PromptForm, TextCodec]:
    """Returns the codec with which the run will tokenize such prompts, too."""
    codec, variables = TextCodec(folder, ()), {}
    has_template = codec.has_chat_template()
    with refusing():  # transformers may not be able to load the tokenizer
        if has_template and codec.template.reads(_THINKING):
            variables = {_THINKING: False}
            codec = TextCodec(folder, (), variables)
    settings = Prompts(
        source.path,
        name=source.name,
        split=source.split,
        column=columns.column,
        rename=columns.rename(reward.is_builtin),
    )
    instruction = _instruction(columns, reward)
    if columns.is_chat:
        return _of_chat(codec, settings, columns, instruction, variables), codec
    if not has_template:
        return _of_base_model(settings, columns, instruction), codec
    return _of_texts(codec, settings, columns, instruction), codec


def _instruction(columns: Columns, reward: RewardChoice) -> str:
    """What prompts must say for the reward, unless they say it already."""
    is_said = sum(_MARKS.get(reward.form, "\0") in str(text) for text in columns.texts)
    if 2 * is_said >= len(columns.texts) or (reward.form == "alone" and opens_answer(columns)):
        return ""
    return _INSTRUCTIONS[reward.form]


def _of_chat(
    codec: TextCodec,
    settings: Prompts,
    columns: Columns,
    instruction: str,
    variables: dict[str, bool],
) -> PromptForm:
    why, warning = {}, ""
    conversations = [text for text in columns.texts if not isinstance(text, str)]
    if instruction and all(messages[0]["role"] == "user" for messages in conversations):
        settings.system_prompt = instruction
        why["system_prompt"] = "the reward reads this form"
    elif instruction:
        warning = (
            f"The reward expects what this asks for: {instruction!r} The prompts have system messages of "
            "their own, so it was not added. Add it to the data."
        )
    if variables:
        settings.chat_template_kwargs = dict(variables)
        why["chat_template_kwargs"] = "answers without thinking are short; true needs more tokens"
    with refusing():
        text = codec.template.render(conversations[0])
    return PromptForm(settings, why, _begins_thinking(text), warning)


def _begins_thinking(rendered: str) -> bool:
    return rendered.rstrip().endswith("<think>")


def _of_base_model(settings: Prompts, columns: Columns, instruction: str) -> PromptForm:
    if opens_answer(columns) and not instruction and columns.system is None:
        return PromptForm(settings, {})
    parts = [
        columns.system,
        "Question: {prompt}",
        "{instruction}" if instruction else None,
        "Answer:",
    ]
    lines = [part for part in parts if part is not None]
    settings.template = "\n".join(_escaped(p) if p is columns.system else p for p in lines).replace(
        "{instruction}", _escaped(instruction)
    )
    return PromptForm(
        settings, {"template": "the model has no chat template, so it continues this text"}
    )


def _of_texts(
    codec: TextCodec, settings: Prompts, columns: Columns, instruction: str
) -> PromptForm:
    """Writes out what the chat template makes of a text, because it is applied to messages alone."""
    content = f"{_MARK}\n\n{instruction}" if instruction else _MARK
    messages = [{"role": "user", "content": content}]
    if columns.system is not None:
        messages.insert(0, {"role": "system", "content": columns.system})
    with refusing():
        parts = codec.template.render(messages).split(_MARK)
    if len(parts) != 2:
        raise ConfigError(
            "The chat template of MODEL must print a user's message once to be written out for prompts "
            f"that are texts, and prints it {len(parts) - 1} times. Make the prompts lists of messages: "
            '[{"role": "user", "content": ...}].'
        )
    settings.template = _escaped(parts[0]) + "{prompt}" + _escaped(parts[1])
    why = "the model's chat template, written out: prompts that are texts get none"
    if date := codec.template.date:
        why += f"; it prints the day, {date}"
    return PromptForm(settings, {"template": why}, _begins_thinking(parts[1]))


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def measure(codec: TextCodec, settings: Prompts, limit: int) -> Lengths:
    """Counts the tokens of prompts that are spread over the data set, up to ``limit`` of each.

    Raises ConfigError if no prompt is at most ``limit`` tokens long, or if none can be rendered.
    """
    # Ids beyond the vocabulary are found by the checks of the run.
    limits = PromptLimits(limit, vocab_size=1 << 31, source="max_position_embeddings")
    found, num_read, first_error = [], 0, ""
    with refusing():
        table = open_table(
            settings.path, settings.split, settings.rename, settings.column, "DATA", settings.name
        )
        prompts = PromptSet(table, settings, codec, limits, "DATA")
        try:
            for row in sample_rows(len(prompts)):
                try:
                    prompt = prompts.prompt(row, row)
                except RowError as error:
                    first_error = first_error or str(error)
                    if not found and row > 0:
                        raise  # it would most likely fail for each of them, and slowly
                    continue
                num_read += 1
                if prompt is not None:
                    found.append(len(prompt.token_ids))
        finally:
            prompts.close()
    if not found:
        raise ConfigError(
            first_error
            or f"DATA must have prompts that fit MODEL, but all {num_read} that were read are longer than "
            f"{limit} tokens (max_position_embeddings). Name another model or column."
        )
    return Lengths(np.sort(np.asarray(found)), num_read, limit)


def answer_tokens(codec: TextCodec, columns: Columns) -> int:
    """The tokens of the longest right answer of the first rows, except for the longest hundredth."""
    counts = sorted(max(map(codec.count, found)) for found in columns.answers if found)
    return counts[-(-99 * len(counts) // 100) - 1] if counts else 0
