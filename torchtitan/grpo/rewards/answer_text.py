# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Writes an answer in the LaTeX that math-verify reads, without a change of its value.

Each function below is one normalisation; :func:`as_latex` applies them in order. They cover what
models and data sets write and math-verify does not read: Markdown, Unicode, prose before the answer,
scientific notation with ``e``, repeating decimals and mixed numbers without LaTeX.
"""

import re
import unicodedata
from fractions import Fraction

from torchtitan.grpo.rewards.thousands import without_thousands_separators

TEXT_COMMAND = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)"

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢ", "0123456789+-=()ni")
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

_MARKS = re.compile(r"(\*\*\*|\*\*|\*|___|__|`+)(?=\S)(.*\S)\1", re.DOTALL)
_DELIMITERS = re.compile(r"\$\$(.+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_WHOLE_TEXT = re.compile(rf"(?:{TEXT_COMMAND}\s*)?\{{([^{{}}]*)\}}")
_TEXT_WITHOUT_WORDS = re.compile(TEXT_COMMAND + r"\s*\{([^{}A-Za-z]*)\}")
_LEAD_IN = re.compile(
    r"(?:\\text\s*\{)?\s*(?:(?:so|thus|hence|therefore|then|finally),?\s+)?(?:the|my|our|final)?\s*"
    r"(?:(?:final|correct)\s+)?(?:answer|result|solution|value|it)\b[^{}=:\d\\]{0,40}?"
    r"(?:\bis\b\s*:?|\bequals\b|:|=)\s*(?P<closed>\}?)\s*(?=\S)",
    re.IGNORECASE,
)
_SPACES = re.compile(r"(?:\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\s)+")
_MATRIX = re.compile(r"\\begin|\\\\")

_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?![\w.])")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[x*]\s*(?=10\s*\^)")
_BARE_EXPONENT = re.compile(r"\^\s*(-?\d{2,}|-\d)(?![\d.])")
_MIXED = re.compile(r"(?<![\w./^}])(\d+)(?:\s+|\s+and\s+|-and-)(\d+)\s*/\s*(\d+)(?![\d/])")
_PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*(\d+|[A-Za-z](?![A-Za-z]))")
_UNICODE_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_DOTS = r"(?:\\[lc]?dots|\.{3,}|…)"
_DIGITS = r"(?<![\w.])(?P<whole>\d*)\.(?P<fixed>\d*)"
_REPEATING = (
    re.compile(_DIGITS + r"\\(?:overline|bar)\s*\{?(?P<block>\d+)\}?" + rf"{_DOTS}?"),
    re.compile(_DIGITS + r"\((?P<block>\d+)\)" + rf"{_DOTS}?"),
    re.compile(_DIGITS + r"\\dot\s*\{?(?P<block>\d)\}?(?!\}?\d*\\dot)"),
    re.compile(_DIGITS + r"\\dot\s*\{?(?P<block>\d)\}?(?P<inner>\d*)\\dot\s*\{?(?P<last>\d)\}?"),
    re.compile(_DIGITS + r"(?P<block>(?:\d[\u0304\u0305])+)"),
    re.compile(r"(?<![\w.])(?P<whole>\d*)\.(?P<fixed>\d*?)(?P<block>\d+?)(?P=block)+" + _DOTS),
)
# A longer answer is no number, and looking for repetitions in it would take long.
_MAX_CHARACTERS = 300


def as_latex(answer: str) -> str:
    r"""Returns the answer in LaTeX, or unchanged where there is nothing to do.

    Example: ``**½**`` becomes ``\frac{1}{2}``, ``1.2e3`` becomes ``1.2\cdot 10^{3}``, and
    ``\text{The answer is }0.(3)`` becomes ``\frac{1}{3}``.
    """
    text = _without_markup(answer.strip())
    text = without_thousands_separators(text)
    if len(text) <= _MAX_CHARACTERS:
        text = _repeating_decimals(text)
    text = _unicode_as_latex(text)
    text = _numbers_as_latex(text)
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
        text = re.sub(r"(?<!\.)\.$", "", text).strip()
        lead_in = _LEAD_IN.match(text)
        if lead_in is not None:
            rest = text[lead_in.end() :]
            opened = "{" in lead_in[0] and not lead_in["closed"]
            text = rest.removesuffix("}") if opened else rest
    return _TEXT_WITHOUT_WORDS.sub(r"\1", text)


def _repeating_decimals(text: str) -> str:
    for pattern in _REPEATING:
        text = pattern.sub(_fraction, text)
    return text


def _fraction(number: re.Match[str]) -> str:
    groups = number.groupdict()
    block = groups["block"] + groups.get("inner", "") + groups.get("last", "")
    block = re.sub(r"\D", "", block)
    whole, fixed = groups["whole"] or "0", groups["fixed"]
    value = Fraction(int(whole + fixed)) + Fraction(int(block), 10 ** len(block) - 1)
    value /= 10 ** len(fixed)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _unicode_as_latex(text: str) -> str:
    if text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢ]+", lambda m: f"_{{{m[0].translate(_SUBSCRIPTS)}}}", text)
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


def _numbers_as_latex(text: str) -> str:
    text = text.replace("**", "^")
    text = _SCIENTIFIC.sub(lambda m: f"{m[1]}\\cdot 10^{{{m[2].lstrip('+')}}}", text)
    text = _TIMES_TEN.sub(r"\\cdot ", text)
    text = _BARE_EXPONENT.sub(r"^{\1}", text)
    text = _PLAIN_ROOT.sub(r"\\sqrt{\1}", text)
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text)
