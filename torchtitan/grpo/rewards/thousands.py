# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Removes thousands separators from an answer, and no other comma.

A comma separates thousands in ``1,234`` and elements in ``(1,234)``, ``3,4`` and ``1,23``. Only
the first may go: otherwise ``34`` would equal ``3,4``. A separator is removed where

- the number is whole: one to three digits of which the first is not 0, then groups of exactly
  three digits with the same separator, then perhaps a decimal fraction;
- no other comma touches the number, as in ``1,234,-5``;
- the number is in no tuple, interval or set, unless the elements there are separated by ``;`` or
  by a comma with white space, as in ``(1,234, 5)``, so that the bare comma cannot be one of them.

These also separate thousands in LaTeX and in typeset text, and never separate elements: ``{,}``,
``,\!``, ``\,``, ``\:``, ``\;``, a backslash with a space, ``~``, a space, and the no-break and
thin spaces of Unicode.
"""

import re

_SEPARATOR = r"(?:\{,\}|,\\!|,|\\[,:; ]|~|[ \u00a0\u2009\u202f])"
# As many digits, separators and decimal points as stand together. A letter before them makes
# them an index or an exponent.
_RUN = re.compile(rf"(?<![\w.,^])\d++(?:(?:{_SEPARATOR}|\.)\d++)*+(?!,\S)")
_GROUPED = re.compile(rf"[1-9]\d{{0,2}}({_SEPARATOR})\d{{3}}(?:\1\d{{3}})*(?:\.\d+)?")
_ELEMENTS = re.compile(r";|,\s")
_OPENING, _CLOSING = "([{", ")]}"
# A brace behind one of these encloses an argument of LaTeX, as in \frac{1}{2} and 2^{10}.
_BEFORE_ARGUMENT = re.compile(r"[A-Za-z}\]^_]")
# A longer answer is not a number, and looking for brackets in it would take long.
_MAX_CHARACTERS = 1000


def without_thousands_separators(text: str) -> str:
    r"""Removes the thousands separators of all numbers in ``text``.

    Example: ``12,345,678.9`` becomes ``12345678.9``, ``x=1{,}234`` becomes ``x=1234`` and
    ``\frac{1,000}{3}`` becomes ``\frac{1000}{3}``; ``1,23``, ``0,500`` and ``(1,234)`` stay.
    """
    return _RUN.sub(_ungrouped, text) if len(text) <= _MAX_CHARACTERS else text


def _ungrouped(run: re.Match[str]) -> str:
    grouped = _GROUPED.fullmatch(run[0])
    if grouped is None:
        return run[0]
    if grouped[1] == ",":
        enclosing = _enclosing(run.string, run.start())
        if enclosing is not None and not _ELEMENTS.search(enclosing):
            return run[0]
    return run[0].replace(grouped[1], "")


def _enclosing(text: str, position: int) -> str | None:
    """The contents of the innermost brackets around ``position``, or ``None`` if there are none.

    Braces around an argument of LaTeX are no brackets.
    """
    depth = 0
    for start in range(position - 1, -1, -1):
        if text[start] in _CLOSING:
            depth += 1
        elif text[start] in _OPENING and depth > 0:
            depth -= 1
        elif text[start] in _OPENING and not _is_argument(text, start):
            return text[start + 1 : _end(text, start)]
    return None


def _is_argument(text: str, start: int) -> bool:
    return text[start] == "{" and _BEFORE_ARGUMENT.match(text[start - 1 : start]) is not None


def _end(text: str, start: int) -> int:
    """Position of the bracket that closes the one at ``start``, else the end of the text."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in _OPENING) - (text[position] in _CLOSING)
        if depth == 0:
            return position
    return len(text)
