# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares answers that are not formulas, although math-verify would read them as such.

``2024-01-05`` is not a difference, ``7:30 PM`` not a ratio, ``10110_2`` not a variable, and ``east``
not a product. Functions of :data:`ANSWER_KINDS` take two answers in the form of
:func:`~.answer_text.as_latex` and return whether they agree, or ``None`` if they are not of its
kind.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from fractions import Fraction

from torchtitan.grpo.rewards.answer_text import TEXT, TEXT_COMMAND

# Of dates, in lower case with single blanks and dashes; %b is the first letters of a month.
_DATES = ("%Y-%m-%d", "%m-%d-%Y", "%d-%m-%Y", "%d %B %Y", "%B %d %Y", "%d %b %Y", "%b %d %Y")
_NOT_IN_DATES = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b|\bof\b|,|(?<=[a-z])\.")
_CLOCKS, _HALVED_CLOCKS = ("%H:%M", "%H:%M:%S"), ("%I%p", "%I:%M%p", "%I:%M:%S%p")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}
_BASE = re.compile(
    r"\(?(?P<digits>\d[\dA-Za-z]*|[A-F]{2,})\)?\s*(?:_\s*\{?|\(?(?=base))\s*(?:base\s*)?"
    rf"(?P<base>\d{{1,2}}|{'|'.join(_BASES)})\s*\}}?\)?"
)
_CHOICE = re.compile(r"\(?([A-J])(?:[).:]?\s*|[).]\s+\S.*)|\(([A-Ja-j])\)\s*(.+)?", re.DOTALL)
_NOTHING = re.compile(
    r"no (?:real )?solutions?(?: exists?)?|none|(?:the )?empty set|there (?:is|are) no (?:real )?solutions?"
)
_EMPTY_SET = re.compile(r"\\(?:emptyset|varnothing)|\\\{\s*\\\}|\{\s*\}")
_UNDEFINED = re.compile(r"dne|does not exist|undefined|not defined")
_SHORT_WORDS = re.compile("no|on|up|in|of|is|or|an|at|it|to|go|he|we|so|be|by|if|my|us|am|as")
_FORMULA_WORD = re.compile(
    "pi|inf|infinity|sqrt|frac|log|ln|exp|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|min|max|gcd|lcm|det|mod|and|or"
)
_LETTERS = re.compile(r"[^\W\d_]+(?:[\s'’.,-]+[^\W\d_]+)*[.!]?")


def plain_text(answer: str) -> str:
    r"""Returns the answer without ``\text{...}`` around its parts, and with single spaces."""
    return re.sub(r"\s+", " ", TEXT.sub(r" \1 ", answer)).strip()


def same_date(a: str, b: str) -> bool | None:
    """Compares dates. ``1/2/2024`` may begin with the day or the month, but both answers with the same."""
    readings = [_dates(plain_text(answer).lower()) for answer in (a, b)]
    if not any(readings):
        return None
    if len(readings[0]) == len(readings[1]) == 2:  # the same notation
        return readings[0] == readings[1]
    return not set(readings[0]).isdisjoint(readings[1])


def _dates(text: str) -> list[datetime]:
    text = " ".join(re.sub("[/.]", "-", _NOT_IN_DATES.sub(" ", text)).split())
    text = re.sub(r"\bsept\b", "sep", text)
    return _read(text, _DATES) or _read(f"{text} 0004", _DATES[3:])  # a leap year stands for none


def same_time(a: str, b: str) -> bool | None:
    """Compares times of day if one has ``AM`` or ``PM``. A time without them may mean either half of the day."""
    texts = [re.sub(r"[\s.]", "", plain_text(answer).lower()) for answer in (a, b)]
    clocks = [_clocks(text) for text in texts]
    if not any(of and text.endswith("m") for text, of in zip(texts, clocks, strict=True)):
        return None
    return not clocks[0].isdisjoint(clocks[1])


def _clocks(text: str) -> set[datetime]:
    halved, whole = _read(text, _HALVED_CLOCKS), _read(text, _CLOCKS)
    may_be_either = [t.replace(hour=t.hour % 12 + half) for t in whole for half in (0, 12)]
    return set(halved or (may_be_either if whole and whole[0].hour <= 12 else whole))


