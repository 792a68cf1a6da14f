# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A calculator that answers what stands before an equals sign.

The idea is that of the calculator annotations of GSM8K (Cobbe et al. 2021,
https://arxiv.org/abs/2110.14168): a model writes ``12*34=``, the calculator ``408``, and the
model goes on. A turn ends with the token ``=``, which tokenizers of single characters have as
well as large ones. What is calculated is the longest run of digits, blanks, ``+ - *`` and brackets
before it; an equals sign behind anything else is left alone.

With a column ``answer`` an episode is rewarded: 1 where the last number is it, else 0. The last
number may be the calculator's, so a model need not copy it.
"""

import ast
import re
from collections.abc import Sequence

from torchtitan.grpo.rollout.environments.protocol import Environment, Observation
from torchtitan.grpo.types import Prompt

_EXPRESSION = re.compile(r"[-+*() \d]*=\Z", re.ASCII)
_NUMBER = re.compile(r"-?\d+", re.ASCII)
_MAX_CHARACTERS = 64
_MAX_SIZE = 10**18


class CannotCalculate(ValueError):
    """An expression has no value here."""


class Calculator(Environment):
    """See the module's docstring."""

    stop_strings: Sequence[str] = ("=",)

    def __init__(self) -> None:
        self._expected: str | None = None
        self._result = ""

    async def reset(self, prompt: Prompt) -> None:
        answer = prompt.columns.get("answer")
        self._expected = None if answer is None else str(answer).strip()

    async def step(self, text: str, token_ids: list[int]) -> Observation:
        if not text.endswith("="):
            return Observation(is_done=True, reward=self._reward(self._result + text))
        expression = _EXPRESSION.search(text)
        assert expression is not None, "the text ends with an equals sign"
        if not re.search(r"\d", expression[0]):
            return Observation()
        try:
            self._result = str(calculate(expression[0].removesuffix("=")))
        except CannotCalculate:
            self._result = ""
            return Observation(text="error")
        return Observation(text=self._result)

    async def cut_off(self) -> float | None:
        return self._reward("")

    async def close(self) -> None:
        pass

    def _reward(self, text: str) -> float | None:
        if self._expected is None:
            return None
        numbers = _NUMBER.findall(text)
        return float(bool(numbers) and numbers[-1] == self._expected)


def calculate(expression: str) -> int:
    """The value of an expression of integers, ``+ - *`` and brackets.

    Nothing is executed: the expression is parsed, and its tree worked out node by node.

    Raises:
        CannotCalculate: It is no such expression, or too long, or a number in it too large.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise CannotCalculate(f"more than {_MAX_CHARACTERS} characters")
    # Python reads no number that begins with a zero.
    plain = re.sub(r"\b0+(?=\d)", "", expression.strip())
    try:
        tree = ast.parse(plain, mode="eval")
    except SyntaxError as error:
        raise CannotCalculate(str(error)) from error
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            value = _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            value = _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            value = _value(left) * _value(right)
        case _:
            raise CannotCalculate("only integers, + - * and brackets")
    if abs(value) > _MAX_SIZE:
        raise CannotCalculate(f"larger than {_MAX_SIZE}")
    return value
