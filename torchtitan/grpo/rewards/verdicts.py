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
# Quotes and Markdown, which say nothing unless they stand within a word or a number.
_DECORATION = re.compile(r"(?<!\w)[*_`\"'“”$]+|[*_`\"'“”$]+(?!\w)|\\[()\[\]]|\\text\w{0,2}(?=\{)")
_TAGS = [(re.compile(r"</\w{1,20}>"), "\n"), (re.compile(r"<([A-Za-z]\w{0,20})>"), r"\1: "),
         (re.compile(r"<(\d[\d.]{0,20})>"), r"\1")]  # fmt: skip

# `Max score: 10` and `Verdict: right` are no marks.
_MARK = re.compile(
    r"(?P<other>(?:max|maximum|possible|highest|full|perfect|best|top) )?(?<![\w/])"
    r"(?:scores?|评分|得分|(?:rating|verdict|grade)(?!\W{0,4}[:=>]\W{0,4}[^\W\d_]))[\])]? ?[:=>]{1,2}"
    r"|\[\[(?=[^\[\]\n]{1,20}\]\])|\\boxed ?\{",
    re.IGNORECASE,
)
_NUMBER = r"\d++(?:\.\d++)?+"
_UNIT = r"(?: {1,3}(?:points?|stars?|marks?|pts)\b| ?分(?![半钟之]))?"
_BEST = rf"(?: ?\\?/ ?| (?:out )?of (?:the |an? )?(?:possible )?(?:max\.? )?|(?:[,;]| -)? max:? ){_NUMBER}{_UNIT}"
_WITHIN = rf"(?:scale|of|from|to|out|max|满分|[-–:/ ]|{_NUMBER} ?[%分]?)"
_ASIDE = rf"(?: ?\({_WITHIN}{{1,12}}\)|, ?{_NUMBER} ?%| on a scale {_WITHIN}{{1,8}})"
_SCORE = re.compile(
    rf"[ (\[{{]*+(?P<score>[-+]?(?:{_NUMBER}|\.\d++)(?:e[-+]?\d{{1,3}}+)?+)"
    rf"{_UNIT}(?:[)\]}}]?{_BEST})?{_ASIDE}{{0,2}}",
    re.IGNORECASE,
)
# What may follow a score: the end of brackets, a further key of JSON, the end of the line, or a sentence
# without numbers. Where an answer was cut, the number may go on where only the text has ended.
_CLOSED = re.compile(r"[ )]*(?:\]\]|\}| ?, ?\w{1,60} ?:[^\n]*\})(?!\s*\\?(?:[%/^\d]|per ?cent))")
_ENDED = re.compile(r"[ )\]}|>]*+(?:[.;!。][ )\]}]*+)?(?P<open>\n|\Z)")
_SENTENCE = re.compile(
    r"[ )\]}]*+(?:[.;!。]\s*+[^\W\d]|,? ?(?:since|because)\b)[^\d\n]*+(?P<open>\n|\Z)",
    re.IGNORECASE,
)
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
    for tag, plain in _TAGS:
        text = tag.sub(plain, text)
    text = _DECORATION.sub("", text)
    marks = list(_MARK.finditer(text))
    ends = [mark.end() for mark in marks if not mark["other"]]
    if not ends:
        return None if marks or is_cut else _read(text.strip().rpartition("\n")[2], 0, is_cut)
    below = re.compile(r"\s*\n\s*").match(text, ends[-1])
    return _read(text, below.end() if below else ends[-1], is_cut, may_go_on=below is None)


def _read(text: str, start: int, is_cut: bool, may_go_on: bool = False) -> float | None:
    """Reads the score that begins here; a sentence behind it ``may_go_on`` in its line."""
    score = _SCORE.match(text, start)
    if score is None:
        return None
    if _CLOSED.match(text, score.end()) is None:
        ended = _ENDED.match(text, score.end())
        ended = ended or (_SENTENCE.match(text, score.end()) if may_go_on else None)
        if ended is None or (is_cut and not ended["open"]):
            return None
    return float(score["score"])


def found_score(found: re.Match[str], *, is_cut: bool) -> float | None:
    """Reads what an expression of the user's has found, unless it is a part of a longer number."""
    text, (start, end) = found.string, found.span(1)
    before, rest = _understood(text[max(0, start - 8) : start]), _understood(text[end : end + 200])
    may_go_on = is_cut and not (_CLOSED.match(rest) or re.match(r"[^\w\n]*\n", rest))
    if text[end : found.end()].strip(" .,"):  # the expression says what follows
        may_go_on = is_cut and found.end() == len(text) and text[-1].isalnum()
    elif _GOES_ON.match(rest):
        return None
    is_group = re.fullmatch(r"\d [0-9]{3}", before[-2:] + (found[1] or ""))
    if start < 0 or is_group or may_go_on or _HAS_BEGUN.search(before):
        return None
    score = _SCORE.fullmatch(_understood(found[1].strip()).rstrip("."))
    return float(score["score"]) if score is not None else None


def _understood(text: str) -> str:
    """One blank for several; ``½``, ``²`` and ``Ⅷ`` become a form that no number has."""
    text = re.sub(r"(?<=\d)[\u200b-\u200d\u2060\ufeff]+(?=\d)", "^", text).translate(_CHARACTERS)
    text = re.sub(r"[^\S\n]+", " ", text)
    return "".join("^0" if unicodedata.category(c) in ("No", "Nl") else c for c in text)
