# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Writes an answer in the LaTeX that math-verify reads, without a change of its value.

This covers what models and data sets write and math-verify does not read: Markdown, Unicode, prose
before the answer, thousands separators, scientific notation with ``e``, repeating decimals, mixed
numbers without LaTeX, and arguments without braces.

A comma separates thousands in ``1,234`` and elements in ``(1,234)``, ``3,4`` and ``1,23``. It is
removed only where

- the number is whole: one to three digits of which the first is not 0, then groups of exactly
  three digits with the same separator, then perhaps a decimal fraction;
- no other comma touches the number, as in ``1,234,-5``;
- the number is in no tuple, interval or set, unless the elements there are separated by ``;`` or
  by a comma with white space, as in ``(1,234, 5)``.

``{,}``, ``\,``, a thin space and their like never separate elements.
"""

import itertools
import re
import unicodedata
from fractions import Fraction

_FONTS = "text textbf textit textrm textnormal mathrm mathbf mathit mbox operatorname"
TEXT_COMMAND = rf"\\(?:{'|'.join(_FONTS.split())})"
TEXT = re.compile(TEXT_COMMAND + r"\s*\{([^{}]*)\}")

# Sizes and fonts, which change no value. Braces around what they apply to stay.
_STYLES = (
    "bold boldsymbol bm pmb em emph underline ensuremath hbox texttt textsf textsc textup textsl mathsf mathtt "
    "mathnormal bf it rm sf sl tt bfseries itshape rmfamily sffamily slshape ttfamily tiny small normalsize large "
    "Large LARGE huge Huge displaystyle textstyle scriptstyle scriptscriptstyle"
)
_STYLE = re.compile(
    rf"\\(?:{'|'.join(_STYLES.split())})(?![A-Za-z])|{TEXT_COMMAND}(?![A-Za-z]|\s*\{{)|"
    r"\\(?:text)?color(?:box)?\s*+(?:\[[^\[\]]*\]\s*+)?\{[^{}]*\}"
)
_WORDS_IN_FONT = re.compile(r"\{\s*\\(?:bf|it|rm|sf|sl|tt|em)(?=[\s{}][A-Za-z\s]+\})")

_MARKDOWN = re.compile(r"(\*{1,3}|_{1,3}|`+)(?=\S)(.*\S)\1", re.DOTALL)
_BOLD = re.compile(r"(?<![\w)}*])(\*\*|__)(?=[^\s*])([^*]*[^\s*])\1(?![\w*])")
_DELIMITERS = re.compile(r"\$\$(.+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_BRACED = re.compile(rf"(?:{TEXT_COMMAND}\s*)?\{{([^{{}}]*)\}}")
_TEXT_WITHOUT_WORDS = re.compile(TEXT_COMMAND + r"\s*\{([^{}A-Za-z]*)\}")
_ABOUT = re.compile(r"(?:\\approx|approximately|about)\s*(?=[-\d\\$.])", re.IGNORECASE)
_LEAD_IN = re.compile(
    r"(?P<opened>\\text\s*\{)?\s*(?:(?:so|thus|hence|therefore|then|finally),?\s+)?(?:the|my|our|final)?\s*"
    r"(?:(?:final|correct)\s+)?(?:answer|result|solution|value|it)\b[^{}=:\d\\]{0,40}?"
    r"(?:\bis\b\s*:?|\bequals\b|:|=)\s*(?P<closed>\}?)\s*(?=\S)",
    re.IGNORECASE,
)

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
_SPACES = re.compile(r"(?:\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\s)+")
_MATRIX = re.compile(r"\\begin|\\\\")

_SYMBOLS = dict.fromkeys("‐‑‒–—―−﹘﹣－⁃", "-") | dict.fromkeys("°º˚∘", "^\\circ ")
_SYMBOLS |= dict.fromkeys("·⋅∙•", "\\cdot ") | dict.fromkeys("⁄∕", "/")
_SYMBOLS |= dict.fromkeys("∅⌀", "\\emptyset ")
_NAMED_SYMBOLS = """
× times, ✕ times, ÷ div, ± pm, ∓ mp, ∞ infty, ≤ le, ⩽ le, ≥ ge, ⩾ ge, ≠ ne, ≈ approx, ∪ cup, ∩ cap, ∈ in, ∖ setminus,
∠ angle, ℝ mathbb{R}, ℤ mathbb{Z}, ℚ mathbb{Q}, ℕ mathbb{N}, ℂ mathbb{C}
"""
_SYMBOLS |= {s.split()[0]: f"\\{s.split()[1]} " for s in _NAMED_SYMBOLS.split(",")}
_ROOTS = {"√": "", "∛": "[3]", "∜": "[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")

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
_DIGITS = re.compile(rf"(?<![\w.,^])\d++(?:(?:{_SEPARATOR}|\.)\d++)*+(?!,\S)")
_GROUPED = re.compile(rf"[1-9]\d{{0,2}}({_SEPARATOR})\d{{3}}(?:\1\d{{3}})*(?:\.\d+)?")
# A brace behind a letter or one of these signs encloses an argument of LaTeX, as in \frac{1}{2} and 2^{10}.
_BRACKET = re.compile(r"(?P<argument>(?<=[A-Za-z}\]^_])\{)|[(\[{]|(?P<closing>[)\]}])")
_UP_TO_CLOSING = re.compile(r"[^)\]}]*")

_TOKEN = re.compile(r"\\[A-Za-z]+|\\?.", re.DOTALL)
_BLANK = re.compile(r"[\s~]")
_FRACTIONS = [f"\\{prefix}frac" for prefix in ("", "d", "t", "c", "s", "x", "nice")]
_NUM_ARGUMENTS = dict.fromkeys([*_FRACTIONS, "\\binom", "\\dbinom", "\\tbinom"], 2)
_NUM_ARGUMENTS |= {"\\sqrt": 1, "\\mathbb": 1}
_BETWEEN = {"\\over": "\\frac", "\\choose": "\\binom"}


def as_latex(answer: str) -> str:
    r"""Returns the answer in LaTeX, or unchanged where there is nothing to do.

    Example: ``**½**`` becomes ``\frac{1}{2}``, and ``1.2e3`` becomes ``1.2\cdot 10^{3}``.
    """
    text = _STYLE.sub(" ", _WORDS_IN_FONT.sub(r"\\text{", answer))
    text = _without_markup(text.strip())
    if len(text) <= _MAX_CHARACTERS:
        text = without_thousands_separators(text)
        for pattern in _REPEATING:
            text = pattern.sub(_fraction, text)
    text = _unicode_as_latex(text)
    for pattern, latex in _PLAIN_TEXT:
        text = pattern.sub(latex, text)
    text = with_braces(text)
    return text if _MATRIX.search(text) else _SPACES.sub(" ", text).strip()


def _without_markup(text: str) -> str:
    """Removes Markdown, delimiters of formulas, prose before the answer, and the full stop."""
    before = None
    while text != before:
        before = text
        for pattern in (_MARKDOWN, _DELIMITERS, _BRACED):
            if (whole := pattern.fullmatch(text)) is not None:
                text = next(part for part in reversed(whole.groups()) if part is not None).strip()
        text = _BOLD.sub(r"\2", re.sub(r"(?<!\.)\.$", "", text)).strip()
        if (lead_in := _ABOUT.match(text) or _LEAD_IN.match(text)) is not None:
            text = text[lead_in.end() :]
            found = lead_in.groupdict()
            if found.get("opened") and not found["closed"]:
                text = text.removesuffix("}")
    return _TEXT_WITHOUT_WORDS.sub(r"\1", text)


def without_thousands_separators(text: str) -> str:
    return _DIGITS.sub(_ungrouped, text)


def _ungrouped(digits: re.Match[str]) -> str:
    grouped = _GROUPED.fullmatch(digits[0])
    if grouped is None or (grouped[1] == "," and _may_be_elements(digits)):
        return digits[0]
    return digits[0].replace(grouped[1], "")


def _may_be_elements(digits: re.Match[str]) -> bool:
    """Whether the digits are in brackets in which only commas without white space separate elements."""
    text, opened = digits.string, list[re.Match[str]]()
    for bracket in _BRACKET.finditer(text, 0, digits.start()):
        if not bracket["closing"]:
            opened.append(bracket)
        elif opened:
            opened.pop()
    starts = [bracket.end() for bracket in opened if not bracket["argument"]]
    if not starts:
        return False
    after = _UP_TO_CLOSING.match(text, digits.end())
    return not re.search(r";|,\s", text[starts[-1] : after.end() if after else None])


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
    parts = []
    for form, characters in itertools.groupby(text, _form):
        if form in ("<super>", "<sub>"):
            level = unicodedata.normalize("NFKC", "".join(characters)).replace("−", "-")
            parts.append(f"{'^' if form == '<super>' else '_'}{{{level}}}")
        else:
            parts += map(_character_as_latex, characters)
    return _ROOT.sub(
        lambda m: f"\\sqrt{_ROOTS[m[1]]}{{{next(part for part in m.groups()[1:] if part)}}}",
        "".join(parts),
    )


def _form(character: str) -> str:
    """Returns the kind of a character's Unicode decomposition, such as ``<super>`` for ``²``."""
    if character in _SYMBOLS:
        return ""
    return unicodedata.decomposition(character).partition(" ")[0]


