# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""OpenAI's Agents SDK, which speaks the route of responses."""

import json
from contextlib import suppress

from agents import Agent, ModelBehaviorError, Runner, function_tool, set_tracing_disabled
from replies import MORE

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


agent = Agent(name="adder", instructions="5", tools=[add], model="policy")
output = ""
with suppress(ModelBehaviorError):  # an answer was cut, which the SDK takes for an error
    result = Runner.run_sync(agent, json.loads(input())["answer"])
    output = result.final_output
    if output != "3":  # the model has not called
        Runner.run_sync(agent, [*result.to_input_list(), MORE])
print(json.dumps({"reward": float(output == "3")}))
