# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rewards for instructions whose following a program can verify, such as "Do not use any commas".

The idea is IFEval's (https://arxiv.org/abs/2311.07911); the checks and their definitions are this file's own.
`train_configs/smollm2_instructions.toml` trains on them. A row of the data has the column `instructions`, a list such as
`[{"kind": "sentences", "count": 2}]`, and its prompt states each of them with the sentence of `KINDS`.

An answer is first cleaned: compatibility forms become plain characters (NFKC), and invisible characters are removed.
It follows no instruction at all if it is not an answer (`is_answer`), such as an empty text, one word that is repeated, or
a copy of the prompt. No check reads whether the answer is right, or about the question.

- A word is a run of letters and digits. Apostrophes and hyphens within it, and commas and points within a number, belong
  to it: "don't", "well-known" and "1,000.50" are one word each. Words are compared without regard to case.
- A sentence ends with `.`, `!` or `?`, or several of them, before white space or the end of the text. Closing quotes and
  brackets may follow them. A point after Mr, Mrs, Ms, Dr, a.m and p.m ends no sentence, unless it ends the text.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WORD = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+(?:['’-][^\W_]+)*")
SENTENCE_END = re.compile(
    r"(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\ba\.m)(?<!\bp\.m)[.!?]+[\"'”’)\]*]*\s+"
    r"|[.!?]+[\"'”’)\]*]*\s*$"
)
FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
LEAST_WORDS = 5
COPIED_RUN = 4


def clean(text: str) -> str:
    """Returns the text with plain characters for compatibility forms, and without invisible ones."""
    text = unicodedata.normalize("NFKC", text).replace("\t", " ")
    return "".join(c for c in text if c == "\n" or unicodedata.category(c)[0] != "C").strip()


def words_of(text: str) -> list[str]:
    return [word.casefold().replace("’", "'") for word in WORD.findall(text)]


def sentences_of(text: str) -> list[str] | None:
    """Returns the sentences without their ends, or None if the last one has no end."""
    *sentences, rest = SENTENCE_END.split(text)
    return sentences if not rest.strip() else None


def is_answer(text: str, prompt: str, least_words: int) -> bool:
    """Returns whether a cleaned text says something of its own.

    It has at least ``least_words`` different words with two of the letters a to z, more than half of its words are
    different, and at most half of its runs of ``COPIED_RUN`` words are in the prompt.
    """
    words = words_of(text)
    real = {word for word in words if len(re.findall("[a-z]", word)) >= 2}
    runs, known = runs_of(words), set(runs_of(words_of(prompt)))
    copied = sum(run in known for run in runs)
    return (
        len(real) >= least_words
        and 2 * len(set(words)) > len(words)
        and (not runs or 2 * copied <= len(runs))
    )


def runs_of(words: list[str]) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + COPIED_RUN]) for i in range(len(words) - COPIED_RUN + 1)]


# -- checks: whether a cleaned text follows an instruction -----------------------------------


def word_range(text: str, least: int, most: int) -> bool:
    return least <= len(words_of(text)) <= most


def min_words(text: str, count: int) -> bool:
    return len(words_of(text)) >= count


def sentences(text: str, count: int) -> bool:
    """The text has ``count`` sentences of at least three words each, and nothing after the last one."""
    found = sentences_of(text) or []
    return len(found) == count and all(len(words_of(sentence)) >= 3 for sentence in found)


def ends_with_exclamation(text: str) -> bool:
    return bool(re.search(r"![\"'”’)\]*]*$", text))


def ends_with_question(text: str) -> bool:
    return bool(re.search(r"\?[\"'”’)\]*]*$", text))


def begins_with(text: str, word: str) -> bool:
    return words_of(text)[:1] == words_of(word)


def contains(text: str, word: str) -> bool:
    return word.casefold() in words_of(text)


def word_times(text: str, word: str, count: int) -> bool:
    return words_of(text).count(word.casefold()) == count


def no_word(text: str, word: str) -> bool:
    return all(word.casefold() not in found.split("-") for found in words_of(text))


def no_commas(text: str) -> bool:
    return not any("COMMA" in unicodedata.name(c, "") for c in text)


def no_digits(text: str) -> bool:
    return not any(c.isnumeric() for c in text)


def quotes(text: str) -> bool:
    """Two or more words are between double quotes, each pair of which is in one line."""
    quoted = re.findall(r"(?<!\w)[\"“]([^\"“”\n]+)[\"”]", text)
    return sum(len(words_of(part)) for part in quoted) >= 2


