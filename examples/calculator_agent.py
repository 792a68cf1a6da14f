# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An agent that lets its model use a calculator, for `train_configs/calculator_agent.toml`.

It is an ordinary program of OpenAI's client: it asks the model, calculates what the model wrote before
an equals sign, appends the result, and asks again. The same function runs against any server.
"""

import re
from typing import Any

from openai import AsyncOpenAI

from torchtitan.grpo.rollout.environments.calculator import CannotCalculate, calculate

MAX_CALLS = 4


async def run(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Returns 1 if the last number of the text is the row's answer, else 0."""
    text = row["prompt"]
    begin = len(text)
    for _ in range(MAX_CALLS):
        answer = await client.completions.create(model="policy", prompt=text, stop=["="])
        choice = answer.choices[0]
        text += choice.text
        if getattr(choice, "stop_reason", None) != "=":
            break
        text += "=" + result_of(choice.text)
    numbers = re.findall(r"-?\d+", text[begin:])
    return float(bool(numbers) and numbers[-1] == row["answer"])


def result_of(expression: str) -> str:
    try:
        return str(calculate(expression))
    except CannotCalculate:
        return "error"
