# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the score in a judge's answer. What is not written in a form that is known is no score.

The score stands behind the last mark, such as ``Score:``. Without marks it is the last number, if
behind words like ``I give it``. It may have a unit, the best score and asides, as in ``8 points out
of 10 (80%)``, and ends its clause. All expressions take time in proportion to the text's length.
"""

import re
import unicodedata

_CHARACTERS = str.maketrans("−－﹣＋⁄∕／：，．٫（）％’", "---+///:,.,()%'", "\u200b\u2060\ufeff")
_MARK = re.compile(
    r"(?i)(?P<other>(?:max|maximum|possible|highest|full|perfect|best|top) )?(?<![\w/])(?:scores?|评分|得分|(?P<weak>rating|verdict|grade))[\"'*_\])]{0,3}[^\S\n]{0,3}(?:=>|[:=>])"
    r"(?:(?P<word>(?=[\s\"'*_]{0,4}[^\W\d_]))|)|\[\[(?=[^\[\]\n]{1,20}\]\])|\\boxed ?\{"
)
_OPEN = r"(?:[^\S\n]|[*_`\"'“$(\[]|\\[(\[]|\\text\w{0,2}\{|<(?=[^<>\n]{1,20}>))"
_CLOSE = r"(?:[*_`\"'”$)\]}|>]|\\[)\]])"
_UNIT = r"(?:[^\S\n]{1,3}(?:points?|stars?|marks?|pts)\b|[^\S\n]?分(?![半钟之]))?"
_N = r"\d++(?:\.\d++)?+"
_OF = rf"(?:out )?of(?: (?:the|an?))?(?: (?:possible|total|max\.?|maximum)(?: of)?)? {{1,3}}[*_]{{0,3}}{_N}"
_RANGE, _PERCENT = rf"{_N} ?(?:-|–|to|and) ?{_N}", rf"=?{_N} ?(?:%|per ?cent)"
_SCALE = rf"(?:(?:[oi]n )?(?:an? |the )?(?:scale:?(?: of| from| between)? (?:{_RANGE}|{_N})|{_N}-point scale|{_RANGE} scale)|(?:max(?:imum)?\.?|满分):?(?: of| is)? ?{_N})"
_SCORE = re.compile(
    rf"(?i:(?P<score>[-+]?(?:{_N}|\.\d++)(?:e[-+]?\d{{1,3}}+)?+){_UNIT}(?:{_CLOSE}{{0,4}} {{0,3}}(?:\\?/ {{0,3}}[*_]{{0,3}}{_N}|{_OF}){_UNIT})?"
    rf"(?: {{0,3}}\((?:{_SCALE}|{_OF}|{_PERCENT}|{_RANGE}|{_N}/{_N}){_UNIT}\)"
    rf"|(?:[,;]| -)? {{1,3}}{_SCALE}{_UNIT}|[,;] ?{_PERCENT}){{0,3}})"
)
_MARKED = re.compile(rf"{_OPEN}*+(?:\n(?:\n|{_OPEN})*+)?" + _SCORE.pattern)
# An answer that was cut may go on with a part of the number where `open` is the end of the text.
_END = re.compile(
    rf"{_CLOSE}*?(?:\]\](?=[\s.,;!?)*$]|\Z)|\}}(?=[\s.,;!?)*$]))(?!\s*(?:\\?[%/^]|per ?cent|\d))"
    rf"|(?:{_CLOSE}|[^\S\n])*+(?:[.;!。]{_CLOSE}*+[^\S\n]*+)?(?P<open>\n|\Z)"
    r"|[^\S\n]*+<[/|]|[\"']?\s*,\s*[\"'][^\"'\n]{1,60}[\"']\s*:"
)
_SENTENCE = re.compile(
    rf"{_CLOSE}*+(?:[^\S\n]?[.;!。]{_CLOSE}*+\s*+[^\W\d]|,? (?:since|because)\b)[^\d\n]*+(?P<open>\n|\Z)"
)
_INTRODUCED = re.compile(
    r"(?i)(?:\n(?:[-*•#|]+ )*|[^\s\d]:|\d: |[-=]>|<\w{1,20}>|[-+*×] ?\d+ ?=|[A-Za-z] ?=|(?:\b\d ){3}|[给得为是打]|[得评]分"
    r"|\b(?:(?:score|rating|grade|verdict|it|this|that|answer|result) (?:is|of|was|would be|should be)"
    rf"|(?:give|rate|assign|award|deserve|earn|get|say|receive)[sd]?(?: (?:it|this|that|him|her|them|the \w+))?)(?: an?)?(?: (?:score|rating|grade)(?: of)?)? |\b(?:then|so|now|step|scored|rated) ){_OPEN}*$"
)
_REFUSED = re.compile(
    r"(?i)(?:\b(?:max\w*|possible|highest|full|perfect|best|top|limit|scale|not?|never|cannot)\b|n't|满分|总分|不)[^.,;!\n]*$|:\s?\d[^\n]*[,;|][^\n,;|]*:\W*$"
)
_GOES_ON = re.compile(
    r"(?i) ?(?:[-–—~*×·^_+]|\\(?:cdot|times)\b)+ ?\{?\d|(?:[.,'/:]|\{,\}|\\[,:; ])?(?<!/)\d|\\?\^|e[-+]?\d| (?:\d{3}(?!\d)|\d+/\d|(?:to|or) \d|\^|and (?:an?|1) )"
)
_HAS_BEGUN = re.compile(r"(?i)\d(?:[.,'_/]| ?[-–—~*^] ?|e[-+]?)?$|(?<![\w)])[-–—]$")


def written_score(answer: str, *, is_cut: bool) -> float | None:
    """Returns the score, or ``None``. An answer that ``is_cut`` must have it behind a mark."""
    text = _understood("\n" + answer)
    marks = list(_MARK.finditer(text))
    # `Grade: B` is no score, but `Score: 8` before it is.
    counted = [mark for mark in marks if not mark["weak"] or mark["word"] is None] or marks
    counted = [mark for mark in counted if not mark["other"]]
    score = _MARKED.match(text, counted[-1].end()) if counted else None
    if not marks and not is_cut:
        for score in _SCORE.finditer(text):  # noqa: B007
            pass
    if score is None:
        return None
    start, end = score.span("score")[0], score.end()
    before = text[max(0, start - 80) : start]
    if not marks and (not _INTRODUCED.search(before) or _REFUSED.search(before)):
        return None
    ended = _END.match(text, end)
    if ended is None and text[text.rfind("\n", 0, start) : start].strip(" \n*_#>-"):
        ended = _SENTENCE.match(text, end)  # a line may begin with an item's number
    return None if ended is None or (is_cut and ended["open"] == "") else float(score["score"])


def found_score(found: re.Match[str], *, is_cut: bool) -> float | None:
    """Reads what an expression of the user's has found, unless it is a part of a longer number."""
    text, (start, end) = found.string, found.span(1)
    before, rest = _understood(text[max(0, start - 8) : start]), _understood(text[end : end + 200])
    is_group = re.fullmatch(r"\d [0-9]{3}", before[-2:] + (found[1] or ""))
    ended = _END.match(rest)
    is_open = _GOES_ON.match(rest) or (is_cut and (ended is None or ended["open"] == ""))
    if text[end : found.end()].strip(" .,"):  # the expression says what follows
        is_open = is_cut and found.end() == len(text) and text[-1].isalnum()
    if start < 0 or is_group or is_open or _HAS_BEGUN.search(before):
        return None
    score = _SCORE.fullmatch(_understood(found[1].strip()).rstrip("."))
    return float(score["score"]) if score is not None else None


def _understood(text: str) -> str:
    """One blank for several; ``½``, ``²`` and ``Ⅷ`` become a form that no number has."""
    text = re.sub(r"(?<=\d)[\u200b-\u200d\u2060\ufeff]+(?=\d)", "^", text).translate(_CHARACTERS)
    text = re.sub(r"[^\S\n]+", " ", text)
    return "".join("^0" if unicodedata.category(c) in ("No", "Nl") else c for c in text)