def _character_as_latex(character: str) -> str:
    if character.isascii() or character in _ROOTS:
        return character
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    plain = unicodedata.normalize("NFKC", character)
    if unicodedata.category(character) == "Cf":  # prints nothing
        return ""
    if "\u2044" in plain:  # a vulgar fraction
        above, below = plain.split("\u2044")
        return f"\\frac{{{above}}}{{{below}}}" if below else f"\\frac{{{above}}}"
    greek = re.match(r"GREEK (SMALL|CAPITAL) LETTER (\w+)$", unicodedata.name(plain[:1], ""))
    if greek is not None:
        letter = greek[2].lower().replace("lamda", "lambda")
        return f"\\{letter if greek[1] == 'SMALL' else letter.capitalize()} "
    return "".join(_SYMBOLS.get(one, one) for one in plain)


def with_braces(text: str) -> str:
    r"""Puts braces around arguments: ``\frac1\sqrt2`` is ``\frac{1}{\sqrt{2}}``.

    These are the arguments of fractions, binomials and roots, the bases of logarithms, and indices and
    exponents that are commands with arguments. ``1 \over 2`` becomes a fraction too.
    """
    try:
        return _Reader(text).read_up_to("")
    except RecursionError:  # nested deeper than any answer that can be compared
        return text


