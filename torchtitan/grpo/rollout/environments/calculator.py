# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An environment that calculates the expression before an equals sign.

It follows the calculator annotations of GSM8K (Cobbe et al. 2021,
https://arxiv.org/abs/2110.14168): the model writes ``12*34=``, the calculator answers ``408``,
and the model continues. The calculator evaluates the longest run of digits, spaces, ``+ - *`` and
parentheses before ``=``. If that has no digit, the observation is empty.

If the data set has a column ``answer``, the reward of an episode is 1 if its last number, which
may be the calculator's, equals the answer or one of a list of answers, and otherwise 0.
"""

import ast
import operator
import re
from collections.abc import Sequence

from torchtitan.grpo.rewards.gold_values import right_answers
from torchtitan.grpo.rollout.environments.protocol import Environment, Observation
from torchtitan.grpo.types import Prompt

_EXPRESSION = re.compile(r"[-+*() \d]*=\Z", re.ASCII)
_NUMBER = re.compile(r"-?\d+", re.ASCII)
_MAX_CHARACTERS = 64
_MAX_SIZE = 10**18
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class CannotCalculate(ValueError):
    """The calculator cannot evaluate this expression."""


class Calculator(Environment):
    stop_strings: Sequence[str] = ("=",)

    def __init__(self) -> None:
        self._expected: list[str] = []
        self._result = ""

    async def reset(self, prompt: Prompt) -> None:
        self._expected = [text.strip() for text in right_answers(prompt.columns.get("answer"))]

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

    def _reward(self, text: str) -> float | None:
        if not self._expected:
            return None
        numbers = _NUMBER.findall(text)
        return float(bool(numbers) and numbers[-1] in self._expected)


def calculate(expression: str) -> int:
    """Evaluates the syntax tree of an expression node by node: no code is executed."""
    if len(expression) > _MAX_CHARACTERS:
        raise CannotCalculate(f"more than {_MAX_CHARACTERS} characters")
    # Python does not accept a number that begins with a zero.
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
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_value(left), _value(right))
        case _:
            raise CannotCalculate("only integers, + - * and parentheses are allowed")
    if abs(value) > _MAX_SIZE:
        raise CannotCalculate(f"larger than {_MAX_SIZE}")
    return value
