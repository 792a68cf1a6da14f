# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Recognizes the format of files that should be UTF-8 text (with or without byte-order mark) but are not."""

import codecs
import re
import shlex

UTF8_MARK = codecs.BOM_UTF8

# How files of other formats begin, what they are, and how they are made into what is wanted.
_BEGINNINGS = (
    (b"\x1f\x8b", "compressed with gzip", "Unpack it: gunzip -c < {path} > {new}"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "Unpack it: zstdcat < {path} > {new}"),
    (b"BZh", "compressed with bzip2", "Unpack it: bunzip2 -c < {path} > {new}"),
    (b"\xfd7zXZ\x00", "compressed with xz", "Unpack it: unxz -c < {path} > {new}"),
    (b"PK\x03\x04", "a zip archive", "Unpack it: unzip -p {path} > {new}"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "Unpack it first"),
    (b"PAR1", "a parquet file", "Rename it so that its name ends in .parquet"),
    (b"ARROW1", "an Arrow file", "Name the folder of the data set that it belongs to"),
    (b"version https://git-lfs", "a pointer of Git LFS", "Fetch its content: git lfs pull"),
    (b"<", "a page of HTML or XML", "It may be an error page; download the file again"),
    (codecs.BOM_UTF32_LE, "text in UTF-32", "Convert it: iconv -f UTF-32 -t UTF-8 {path} > {new}"),
    (codecs.BOM_UTF32_BE, "text in UTF-32", "Convert it: iconv -f UTF-32 -t UTF-8 {path} > {new}"),
    (codecs.BOM_UTF16_LE, "text in UTF-16", "Convert it: iconv -f UTF-16 -t UTF-8 {path} > {new}"),
    (codecs.BOM_UTF16_BE, "text in UTF-16", "Convert it: iconv -f UTF-16 -t UTF-8 {path} > {new}"),
)
# Without a mark: the first character is in ASCII, and its other bytes are 0.
_UNMARKED = (
    (re.compile(rb"[^\0]\0\0\0"), "UTF-32LE"),
    (re.compile(rb"\0\0\0[^\0]"), "UTF-32BE"),
    (re.compile(rb"[^\0]\0"), "UTF-16LE"),
    (re.compile(rb"\0[^\0]"), "UTF-16BE"),
)
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1f\x7f]")
_NEW = "NEW_FILE"


def other_format(content: bytes, path: str) -> str | None:
    """Says what ``content``, a part of a file, is instead of UTF-8 text, and how to convert it."""
    names = {"path": shlex.quote(path), "new": _NEW}
    for beginning, what, remedy in _BEGINNINGS:
        if content.startswith(beginning):
            return f"it is {what}. {remedy.format(**names)}."
    if b"\0" in content:
        for form, encoding in _UNMARKED:
            if form.match(content):
                remedy = f"iconv -f {encoding} -t UTF-8 {names['path']} > {_NEW}"
                return f"it is text in {encoding}. Convert it: {remedy}."
    if control := _CONTROL.search(content):
        byte = control[0][0]
        return f"it holds control characters (byte 0x{byte:02x}), as a damaged file or one that is no text."
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content)
    except UnicodeDecodeError as error:
        byte = content[error.start]
        return (
            f"its byte 0x{byte:02x} is not UTF-8. Convert it from the encoding that it was written in. If "
            f"that is Latin-1: iconv -f ISO-8859-1 -t UTF-8 {names['path']} > {_NEW}."
        )
    return None


def not_json_lines(line: bytes, path: str, *, is_first: bool) -> str | None:
    """Says why a line is not JSON, and what to do. Returns None where a parser's message is good enough."""
    text = line.strip()
    if found := other_format(text, path):
        return found
    quoted = shlex.quote(path)
    if is_first and text.startswith(b"["):
        return (
            "it holds one JSON array, and not an object on each line. Convert it: "
            f"jq -c '.[]' {quoted} > {_NEW}."
        )
    if text == b"{" or re.search(rb'\}\s*\{\s*"', text):
        return f"each object must be on one line. Write the file so: jq -c . {quoted} > {_NEW}."
    if is_first and text and not text.startswith(b"{"):
        return (
            "it looks like plain text or a table of separated values (CSV or TSV). Convert it, for example "
            "with pandas.read_csv(...).to_json(..., orient='records', lines=True)."
        )
    if text.endswith(b","):
        return "it ends with a comma. Remove the commas between the objects."
    if re.search(rb"[:\[,]\s*(-?NaN|-?Infinity|None|True|False)\b|\{\s*'", text):
        return (
            "NaN, Infinity, None, True, False and single quotes are not JSON. Write null, true, false and "
            "double quotes, as json.dumps(..., allow_nan=False) does."
        )
    return None