def _read(text: str, forms: Sequence[str]) -> list[datetime]:
    """Returns the dates that result from parsing the text by each of ``forms`` that fits it."""
    found = []
    for form in forms:
        with contextlib.suppress(ValueError):
            found.append(datetime.strptime(text, form))
    return found


def same_based_number(a: str, b: str) -> bool | None:
    """Compares two numbers if one states its base. Digits must be equal, and also bases if both are stated."""
    (digits, base), (other_digits, other_base) = _based(a), _based(b)
    if base is None and other_base is None:
        return None
    same_base = base is None or other_base is None or base == other_base
    return same_base and digits == other_digits


def _based(answer: str) -> tuple[str, int | None]:
    """Returns a number's digits and its base; the base is ``None`` if the number states none."""
    text = plain_text(answer)
    found = _BASE.fullmatch(text)
    if found is None:
        return text.lstrip("0").upper(), None
    base = found["base"]
    return found["digits"].lstrip("0").upper(), int(base) if base.isdigit() else _BASES[base]


def same_ratio(a: str, b: str) -> bool | None:
    """Compares ratios of three parts or more, in which math-verify would read divisions."""
    parts = [answer.split(":") for answer in (a, b)]
    if max(map(len, parts)) < 3:
        return None
    try:
        one, other = ([Fraction(part.strip()) for part in side] for side in parts)
    except ValueError:
        return None if len(parts[0]) == len(parts[1]) else False
    return len(one) == len(other) and all(
        p * sum(other) == q * sum(one) for p, q in zip(one, other, strict=True)
    )


def same_choice(a: str, b: str) -> bool | None:
    """Compares choices such as ``A``, ``(A)`` and ``(A) 12``, by their letters."""
    choices = [_CHOICE.fullmatch(plain_text(answer)) for answer in (a, b)]
    letters = [(choice[1] or choice[2]).upper() for choice in choices if choice is not None]
    return letters[0] == letters[1] if len(letters) == 2 else None


def without_choice(answer: str) -> str:
    """Returns the text behind a choice's letter: ``12`` for ``(A) 12``."""
    found = re.fullmatch(rf"(?:{TEXT_COMMAND}\s*\{{\s*)?\([A-J]\)\s*\}}?\s*(.+)", answer, re.DOTALL)
    return found[1] if found is not None else answer


def same_words(a: str, b: str) -> bool | None:
    """Compares two answers of which at least one is text; a product such as ``xy`` is not text."""
    words = [_words(answer) for answer in (a, b)]
    if words[0] is not None and words[1] is not None:
        return words[0] == words[1]
    if words[0] is None and words[1] is None:
        return None
    other = a if words[0] is None else b
    return None if re.search(r"[A-Za-z]", other) else False


def _words(answer: str) -> str | None:
    r"""Returns the normalized text of an answer in words; ``None`` for every other answer.

    An answer in words is ``\text{...}`` around more than one letter, or has a word: three or more
    letters with a vowel, or a common word of two letters.
    """
    if _EMPTY_SET.fullmatch(answer):
        return "no solution"
    text = plain_text(answer)
    if not _LETTERS.fullmatch(text) or len(text) < 2:
        return None
    parts = re.findall(r"[^\W\d_]+", text.lower())
    if any(map(_FORMULA_WORD.fullmatch, parts)):
        return None
    is_set_as_text = TEXT.fullmatch(answer) is not None
    if not is_set_as_text and not any(map(_is_word, parts)):
        return None
    text = " ".join(parts)
    if _NOTHING.fullmatch(text):
        return "no solution"
    return "undefined" if _UNDEFINED.fullmatch(text) else text


def _is_word(part: str) -> bool:
    if not part.isascii():
        return True
    if len(part) == 2:
        return _SHORT_WORDS.fullmatch(part) is not None
    return len(part) > 2 and re.search("[aeiou]|.y", part) is not None


ANSWER_KINDS: tuple[Callable[[str, str], bool | None], ...] = (
    same_date,
    same_time,
    same_based_number,
    same_ratio,
    same_choice,
    same_words,
)
