# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Decides whether two final answers are the same.

These comparisons are tried in order: equal text; answers that are not formulas; units; plain decimal
numbers, exactly; brackets and equations that math-verify would not tell apart; and math-verify.
"""

import functools
import logging
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from types import FrameType
from typing import Any

from torchtitan.grpo.rewards.answer_kinds import ANSWER_KINDS, without_choice
from torchtitan.grpo.rewards.answer_text import TEXT, as_latex
from torchtitan.grpo.rewards.units import Quantity, read_quantity, scaled

PROCESSOR_SECONDS = 3.0
"""Processor time for one comparison."""

_DECIMAL = re.compile(r"([-+]?)\s*(\d+\.?\d*|\.\d+)")
_TIMES_POWER = re.compile(r"(.*\d\.?)\s*\\(?:cdot|times)\s*10\s*\^\s*\{?\s*(-?\d{1,6})\s*\}?")
_ORDERED, _UNORDERED = (
    re.compile(r"\((?:[^()]|\([^()]*\))*\)"),
    re.compile(r"\\\{.*\\\}", re.DOTALL),
)
_EQUATION = re.compile(r"(?<![\\<>!:])=(?!=)")
_RELATION = re.compile(
    r"[<>≠]|\\(?:le|ge|leq|geq|leqslant|geqslant|ne|neq|lt|gt|approx)(?![A-Za-z])"
)
_JOINED = re.compile(r"(?<![A-Za-z])(and|or)(?![A-Za-z])")
# What may stand before the equals sign of an answer: a name, and no equation to be solved.
_NO_NAMES = re.compile(
    r"\\(?!(?:alpha|beta|gamma|[dD]elta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega|angle)(?![A-Za-z]))"
    r"[A-Za-z]+"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_INDEX = re.compile(r"_\s*(?:\{[^{}]*\}|\w)")
_SIDE_BY_SIDE = re.compile(r"\d\s+\d")
# Powers and factorials of numbers, whose values no computer may hold.
_TOWER = re.compile(r"\d\}?\s*\^\s*\{?\s*-?\s*(\d+)\s*\^\s*\{?\s*-?(\d+)(\s*\}?\s*\^)?")
_HUGE = re.compile(r"\^\s*\{?\s*-?\s*\d{6,}|\d{5,}\s*!|(?:!\s*){2}")
_MAX_EXPONENT = 100_000
_MAX_COMPARED = 4000  # characters


class OutOfTime(BaseException):
    """A comparison took too long. It is no ``Exception``, as sympy and math-verify catch those."""


def same_answer(given: str, wanted: str) -> bool:
    """Whether two answers agree. Raises :class:`OutOfTime` after :data:`PROCESSOR_SECONDS` on the CPU."""
    if given == wanted:
        return True
    given, wanted = (" ".join(answer.split()) for answer in (given, wanted))
    if max(len(given), len(wanted)) > _MAX_COMPARED:
        if len(wanted) <= _MAX_COMPARED // 10:
            return False
        raise OutOfTime(f"Answers of more than {_MAX_COMPARED} characters are not compared.")
    with _processor_time(PROCESSOR_SECONDS):
        return _same(as_latex(given), as_latex(wanted))


def _same(given: str, wanted: str) -> bool:
    if _squeezed(given) == _squeezed(wanted):
        return True
    if not given or not wanted:
        return False
    for kind in ANSWER_KINDS:
        verdict = kind(given, wanted)
        if verdict is not None:
            return verdict
    if bool(_SIDE_BY_SIDE.search(given)) != bool(_SIDE_BY_SIDE.search(wanted)):
        return False  # math-verify would join two numbers to one
    given, wanted = without_choice(given), without_choice(wanted)
    elements = _elements(given), _elements(wanted)
    if elements[0] and elements[1]:
        return _same_elements(*elements)
    return _same_quantity(read_quantity(given), read_quantity(wanted))


def _same_quantity(given: Quantity, wanted: Quantity) -> bool:
    ours, theirs = given.unit, wanted.unit
    if ours is None or theirs is None:
        # A sum such as that of 2 h 30 min says nothing without its unit.
        if _same_value(given.value, wanted.value):
            return not any("+" in q.value for q in (given, wanted) if q.unit is not None)
        # 50% is 50 where percent are asked for, and 0.5 where they are not; 180 degrees are pi.
        pure = {"percent": "\\frac{1}{100}", "angle": "\\frac{\\pi}{180}"}
        for one, other in ((given, wanted), (wanted, given)):
            if one.unit is not None and one.unit.only in pure:
                return _same_value(f"({one.value})\\cdot {pure[one.unit.only]}", other.value)
        return False
    same_words = ours.words <= theirs.words or theirs.words <= ours.words
    if ours.dimensions != theirs.dimensions or not same_words:
        return False
    return _same_value(scaled(given.value, ours.factor / theirs.factor), wanted.value)


def _same_value(given: str, wanted: str) -> bool:
    if _squeezed(given) == _squeezed(wanted):
        return True
    numbers = _plain_number(given), _plain_number(wanted)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    if not _same_brackets(given, wanted):
        return False
    if not _EQUATION.search(wanted) and _EQUATION.search(given) and not _RELATION.search(given):
        return _equation_says(given, wanted)
    return _math_verify_agrees(given, wanted)


def _plain_number(text: str) -> Decimal | None:
    """The exact value of a decimal number, which math-verify would round."""
    power = _TIMES_POWER.fullmatch(text)
    number, exponent = (power[1], power[2]) if power is not None else (text, "0")
    found = _DECIMAL.fullmatch(number)
    return Decimal(f"{found[1]}{found[2]}e{exponent}") if found is not None else None


def _same_brackets(given: str, wanted: str) -> bool:
    """Returns False if one of the two is an ordered pair and the other a set."""
    texts = [re.sub(r"\\(?:left|right)\s*", "", text) for text in (given, wanted)]
    kinds = {
        pattern for text in texts for pattern in (_ORDERED, _UNORDERED) if pattern.fullmatch(text)
    }
    return len(kinds) < 2 or not all(re.search("[,;]", text) for text in texts)


def _equation_says(given: str, wanted: str) -> bool:
    """Returns whether ``x = 5`` or ``3 + 2 = 5`` is the answer 5; ``1 = 5`` and ``2x = 5`` are not."""
    if "," in given or ";" in given or " or " in given or "\\text" in given.rpartition("=")[2]:
        return _math_verify_agrees(given, wanted)
    *left, value = (part.strip() for part in _EQUATION.split(given))
    for part in left:
        variables = _variables(part)
        if not variables:
            if not _same_value(part, value):
                return False
        elif part is left[0] and len(variables) == 1 and not _is_name(part):
            return False
    return _same_quantity(read_quantity(value), Quantity(wanted, None))


def _variables(text: str) -> set[str]:
    text = _NO_NAMES.sub(" ", _INDEX.sub("", TEXT.sub("T", text)))
    return set(re.findall(r"\\[A-Za-z]+|[A-Za-z]", text))


def _is_name(text: str) -> bool:
    """Returns whether an expression only names something: ``x``, ``S_n``, ``f(2)``, ``|AB|``."""
    text = _INDEX.sub("", TEXT.sub("T", text))
    return re.fullmatch(r"[|\s]*(?:\\?[A-Za-z]+[\s'|]*)+(?:\([^()]*\))?[\s'|]*", text) is not None


def _elements(text: str) -> list[str]:
    """The elements of a list without brackets if one of them has words or a unit, else an empty list."""
    parts = re.split(r"\s*(?:,|;|(?:\\text\s*\{\s*)?\b(?:and|or)\b(?:\s*\})?)\s*", text)
    parts = [part for part in parts if part]
    if not 1 < len(parts) <= 8 or re.search(r"[()\[\]]|\\[{}]|\\begin|=", text):
        return []
    is_text = any(_WORD.search(part) or read_quantity(part).unit is not None for part in parts)
    return parts if is_text else []


def _same_elements(given: list[str], wanted: list[str]) -> bool:
    left = list(wanted)
    for element in given:
        match = next((other for other in left if _same(element, other)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _math_verify_agrees(given: str, wanted: str) -> bool:
    for text in (given, wanted):
        if _is_huge(text):
            raise OutOfTime(f"Numbers such as those of {text!r:.100} are not computed.")
    parse, verify = _math_verify()
    return bool(verify(parse(wanted), parse(given)))


def _is_huge(text: str) -> bool:
    """Returns whether computing a number would take too long and could not be interrupted."""
    return _HUGE.search(text) is not None or any(
        tower[3] is not None
        or int(tower[2]) * math.log(max(int(tower[1]), 1)) > math.log(_MAX_EXPONENT)
        for tower in _TOWER.finditer(text)
    )


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Context that raises :class:`OutOfTime` if it takes longer. Only the main thread has this limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def out_of_time(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"Comparing two answers took more than {seconds:g} s of processor time.")

    earlier = signal.signal(signal.SIGPROF, out_of_time)
    # Again and again, in case a library catches the exception.
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, earlier)


@functools.cache
def _math_verify() -> tuple[Callable[[str], Any], Callable[[Any, Any], bool]]:
    """Imports math-verify. The seconds that this takes do not count towards an answer's time limit."""
    left = signal.setitimer(signal.ITIMER_PROF, 0.0)
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import FiniteSet, Intersection, Union

    # It warns once that its own limits are off. Those count the time in which a worker does not run.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Units are read before, and numbers are not to be picked out of what cannot be read as a whole.
    form = NormalizationConfig(malformed_operators=True, nits=True)
    extraction = [LatexExtractionConfig(False, boxed_match_priority=0, normalization_config=form)]

    def read(answer: str) -> Any:
        parsed = parse(f"\\boxed{{{answer}}}", extraction, parsing_timeout=0)  # no limit
        joined = set(_JOINED.findall(answer))
        if parsed and len(joined) == 1 and _RELATION.search(answer) and "," not in answer:
            parsed[0] = solutions(parsed[0], Union if joined == {"or"} else Intersection)
        return parsed

    def solutions(relations: Any, join: Any) -> Any:
        """Returns the numbers that solve ``x < 1 or x > 2``, which math-verify reads as a set of relations."""
        if not isinstance(relations, FiniteSet) or len(relations.free_symbols) != 1:
            return relations
        try:
            return join(*(relation.as_set() for relation in relations.args))  # pyright: ignore[reportAttributeAccessIssue]
        except Exception:  # sympy raises many kinds for what it cannot solve
            return relations

    def agrees(wanted: Any, given: Any) -> bool:
        return verify(wanted, given, allow_set_relation_comp=True, timeout_seconds=0)

    square = read("x^2")  # the first call builds tables
    agrees(square, square)
    signal.setitimer(signal.ITIMER_PROF, *left)
    return read, agrees
