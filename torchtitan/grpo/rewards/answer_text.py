# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Writes an answer in the LaTeX that math-verify reads, without a change of its value.

This covers what models and data sets write and math-verify does not read: Markdown, Unicode, prose
before the answer, thousands separators, scientific notation with ``e``, repeating decimals, and
mixed numbers without LaTeX.

A comma separates thousands in ``1,234`` and elements in ``(1,234)``, ``3,4`` and ``1,23``. It is
removed only where

- the number is whole: one to three digits of which the first is not 0, then groups of exactly
  three digits with the same separator, then perhaps a decimal fraction;
- no other comma touches the number, as in ``1,234,-5``;
- the number is in no tuple, interval or set, unless the elements there are separated by ``;`` or
  by a comma with white space, as in ``(1,234, 5)``.

``{,}``, ``\,``, a thin space and their like never separate elements.
"""

import re
import unicodedata
from fractions import Fraction

TEXT_COMMAND = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)"
TEXT = re.compile(TEXT_COMMAND + r"\s*\{([^{}]*)\}")

_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢ"
_LEVEL = str.maketrans(_RAISED + _LOWERED, "0123456789+-=()ni" * 2)
_CHARACTERS = str.maketrans(
    dict.fromkeys("‐‑‒–—―−﹘﹣－⁃", "-")
    | dict.fromkeys("°º˚∘", "^\\circ ")
    | dict.fromkeys("·⋅∙•", "\\cdot ")
    | dict.fromkeys("⁄∕", "/")
    | dict.fromkeys("∅⌀", "\\emptyset ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")
    | {
        "×": "\\times ", "✕": "\\times ", "÷": "\\div ", "±": "\\pm ", "∓": "\\mp ", "∞": "\\infty ",
        "≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ",
        "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∖": "\\setminus ", "ℝ": "\\mathbb{R}",
        "ℤ": "\\mathbb{Z}", "ℚ": "\\mathbb{Q}", "ℕ": "\\mathbb{N}", "ℂ": "\\mathbb{C}", "∠": "\\angle ",
    }
)  # fmt: skip
_ROOTS = {"√": "", "∛": "[3]", "∜": "[4]"}

_MARKS = re.compile(r"(\*{1,3}|_{1,3}|`+)(?=\S)(.*\S)\1", re.DOTALL)
_BOLD = re.compile(r"(?<![\w)}*])(\*\*|__)(?=[^\s*])([^*]*[^\s*])\1(?![\w*])")
_DELIMITERS = re.compile(r"\$\$(.+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_WHOLE_TEXT = re.compile(rf"(?:{TEXT_COMMAND}\s*)?\{{([^{{}}]*)\}}")
_TEXT_WITHOUT_WORDS = re.compile(TEXT_COMMAND + r"\s*\{([^{}A-Za-z]*)\}")
_LEAD_IN = re.compile(
    r"(?:\\approx|approximately|about)\s*(?=[-\d\\$.])|"
    r"(?:\\text\s*\{)?\s*(?:(?:so|thus|hence|therefore|then|finally),?\s+)?(?:the|my|our|final)?\s*"
    r"(?:(?:final|correct)\s+)?(?:answer|result|solution|value|it)\b[^{}=:\d\\]{0,40}?"
    r"(?:\bis\b\s*:?|\bequals\b|:|=)\s*(?P<closed>\}?)\s*(?=\S)",
    re.IGNORECASE,
)
# What TeX takes for an argument, which it then ends: braces, a command, or one character.
_ARGUMENT = r"\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\}|(\\[A-Za-z]+|[^\s\\{}]))"
_TWO_ARGUMENTS = re.compile(rf"\\([dtc]?frac|[dt]?binom)(?![A-Za-z]){_ARGUMENT}{_ARGUMENT}")
_LOG_BASE = re.compile(rf"\\log\s*_{_ARGUMENT}")
_SPACES = re.compile(r"(?:\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\s)+")
_MATRIX = re.compile(r"\\begin|\\\\")

# Numbers and names of plain text, and how LaTeX writes them.
_PLAIN_TEXT = [
    (re.compile(plain), latex)
    for plain, latex in (
        (r"\*\*", "^"),
        (r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]\+?(-?\d+)(?![\w.])", r"\1\\cdot 10^{\2}"),
        (r"(?<=\d)\s*[x*]\s*(?=10\s*\^)", r"\\cdot "),
        (r"(?<![\\A-Za-z{])(pi|sin|cos|tan|cot|ln|log)(?![A-Za-z])", r"\\\1"),
        (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
        (
            r"(?<![\w./^}])(\d+)(?:\s+|\s+and\s+|-and-)(\d+)\s*/\s*(\d+)(?![\d/])",
            r"\1\\frac{\2}{\3}",
        ),
    )
]
_UNICODE_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_DOTS = r"(?:\\[lc]?dots|\.{3,}|…)"
# The forms of the digits that are repeated.
_REPEATING = [
    re.compile(rf"(?<![\w.])(?P<whole>\d*)\.(?P<fixed>\d*{lazy}){block}")
    for lazy, block in (
        ("", rf"\\(?:overline|bar)\s*\{{?(?P<block>\d+)\}}?{_DOTS}?"),
        ("", rf"\((?P<block>\d+)\){_DOTS}?"),
        ("", r"(?P<block>\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?)"),
        ("", r"(?P<block>(?:\d[\u0304\u0305])+)"),
        ("?", rf"(?P<block>\d+?)(?P=block)+{_DOTS}"),
    )
]
# A longer answer is no number, and looking for repetitions or brackets in it would take long.
_MAX_CHARACTERS = 300

_SEPARATOR = r"(?:\{,\}|,\\!|,|\\[,:; ]|~|[ \u00a0\u2009\u202f])"
# As many digits, separators and decimal points as stand together. A letter before them makes
# them an index or an exponent.
_RUN = re.compile(rf"(?<![\w.,^])\d++(?:(?:{_SEPARATOR}|\.)\d++)*+(?!,\S)")
_GROUPED = re.compile(rf"[1-9]\d{{0,2}}({_SEPARATOR})\d{{3}}(?:\1\d{{3}})*(?:\.\d+)?")
_ELEMENTS = re.compile(r";|,\s")
_OPENING, _CLOSING = "([{", ")]}"
# A brace behind one of these encloses an argument of LaTeX, as in \frac{1}{2} and 2^{10}.
_BEFORE_ARGUMENT = re.compile(r"[A-Za-z}\]^_]")


def as_latex(answer: str) -> str:
    r"""Returns the answer in LaTeX, or unchanged where there is nothing to do.

    Example: ``**½**`` becomes ``\frac{1}{2}``, and ``1.2e3`` becomes ``1.2\cdot 10^{3}``.
    """
    text = _without_markup(answer.strip())
    if len(text) <= _MAX_CHARACTERS:
        text = without_thousands_separators(text)
        for pattern in _REPEATING:
            text = pattern.sub(_fraction, text)
    text = _unicode_as_latex(text)
    for pattern, latex in _PLAIN_TEXT:
        text = pattern.sub(latex, text)
    # Both arguments get braces: ``\frac 1 2`` and ``\frac1{2}`` are ``\frac{1}{2}``.
    text = _TWO_ARGUMENTS.sub(
        lambda m: f"\\{m[1]}{{{m[2] or m[3] or ''}}}{{{m[4] or m[5] or ''}}}", text
    )
    text = _LOG_BASE.sub(lambda log: f"\\log_{{{log[1] or log[2]}}} ", text)
    return text if _MATRIX.search(text) else _SPACES.sub(" ", text).strip()


def _without_markup(text: str) -> str:
    """Removes Markdown, delimiters of formulas, prose before the answer, and the full stop."""
    before = None
    while text != before:
        before = text
        for pattern in (_MARKS, _DELIMITERS, _WHOLE_TEXT):
            whole = pattern.fullmatch(text)
            if whole is not None:
                text = next(part for part in reversed(whole.groups()) if part is not None).strip()
        text = _BOLD.sub(r"\2", re.sub(r"(?<!\.)\.$", "", text)).strip()
        lead_in = _LEAD_IN.match(text)
        if lead_in is not None:
            rest = text[lead_in.end() :]
            opened = "{" in lead_in[0] and not lead_in["closed"]
            text = rest.removesuffix("}") if opened else rest
    return _TEXT_WITHOUT_WORDS.sub(r"\1", text)


def _fraction(number: re.Match[str]) -> str:
    whole, fixed, block = (
        re.sub(r"\D", "", part) for part in number.group("whole", "fixed", "block")
    )
    value = Fraction(int(f"0{whole}{fixed}")) + Fraction(int(block), 10 ** len(block) - 1)
    value /= 10 ** len(fixed)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _unicode_as_latex(text: str) -> str:
    if text.isascii():
        return text
    for mark, characters in (("^", _RAISED), ("_", _LOWERED)):
        text = re.sub(
            f"[{characters}]+", lambda m, mark=mark: f"{mark}{{{m[0].translate(_LEVEL)}}}", text
        )
    text = "".join(map(_character_as_latex, text.translate(_CHARACTERS)))
    return _UNICODE_ROOT.sub(
        lambda m: f"\\sqrt{_ROOTS[m[1]]}{{{next(part for part in m.groups()[1:] if part)}}}", text
    )


def _character_as_latex(character: str) -> str:
    if character.isascii() or character in _ROOTS:
        return character
    plain = unicodedata.normalize("NFKC", character)
    if "\u2044" in plain:  # a vulgar fraction
        above, below = plain.split("\u2044")
        return f"\\frac{{{above}}}{{{below}}}" if below else f"\\frac{{{above}}}"
    name = unicodedata.name(plain, "") if len(plain) == 1 else ""
    if name.startswith(("GREEK SMALL LETTER ", "GREEK CAPITAL LETTER ")):
        letter = name.rpartition(" ")[2].lower()
        letter = "lambda" if letter == "lamda" else letter
        return f"\\{letter.capitalize() if 'CAPITAL' in name else letter} "
    return plain.translate(_CHARACTERS)


def without_thousands_separators(text: str) -> str:
    return _RUN.sub(_ungrouped, text)


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
    """The content of the innermost brackets around ``position``, but for arguments of LaTeX."""
    depth = 0
    for start in range(position - 1, -1, -1):
        if text[start] in _CLOSING:
            depth += 1
        elif text[start] in _OPENING and depth > 0:
            depth -= 1
        elif text[start] in _OPENING and not (
            text[start] == "{" and _BEFORE_ARGUMENT.match(text[start - 1 : start])
        ):
            return text[start + 1 : _end(text, start)]
    return None


def _end(text: str, start: int) -> int:
    """The position of the bracket that closes the one at ``start``, else the text's end."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in _OPENING) - (text[position] in _CLOSING)
        if depth == 0:
            return position
    return len(text)
