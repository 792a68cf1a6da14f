# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the score in a judge's answer. What is not written in a form that is known is no score.

The score stands right behind the last mark, such as ``Score:``, or is the last number of an answer
without marks, behind what introduces a score, such as ``I give it``. It is a number, perhaps with a
unit, the best score and asides (``8 points out of 10 (80%)``), and ends its clause. Each expression
takes time in proportion to the text's length.
"""

import re
import unicodedata
from collections import deque

_CHARACTERS = str.maketrans(
    "−－﹣＋⁄∕／：，．（）％﹪٪’", "---+///:,.()%%%'", "\u200b\u200c\u200d\u2060\ufeff\ufe0f"
)
_MARK = re.compile(
    r"(?P<other>(?:max|maximum|possible|highest|full|perfect|best|top) )?(?<![\w/])"
    r"(?:scores?|评分|得分|(?P<weak>rating|verdict|grade))[\"'*_\])]{0,3}"
    r"[^\S\n]{0,3}(?:=>|[:=>])(?:(?P<word>(?=[\s\"'*_]{0,4}[^\W\d_]))|)|\[\[(?=[^\[\]\n]{1,20}\]\])|\\boxed ?\{",
    re.IGNORECASE,
)
_OPEN = r"(?:[^\S\n]|[*_`\"'“$(\[]|\\[(\[]|\\text\w{0,2}\{|<(?=[^<>\n]{1,20}>))"
_CLOSE = r"(?:[*_`\"'”$)\]}|>]|\\[)\]])"
_UNIT = r"(?:[^\S\n]{1,3}(?:points?|stars?|marks?|pts)\b|[^\S\n]?分(?![半钟之]))"
_NUMBER = r"[-+]?(?:\d++(?:\.\d++)?+|\.\d++)(?:[eE][-+]?\d{1,3}+)?+"
_N = r"\d++(?:\.\d++)?+"
_RANGE = rf"{_N} ?(?:-|–|to|and) ?{_N}"
_OF = r"(?:out )?of(?: (?:the|an?))?(?: (?:possible|total|max\.?|maximum)(?: of)?)?"
_SCALE = (
    rf"(?:[oi]n )?(?:(?:an?|the) )?(?:scale:?(?: (?:of|from|between))? (?:{_RANGE}|{_N})|{_N}-point scale"
    rf"|{_RANGE} scale)|(?:max(?:imum)?\.?|满分):?(?: of| is)? ?{_N}"
)
_PERCENT = rf"=?{_N} ?(?:%|per ?cent)"
_BEST = rf"{_N} (?:is|=) (?:the )?(?:best|max(?:imum)?|highest)"
_ASIDE = (
    rf"(?:[^\S\n]{{0,3}}\((?:{_SCALE}|{_OF} {_N}|{_PERCENT}|{_RANGE}|{_N}/{_N}|{_BEST}){_UNIT}?\)"
    rf"|(?:[,;]|[^\S\n]-)?[^\S\n]{{1,3}}(?:{_SCALE}){_UNIT}?|[,;] ?{_PERCENT})"
)
_SCORE = re.compile(
    rf"(?P<score>{_NUMBER}){_UNIT}?(?:{_CLOSE}{{0,4}}[^\S\n]{{0,3}}(?:\\?/|{_OF}(?=\s))[^\S\n]{{0,3}}[*_]{{0,3}}{_N}{_UNIT}?)?"
    rf"{_ASIDE}{{0,3}}",
    re.IGNORECASE,
)
_LEAD = re.compile(rf"{_OPEN}*+(?:\n(?:\n|{_OPEN})*+)?")
# Only of these does an answer that was cut have no other continuation, if `open` is not empty.
_END = re.compile(
    rf"{_CLOSE}*?(?:\]\](?=[\s.,;!?)*$]|\Z)|\}}(?=[\s.,;!?)*$]))(?!\s*(?:\\?[%/^]|per ?cent|\d))"
    rf"|(?:{_CLOSE}|[^\S\n])*+(?:[.;!。]{_CLOSE}*+[^\S\n]*+)?(?P<open>\n|\Z)"
    r"|[^\S\n]*+<[/|]|[\"']?\s*,\s*[\"'][^\"'\n]{1,60}[\"']\s*:",
    re.IGNORECASE,
)
# Another sentence or a reason in the line, without a number.
_SENTENCE = re.compile(
    rf"{_CLOSE}*+(?:[^\S\n]?[.;!。]{_CLOSE}*+\s*+[^\W\d]|,? (?:since|because)\b)[^\d\n]*+(?P<open>\n|\Z)"
)
_INTRODUCED = re.compile(
    r"(?:\n(?:[-*•#|]+[^\S\n]+)*|[^\s\d]:|\d:\s|[-=]>|<\w{1,20}>|[-+*×][^\S\n]?\d+[^\S\n]?=|[A-Za-z] ?=|(?:\b\d ){3}"
    r"|\b(?:(?:score|rating|grade|verdict|it|this|that|answer|result)(?: (?:is|of|was|would be|should be))"
    r"|(?:give|rate|assign|award|deserve|earn|get|say|receive)[sd]?(?: (?:it|this|that|him|her|them|the \w+))?)(?: an?)?"
    r"(?: (?:score|rating|grade)(?: of)?)?\s|\b(?:then|so|now|step|scored|rated) |[给得为是打]|[得评]分)"
    rf"{_OPEN}*$",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"(?:\b(?:max\w*|possible|highest|full|perfect|best|top|limit|scale|not?|never|cannot)\b|n't|n’t|满分|总分|不)"
    r"[^.,;!\n]*$|:\s?\d[^\n]*[,;|][^\n,;|]*:\W*$",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"[^\S\n]?(?:[-–—~*×·^_+]|\\(?:cdot|times)\b)+[^\S\n]?\{?\d|(?:[.,'/:]|\{,\}|\\[,:; ])?(?<!/)\d|\\?\^|e[-+]?\d"
    r"|[^\S\n](?:\d{3}(?!\d)|\d+/\d|(?:to|or) \d|\^)",
    re.IGNORECASE,
)
_HAS_BEGUN = re.compile(r"\d(?:[.,'_]|[^\S\n]?[-–—~*^][^\S\n]?|e[-+]?)?$|(?<![\w)])[-–—]$", re.I)


def written_score(answer: str, *, is_cut: bool) -> float | None:
    """Returns the score, or ``None``. An answer that ``is_cut`` must have it behind a mark."""
    text = re.sub(r"[^\S\n]+", " ", "\n" + _understood(answer))
    marks = list(_MARK.finditer(text))
    if marks:
        # `Grade: B` is no score, but `Score: 8` before it is.
        numeric = [mark for mark in marks if not mark["weak"] or mark["word"] is None] or marks
        mark = next((mark for mark in reversed(numeric) if not mark["other"]), None)
        lead = _LEAD.match(text, mark.end()) if mark is not None else None
        score = _SCORE.match(text, lead.end()) if lead is not None else None
    else:
        score = next(iter(deque(() if is_cut else _SCORE.finditer(text), maxlen=1)), None)
        before = text[max(0, score.start() - 80) : score.start()] if score is not None else ""
        if not _INTRODUCED.search(before) or _REFUSED.search(before):
            return None
    if score is None:
        return None
    end = _END.match(text, score.end())
    if end is None and text[text.rfind("\n", 0, score.start()) : score.start()].strip(" \n*_#>-"):
        end = _SENTENCE.match(text, score.end())  # elsewhere it may be the number of an item
    if end is None or (is_cut and end["open"] == ""):
        return None
    return float(score["score"])


def found_score(found: re.Match[str], *, is_cut: bool) -> float | None:
    """Reads what an expression of the user's has found, unless it is a part of a longer number."""
    text, (start, end) = found.string, found.span(1)
    if start < 0:
        return None
    before, rest = _understood(text[max(0, start - 8) : start]), _understood(text[end : end + 200])
    is_group = re.search(r"\d[^\S\n]$", before) and re.match(r"\d{3}(?!\d)", found[1])
    if is_group or _HAS_BEGUN.search(before):
        return None
    if not text[end : found.end()].strip(" .,"):  # the expression does not say what follows
        ended = _END.match(rest) if is_cut else None
        if _GOES_ON.match(rest) or (is_cut and (ended is None or ended["open"] == "")):
            return None
    elif is_cut and found.end() == len(text) and text[-1].isalnum():
        return None
    score = _SCORE.fullmatch(_understood(found[1].strip()))
    return float(score["score"]) if score is not None else None


def _understood(text: str) -> str:
    """Digits of all scripts stay; ``½``, ``²`` and ``Ⅷ`` become a form that no number has."""
    if text.isascii():
        return text
    text = re.sub(r"(?<=\d)[\u200b\u200c\u200d\u2060\ufeff](?=\d)", "^", text).translate(_CHARACTERS)
    return "".join("^0" if unicodedata.category(c) in ("No", "Nl") else c for c in text)
