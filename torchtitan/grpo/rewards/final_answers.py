# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Finds the final answer of a text: in a ``\boxed{...}``, after a mark, or as its last number."""

import re
from decimal import Decimal

# A box with what it holds, or up to the brace before what it holds.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([^\s{$\\]+|\\[A-Za-z]+[^\s$]*))")
_LEAD_IN = re.compile(r"\banswer\s*(?:is\s*:?|:|=)", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}%])(?P<minus>[-−]))?[$€£]?"
    r"(?P<digits>(?:(?<!\w)(?<!\d\.)(?:\d{1,3}(?:\{?,\}?\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\w))?)"
)
# What makes a number a part of a formula, as in `x+1`, `2^{n}` or `2\pi`, but not in `2\text{ cm}`.
_FORMULA_BEFORE = re.compile(r".*(?:[*/^_]\{?|[\w)}\]]\s*\+|\b[A-Za-z]\s*[-−])\s*", re.DOTALL)
_FORMULA_AFTER = re.compile(
    r"\s*(?:[+*/]|[-−](?![A-Za-z]{2})|\^(?!\{?\\circ)|\\(?!text|mathrm|circ|[%$ ,;!]))|[A-Za-z]+\d"
)


def final_answer(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{...}``, else the rest of the line after ``####``.

    ``\boxed 5`` and ``\fbox{5}`` are boxes too. Of nested boxes, the inner ``\boxed`` command is
    removed and its content kept. Returns ``None`` if the text has neither.
    """
    last, end, content, closing = None, 0, None, _closing_braces(text)
    for box in _BOX.finditer(text):
        if last is None or box.start() >= end:
            last, content = box, box[1]
            if content is None and (close := closing.get(box.end() - 1)) is not None:
                content = text[box.end() : close].strip()
            end = box.end() + len(content or "")
    if last is not None:
        return content and re.sub(r"\\(?:boxed|fbox)\s*(?=\{)", "", content)
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def read_expected(answer: str) -> str:
    r"""Returns the final answer in an ``answer`` column, else what follows "answer is", else the whole text.

    Example: ``She has 6*7.\n#### 42`` and ``The answer is 42.`` give ``42``.
    """
    final = final_answer(answer)
    if final:
        return final
    answer = answer.strip()
    marks = [mark.end() for mark in _LEAD_IN.finditer(answer)]
    behind = (answer[end:].strip() for end in reversed(marks))
    return next(filter(None, behind), answer).removesuffix(".") if marks else answer


def _closing_braces(text: str) -> dict[int, int]:
    """Maps the position of each opening brace to that of its closing brace."""
    opened: list[int] = []
    closing: dict[int, int] = {}
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closing[opened.pop()] = brace.start()
    return closing


def numbers_in(text: str) -> list[Decimal]:
    """Returns the numbers of a text, in order, such as -1234.5 for ``-$1,234.50``.

    Commas may separate thousands. A minus sign directly before a number belongs to it, unless the
    sign follows a letter, a digit, a percent sign or a closing bracket, as in ``5-3``. Digits directly
    after a letter, as in ``x2``, are no number. Digits before a letter, as in ``57km``, are one.
    ``1/2`` has two numbers.
    """
    return [
        Decimal("-" * bool(found["minus"]) + re.sub("[{,}]", "", found["digits"]))
        for found in _NUMBER.finditer(text)
    ]


def expected_number(answer: str) -> Decimal | None:
    """Returns the number of an expected answer, or ``None`` if it has none, several, or a formula."""
    text = read_expected(answer)
    found = [*_NUMBER.finditer(text)]
    if len(found) != 1 or _FORMULA_AFTER.match(text, found[0].end()):
        return None
    return None if _FORMULA_BEFORE.fullmatch(text, 0, found[0].start()) else numbers_in(text)[0]


def ends_in(text: str, expected: str) -> float | None:
    """Returns 1 if the text's last number is the expected one, else 0; ``None`` if no number is expected."""
    wanted = expected_number(expected)
    return None if wanted is None else float(numbers_in(text)[-1:] == [wanted])


def is_number(answer: str) -> bool:
    """Returns whether an expected answer is a number without words or units, except ``$`` and ``%``."""
    return _NUMBER.fullmatch(read_expected(answer).rstrip("%.")) is not None
