# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""OpenAI's client with asyncio: tools, and two streams."""

import asyncio
import json

from openai import AsyncOpenAI
from replies import replies


async def main() -> str:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": json.loads(input())["answer"]}]
    async with AsyncOpenAI() as client:
        for _ in range(2):
            settings = {"model": "policy", "messages": messages, "tools": [tool]}
            async with client.chat.completions.stream(**settings) as stream:
                await stream.until_done()
            # Not `get_final_completion`, which raises an error if an answer was cut.
            message = stream.current_completion_snapshot.choices[0].message
            messages += [message.model_dump(exclude_none=True), *replies(message)]
    return message.content or ""


print(json.dumps({"reward": float(asyncio.run(main()) == "3")}))
