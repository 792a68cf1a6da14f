# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import pytest

from torchtitan.grpo.rewards.thousands import without_thousands_separators


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,234", "1234"),
        ("1 234", "1234"),
        ("-1,234", "-1234"),
        ("12,345,678.9", "12345678.9"),
        ("100,200,300", "100200300"),
        ("1,050", "1050"),
        (r"\$1,234", r"\$1234"),
        ("1,234%", "1234%"),
        ("1,234 dollars", "1234 dollars"),
        ("x=1,234", "x=1234"),
        ("9,999.", "9999."),
        ("1,234, 5,678", "1234, 5678"),
        (r"\frac{1,000}{3,000}", r"\frac{1000}{3000}"),
        ("2^{1,234}", "2^{1234}"),
        (r"\sqrt[3]{1,000}", r"\sqrt[3]{1000}"),
        # Separators of LaTeX and of typeset text.
        ("1{,}234", "1234"),
        ("12{,}345{,}678", "12345678"),
        (r"1\,234\,567", "1234567"),
        (r"10,\!000", "10000"),
        (r"10\ 000", "10000"),
        ("10~000", "10000"),
        ("1\u202f234", "1234"),
        (r"(1\,234)", "(1234)"),
        ("(1{,}234)", "(1234)"),
        # Elements are told apart by something else than the bare comma.
        ("(1,234, 5)", "(1234, 5)"),
        ("[1,234; 5,678)", "[1234; 5678)"),
        (r"\{1,000, 2,000\}", r"\{1000, 2000\}"),
    ],
)
def test_separators_of_whole_numbers_go(text, expected):
    assert without_thousands_separators(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "3,4", "0,5", "1,23", "1,2345", "1,2,3", "1,234,56", "1234,567", "12,34,567",
        "0,500", "01,234", "000,000", "1.234,5", "1.234,567", ".123,456", "1,234.567,8",
        "1,234,-5", "1,234.56,-5", "-5,1,234", "1,234,x", "x,1,234",
        "x_1,234", "x^2,345", "x1,234",
        "(1,234)", "[1,234]", "(1,234]", "{1,234}", r"\{1,234\}", "(12,345,678)",
        r"\left(1,234\right)", "f(1,234)", "((1,234), 5)", "(1, (2,345))", "(1,234",
        r"1\,23", r"1{,}23", r"1,234\,567", "4 5", "1 23", "12 3456", "", "no number",
    ],
)  # fmt: skip
def test_other_commas_stay(text):
    assert without_thousands_separators(text) == text


def test_a_very_long_answer_is_left_as_it_is():
    text = "1,234 " * 200
    assert without_thousands_separators(text) == text
