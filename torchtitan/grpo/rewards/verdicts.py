# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the score in the answer of a judge; a number in a form that is not understood is no score.

The numbers of an answer form phrases, such as ``8``, ``8 out of 10`` and ``7 to 8``, of which only
the first two say a score. The last phrase counts, or the first one behind the last mark, such as
``Score:``. Another number than the judge's is never made of it: ``7,5``, ``8½``, ``1 000``,
``80%``, ``7-8``, a date and a LaTeX fraction are unreadable.
"""

import re
import unicodedata
from typing import NamedTuple

from torchtitan.grpo.rewards.answer_text import with_braces

_CHARACTERS = str.maketrans("−－﹣＋⁄∕／：，．（）", "---+///:,.()")
_FRACTION = re.compile(r"\\[dtc]?frac *\{[^{}]*\}\{[^{}]*\}")
_BOLD = re.compile(r"(?<!\w)(\*\*?|__?)(?=[^\s*_])([^*_\n]{1,100})\1")
_TAG = re.compile(r"<(/?)([A-Za-z]\w{0,40})[^<>\n]{0,100}>")
# What explains a number: `8 (80%)`, `7 on a scale of 0 to 10`.
_ASIDE = re.compile(
    r"(?<=[\d分])[^\S\n]{0,3}\([^()\n]{0,100}\)|"
    r"\b[oi]n a (?:\d+-point scale|scale (?:of|from) \d+ ?(?:to|-|–) ?\d+)",
    re.IGNORECASE,
)
_MARK = re.compile(
    r"(?P<other>(?:max|maximum|possible|highest|full|perfect|best|top) )?\b(?:score|rating|verdict|grade|评分|得分|分数)"
    r"[\"'*_\])]{0,3}[^\S\n]{0,3}[:=]|\[\[(?=[^\[\]\n]{1,20}\]\])|\\boxed ?\{",
    re.IGNORECASE,
)
# Letters of languages that are written without blanks stand between words, not in them.
_WORD = re.compile(r"(?:[^\s()\[\]{}|;:=<>\u2e80-\u9fff\uac00-\ud7af\uff00-\uff0f]|(?<=\d):(?=\d))+")
_SCORE = re.compile(r"([-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?)(/\d+(?:\.\d+)?)?")
_OF = re.compile(r"/|(?:out )?of(?: a (?:possible|total of|maximum of))?", re.IGNORECASE)
_JOINS = re.compile(r"[-–—~+*×·^/,<>≤≥≈±]+|\}\{|[^\W\d]+")
_GROUP = re.compile(r"\d{3}(?!\d)|\d+/\d+")  # of `1 000`, and of `8 1/2`
_BEFORE = re.compile(r"(?:(?<![-=])[<>]|[≤≥±√^]|[:=(]\s?[-–—+]\s)\s?$")
_BEHIND = re.compile(
    r"\s{0,3}(?:\\?[%‰]|per ?cent|[百千万亿半]|分半|"
    r"(?:and (?:an? |one )?)?(?:half|quarter|third|hundred|thousand|million|dozen)\b)",
    re.IGNORECASE,
)
_IS_ENDED = re.compile(r"[.;)\]}|\"]*[^\S\n]*\n|[;)\]}|\"][^\S\n]*\S")
# What goes on behind a part of a number, and before it.
_GOES_ON = re.compile(r"[.,'’⁄]?\d|[eE][-+]?\d|[^\S\n]?[-–—~][^\S\n]?\d|\s?[½⅓⅔¼¾⅛]")
_HAS_BEGUN = re.compile(r"\d[.,'’]?$|(?<![\w)])[-–—−]$")


class _Word(NamedTuple):
    text: str
    start: int
    end: int


def written_score(answer: str, *, is_cut: bool) -> float | None:
    """Returns the score, or ``None``. An answer that ``is_cut`` must have it behind a mark."""
    text = answer if answer.isascii() else "".join(map(_understood, answer))
    text = _TAG.sub(lambda tag: "\n" if tag[1] else f"\n{tag[2]}: ", _BOLD.sub(r"\2", text))
    text = _ASIDE.sub(";", _FRACTION.sub("^0", with_braces(text)))
    marks = [mark.end() for mark in _MARK.finditer(text) if not mark["other"]]
    phrases = _phrases(text, marks[-1] if marks else 0)
    if not phrases:
        return None
    first, *others = phrases[0] if marks else phrases[-1]
    end = others[-1].end if others else first.end
    if marks:
        gap = text[marks[-1] : first.start]
        if re.search(r"\w", gap) and (is_cut or "\n" in gap):
            return None
    if is_cut and not (marks and _IS_ENDED.match(text, end)):
        return None
    if _BEFORE.search(text[max(0, first.start - 8) : first.start]) or _BEHIND.match(text, end):
        return None
    score = _SCORE.fullmatch(first.text)
    if score is None or (others and not _is_scale(text, score, first, *others)):
        return None
    return float(score[1])


def found_score(found: re.Match[str], *, is_cut: bool) -> float | None:
    """Reads what an expression of the user's has found, unless it is a part of a longer number."""
    text, (start, end) = found.string, found.span(1)
    is_part = found.end() == end and (_GOES_ON.match(text, end) or is_cut and end == len(text))
    if start < 0 or is_part or _HAS_BEGUN.search(text[max(0, start - 2) : start]):
        return None
    score = _SCORE.fullmatch(found[1].strip().translate(_CHARACTERS))
    return float(score[1]) if score is not None else None


def _understood(character: str) -> str:
    """Digits of all scripts stay; ``½``, ``²`` and ``Ⅷ`` become a form that no number has."""
    is_other = unicodedata.category(character) in ("No", "Nl")
    return "^0" if is_other else character.translate(_CHARACTERS)


def _is_scale(text: str, score: re.Match[str], first: _Word, second: _Word, *more: _Word) -> bool:
    """Whether a second number is the highest score, as in ``8 out of 10``."""
    scale = _SCORE.fullmatch(second.text)
    is_of = _OF.fullmatch(text[first.end : second.start].strip())
    return bool(is_of and scale and not more and not scale[2] and not score[2])


def _phrases(text: str, start: int) -> list[list[_Word]]:
    """The words with digits, from ``start`` on; those that say one thing together are joined."""
    phrases: list[list[_Word]] = []
    for found in _WORD.finditer(text, start):
        if not re.search(r"\d", found[0]):
            continue
        begun = found[0].lstrip("\"'“”‘’#*_$,\\/")
        word = _Word(begun.rstrip("\"'“”‘’*_$,.!?\\、/"), found.end() - len(begun), 0)
        word = word._replace(end=word.start + len(word.text))
        between = text[phrases[-1][-1].end : word.start] if phrases else "\n"
        core = between.strip()
        is_joined = _JOINS.fullmatch(core) or _OF.fullmatch(core) or between.startswith(" :")
        is_joined = is_joined or (not core and _GROUP.match(word.text))
        # Of `3 + 4 = 7` the sum counts, while `8/10 = 0.8` says one score in two ways.
        is_joined = is_joined or (core == "=" and _OF.search(text, phrases[-1][0].start, word.start))
        if "\n" not in between and is_joined:
            phrases[-1].append(word)
        else:
            phrases.append([word])
    return phrases
