# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the score in a judge's answer. What is not written in a form that is known is no score.

The score stands behind the last mark, such as ``Score:``, or, without any mark, alone in the last
line. It may have a unit, the best score and an aside, as in ``8 points out of 10 (80%)``, and ends
its line or its sentence. All expressions take time in proportion to the text's length.
"""

import re
import unicodedata

_CHARACTERS = str.maketrans("−－﹣＋⁄∕／：，．٫（）％’", "---+///:,.,()%'", "\u200b\u2060\ufeff")

_NUMBER = r"\d++(?:\.\d++)?+"
_OPENING = r"(?:[ *_`\"'“$(\[]|\\[(\[]|\\text\w{0,2}\{|<(?=[^<>\n]{1,20}>))*+"
_CLOSING = r"(?:[*_`\"'”$)\]}|>]|\\[)\]])"
# `Score: 8`, `**Score**: 8`, `<score>8`, `"score": 8`. `Max score: 10` is none, neither is `Verdict: right`.
_MARK = re.compile(
    r"(?P<other>(?:max|maximum|possible|highest|full|perfect|best|top) )?(?<![\w/])"
    r"(?:scores?|评分|得分|(?:rating|verdict|grade)(?![\"'*_\])]{0,3} ?[:=>]{1,2}[\s\"'*_]{0,4}[^\W\d_]))"
    r"[\"'*_\])]{0,3} ?[:=>]{1,2}|\[\[(?=[^\[\]\n]{1,20}\]\])|\\boxed ?\{",
    re.IGNORECASE,
)
_UNIT = r"(?: {1,3}(?:points?|stars?|marks?|pts)\b| ?分(?![半钟之]))?"
_BEST = (
    r"(?: ?\\?/ ?| (?:out )?of (?:the |an? )?(?:possible )?(?:max\.? )?|(?:[,;]| -)? max:? )[*_]{0,3}"
    + _NUMBER
)
_WITHIN = rf"(?:scale|of|from|to|out|max|满分|[-–:/ ]|{_NUMBER} ?[%分]?)"
_ASIDE = rf"(?: ?\({_WITHIN}{{1,12}}\)|, ?{_NUMBER} ?%| on a scale {_WITHIN}{{1,8}})"
_SCORE = (
    rf"(?P<score>[-+]?(?:{_NUMBER}|\.\d++)(?:e[-+]?\d{{1,3}}+)?+)"
    rf"{_UNIT}(?:{_CLOSING}{{0,4}}{_BEST}{_UNIT})?{_ASIDE}{{0,2}}"
)
# Where an answer was cut, what has no end but that of the text may go on with a part of the number.
_END = (
    rf"(?:{_CLOSING}*?(?:\]\]|\}}|</)(?!\s*\\?(?:[%/^\d]|per ?cent))|[\"']?\s*,\s*[\"'][^\"'\n]{{1,60}}[\"']\s*:"
    rf"|(?:{_CLOSING}| )*+(?:[.;!。](?:{_CLOSING}| )*+)?(?P<open>\n|\Z))"
)
_SENTENCE = (
    rf"(?:{_CLOSING}*+(?: ?[.;!。]{_CLOSING}*+\s*+[^\W\d]|,? (?:since|because)\b)"
    r"[^\d\n]*+(?P<cut>\n|\Z))"
)
_MARKED = re.compile(rf"{_OPENING}{_SCORE}(?:{_END}|{_SENTENCE})", re.IGNORECASE)
_BELOW_MARK = re.compile(rf"{_OPENING}\n\s*+{_OPENING}{_SCORE}{_END}", re.IGNORECASE)
_ALONE = re.compile(rf"{_OPENING}{_SCORE}{_END}", re.IGNORECASE)
_BARE = re.compile(_SCORE, re.IGNORECASE)
# A number goes on behind, or has begun before, what an expression of the user's has found.
_GOES_ON = re.compile(
    r" ?[-–—~*×·^_+]+ ?\{?\d|(?:[.,'/:]|\{,\}|\\[,:; ])?(?<!/)\d|\\?\^|e[-+]?\d"
    r"| (?:\d{3}(?!\d)|\d+/\d|(?:to|or) \d|\^|and (?:an?|1) )",
    re.IGNORECASE,
)
_HAS_BEGUN = re.compile(r"\d(?:[.,'_/]| ?[-–—~*^] ?|e[-+]?)?$|(?<![\w)])[-–—]$", re.IGNORECASE)


def written_score(answer: str, *, is_cut: bool) -> float | None:
    """Returns the score, or ``None``. An answer that ``is_cut`` must have it behind a mark."""
    text = _understood(answer)
    marks = list(_MARK.finditer(text))
    scores = [mark.end() for mark in marks if not mark["other"]]
    if scores:
        found = _MARKED.match(text, scores[-1]) or _BELOW_MARK.match(text, scores[-1])
    elif marks or is_cut:
        return None
    else:
        found = _ALONE.fullmatch(text.strip().rpartition("\n")[2].strip())
    if found is None:
        return None
    is_open = "" in (found["open"], found.groupdict().get("cut"))
    return None if is_cut and is_open else float(found["score"])


def found_score(found: re.Match[str], *, is_cut: bool) -> float | None:
    """Reads what an expression of the user's has found, unless it is a part of a longer number."""
    text, (start, end) = found.string, found.span(1)
    before, rest = _understood(text[max(0, start - 8) : start]), _understood(text[end : end + 200])
    is_open = _GOES_ON.match(rest) or (is_cut and not re.match(_END, rest + "\0"))
    if text[end : found.end()].strip(" .,"):  # the expression says what follows
        is_open = is_cut and found.end() == len(text) and text[-1].isalnum()
    is_group = re.fullmatch(r"\d [0-9]{3}", before[-2:] + (found[1] or ""))
    if start < 0 or is_group or is_open or _HAS_BEGUN.search(before):
        return None
    score = _BARE.fullmatch(_understood(found[1].strip()).rstrip("."))
    return float(score["score"]) if score is not None else None


def _understood(text: str) -> str:
    """One blank for several; ``½``, ``²`` and ``Ⅷ`` become a form that no number has."""
    text = re.sub(r"(?<=\d)[\u200b-\u200d\u2060\ufeff]+(?=\d)", "^", text).translate(_CHARACTERS)
    text = re.sub(r"[^\S\n]+", " ", text)
    return "".join("^0" if unicodedata.category(c) in ("No", "Nl") else c for c in text)