class _Reader:
    """Reads LaTeX token by token. ``_tokens`` holds the tokens still to be read, the next one last."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)[::-1]

    def read_up_to(self, closing: str) -> str:
        """Reads the tokens up to ``closing`` or the end, and returns them with braces around arguments."""
        parts: list[str] = []
        before = ""
        while self._tokens:
            token = self._tokens.pop()
            if token == closing:
                break
            if token in _BETWEEN:
                below = self.read_up_to(closing)
                return f"{_BETWEEN[token]}{{{''.join(parts)}}}{{{below}}}"
            parts.append(self._read_item(token, before))
            before = before if _BLANK.fullmatch(token) else token
        return "".join(parts)

    def _read_item(self, token: str, before: str) -> str:
        """Reads the arguments of ``token``, and returns it with them. ``before`` is the preceding token."""
        if token == "{":
            return f"{{{self.read_up_to('}')}}}"
        number = _NUM_ARGUMENTS.get(token, 0)
        if token in ("_", "^"):
            number = int(before == "\\log" or self._next().startswith("\\"))
        if token == "\\sqrt" and self._next() == "[":
            self._tokens.pop()
            token += f"[{self.read_up_to(']')}]"
        if token in _FRACTIONS:
            token = "\\frac"
        return token + "".join(self._read_argument() for _ in range(number))

    def _read_argument(self) -> str:
        if self._next() in ("", "}"):
            return ""
        argument = self._read_item(self._tokens.pop(), "")
        return argument if argument.startswith("{") else f"{{{argument}}}"

    def _next(self) -> str:
        """Skips blanks and returns the next token without reading it, or an empty string at the end."""
        while self._tokens and _BLANK.fullmatch(self._tokens[-1]):
            self._tokens.pop()
        return self._tokens[-1] if self._tokens else ""
