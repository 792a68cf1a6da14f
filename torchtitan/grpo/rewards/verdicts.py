# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the score in a judge's answer. A number in a form that is not understood is no score.

Numbers form phrases, such as ``8``, ``8 out of 10`` and ``7 to 8``, of which the first two say a
score. The last phrase counts, or the first one behind the last mark, such as ``Score:``. No other
number is made of ``7,5``, ``8½``, ``1 000``, ``80%``, ``7-8``, a date or a LaTeX fraction.
"""

import re
import unicodedata

from torchtitan.grpo.rewards.answer_text import with_braces

_CHARACTERS = str.maketrans("−－﹣＋⁄∕／：，．（）", "---+///:,.()")
# What explains a number: `8 (80%)`, `7 on a scale of 0 to 10`. And fractions, which are unreadable.
_ASIDE = re.compile(
    r"(?<=[\d分])[^\S\n]{0,3}\([^()\n]{0,100}\)|\b[oi]n a (?:\d+-point scale|scale (?:of|from) \d+ ?(?:to|-|–) ?\d+)",
    re.IGNORECASE,
)
_FRACTION = re.compile(r"\\[dtc]?frac *\{[^{}]*\}\{[^{}]*\}")
_MARK = re.compile(
    r"(?P<other>(?:max|maximum|possible|highest|full|perfect|best|top) )?(?<![\w/])(?:score|rating|verdict|grade|评分|得分)"
    r"[\"'*_\])]{0,3}[^\S\n]{0,3}[:=>]|\[\[(?=[^\[\]\n]{1,20}\]\])|\\boxed ?\{",
    re.IGNORECASE,
)
# Letters of languages that are written without blanks stand between words, not in them.
_APART = r"\s()\[\]{}|;:=<>.,!?\"'“”‘’*$#\\/\u2e80-\u9fff\uac00-\ud7af\uff00-\uff0f"
_LETTER = rf"(?:[^{_APART}]|(?<=\w)[.,'’:/](?=\w)|(?<!\.)\.(?=\d))"
_WORD = rf"(?<![^{_APART}])(?={_LETTER}*?\d){_LETTER}++"
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
_OF = r"\s*(?:\**/\**|(?:out )?of(?: a (?:possible|total of|maximum of))?)\s*"
_JOIN = r"[^\S\n]*(?:[-–—~+*×·^/,<>≤≥≈±]+|\}\{|\.{2,}(?=\d)|[^\W\d]+|(?<=\s):|=(?=\s?[01]?\.\d))[^\S\n]*|[^\S\n]+(?=\d{3}(?!\d)|\d+/\d)"
_PHRASE = re.compile(rf"{_WORD}(?:(?:{_OF}|{_JOIN}){_WORD})*+", re.IGNORECASE)
_SCORE = re.compile(rf"({_NUMBER})(?:{_OF}{_NUMBER})?", re.IGNORECASE)
_BEFORE = re.compile(r"(?:(?<![-=\w\"'])>|<|[≤≥±√^]|[:=(]\s?[-–—+±]\s)\s?$")
_BEHIND = re.compile(
    r"\s{0,3}(?:\\?[%‰]|per ?cent|[百千万亿半]|分半|(?:and (?:an? |one )?)?(?:half|quarter|third|hundred|thousand|million)\b)",
    re.IGNORECASE,
)
_IS_ENDED = re.compile(r"[.;)\]}|\"*]*[^\S\n]*\n|[;)\]}|\"<][^\S\n]*\S")
_GOES_ON = re.compile(r"[.,'’⁄]?\d|[eE][-+]?\d|[^\S\n]?[-–—~][^\S\n]?\d|\s?[½⅓⅔¼¾⅛]")
_HAS_BEGUN = re.compile(r"\d[.,'’]?$|(?<![\w)])[-–—−]$")


def written_score(answer: str, *, is_cut: bool) -> float | None:
    """Returns the score, or ``None``. An answer that ``is_cut`` must have it behind a mark."""
    text = answer if answer.isascii() else "".join(map(_understood, answer))
    text = _ASIDE.sub(";", _FRACTION.sub("^0", with_braces(text)))
    marks = [mark.end() for mark in _MARK.finditer(text) if not mark["other"]]
    phrases = list(_PHRASE.finditer(text, marks[-1] if marks else 0))
    if not phrases or (is_cut and not marks):
        return None
    phrase = phrases[0 if marks else -1]
    start, end = phrase.span()
    gap = text[marks[-1] : start] if marks else ""
    is_apart = re.search(r"\w", gap) is not None and (is_cut or "\n" in gap)
    if is_apart or (is_cut and not _IS_ENDED.match(text, end)):
        return None
    score = _SCORE.fullmatch(phrase[0])
    if _BEFORE.search(text[max(0, start - 8) : start]) or _BEHIND.match(text, end) or not score:
        return None
    return float(score[1])


def found_score(found: re.Match[str], *, is_cut: bool) -> float | None:
    """Reads what an expression of the user's has found, unless it is a part of a longer number."""
    text, (start, end) = found.string, found.span(1)
    is_part = found.end() == end and (_GOES_ON.match(text, end) or (is_cut and end == len(text)))
    if start < 0 or is_part or _HAS_BEGUN.search(text[max(0, start - 2) : start]):
        return None
    score = _SCORE.fullmatch(found[1].strip().translate(_CHARACTERS))
    return float(score[1]) if score is not None else None


def _understood(character: str) -> str:
    """Digits of all scripts stay; ``½``, ``²`` and ``Ⅷ`` become a form that no number has."""
    is_other = unicodedata.category(character) in ("No", "Nl")
    return "^0" if is_other else character.translate(_CHARACTERS)