def bold(text: str) -> bool:
    """A pair of asterisks is around some words of a line, other than the "this" of the instruction."""
    found = re.findall(r"(?<!\w)\*(\w[^*\n]*)\*(?!\w)", text)
    return any(words_of(part) != ["this"] for part in found)


def numbered(text: str) -> bool:
    """Two lines or more begin with a number and a point, from 1 on, and have different words.

    Other lines may be around them.
    """
    found = re.findall(r"^\s*(\d{1,3})\. (.*)$", text, re.MULTILINE)
    contents = {tuple(words_of(line)) for _, line in found} - {()}
    numbers = [int(number) for number, _ in found]
    return len(contents) == len(found) >= 2 and numbers == [*range(1, len(found) + 1)]


def json_object(text: str, keys: list[str]) -> bool:
    """The text, or its only ``` fence, is a JSON object with these keys.

    Each key is there once, and has a value that is not blank and no key. Values differ, and one of them has
    two words or more.
    """
    fenced = FENCE.fullmatch(text)
    try:  # objects become tuples of pairs, and NaN, which is not JSON, becomes None
        pairs = json.loads(
            fenced[1] if fenced else text, object_pairs_hook=tuple, parse_constant=lambda _: None
        )
    except (ValueError, RecursionError):
        return False
    if not isinstance(pairs, tuple) or sorted(key for key, _ in pairs) != sorted(keys):
        return False
    values = ["" if value in (None, (), []) else str(value).strip() for _, value in pairs]
    return (
        not {"", *keys} & {*values}
        and len({*values}) == len(values)
        and any(len(words_of(value)) >= 2 for value in values)
    )


@dataclass(frozen=True)
class Kind:
    """A kind of instruction."""

    follows: Callable[..., bool]
    """Whether a cleaned text follows it, called with the text and the parameters of an instruction."""
    statement: str
    """The sentence that states it in a prompt, with the parameters in braces."""
    least_words: int = LEAST_WORDS
    """An answer has at least so many different words."""


KINDS = {
    "word_range": Kind(word_range, "Answer in {least} to {most} words."),
    "min_words": Kind(min_words, "Write at least {count} words."),
    "sentences": Kind(sentences, "Write exactly {count} sentences."),
    "begins_with": Kind(begins_with, 'Begin your answer with the word "{word}".'),
    "ends_with_exclamation": Kind(
        ends_with_exclamation, "End your answer with an exclamation mark."
    ),
    "ends_with_question": Kind(ends_with_question, "End your answer with a question."),
    "contains": Kind(contains, 'Use the word "{word}" in your answer.'),
    "word_times": Kind(word_times, 'Use the word "{word}" exactly {count} times.'),
    "no_word": Kind(no_word, 'Do not use the word "{word}".'),
    "no_commas": Kind(no_commas, "Do not use any commas."),
    "no_digits": Kind(no_digits, "Do not use any digits."),
    "quotes": Kind(quotes, "Put some of the words in double quotes."),
    "bold": Kind(bold, "Put an important word between asterisks, like *this*."),
    "numbered": Kind(numbered, "Answer with a numbered list."),
    "json_object": Kind(
        json_object, 'Answer with a JSON object with the keys "{keys[0]}" and "{keys[1]}".', 0
    ),
}


def parameters_of(instruction: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters. Readers of tables add None for parameters of other kinds."""
    return {k: v for k, v in instruction.items() if k != "kind" and v is not None}


def statement(instruction: dict[str, Any]) -> str:
    """Returns the sentence that states an instruction in a prompt."""
    return KINDS[instruction["kind"]].statement.format(**parameters_of(instruction))


def is_followed(instruction: dict[str, Any], answer: str, prompt: str) -> bool:
    kind, text = KINDS[instruction["kind"]], clean(answer)
    return is_answer(text, prompt, kind.least_words) and kind.follows(
        text, **parameters_of(instruction)
    )


# -- rewards, with TRL's signature -----------------------------------------------------------


def instructions_followed(prompts, completions, instructions, **kwargs) -> list[float]:
    """Returns the fraction of its row's instructions that each completion follows, in [0, 1]."""
    return [
        sum(is_followed(one, _text_of(completion), _text_of(prompt)) for one in asked) / len(asked)
        for prompt, completion, asked in zip(prompts, completions, instructions, strict=True)
    ]


def all_followed(prompts, completions, instructions, **kwargs) -> list[float]:
    """Returns 1 for each completion that follows all instructions of its row, else 0."""
    return [float(f == 1) for f in instructions_followed(prompts, completions, instructions)]


def _text_of(messages: str | list[dict[str, str]]) -> str:
    """Returns a prompt or completion as text: the last message, if it is a conversation."""
    return messages if isinstance(messages, str) else messages[-1]["content"]
