# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""LangGraph with LangChain's client, which writes the arguments of tool calls anew."""

import json

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from replies import MORE


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


agent = create_react_agent(ChatOpenAI(model="policy"), [add])
question = {"role": "user", "content": json.loads(input())["answer"]}
messages = agent.invoke({"messages": [question]})["messages"]
if messages[-1].content != "3":  # the model has not called
    messages = agent.invoke({"messages": [*messages, MORE]})["messages"]
print(json.dumps({"reward": float(messages[-1].content == "3")}))
