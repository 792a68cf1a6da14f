# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""OpenAI's client without asyncio: tools, a stream, and the last line as the reward."""

import json
import os

import openai
from replies import replies

client = openai.OpenAI()
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
row = json.loads(input())
messages = [{"role": "user", "content": row["answer"]}]
first = client.chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=messages, tools=[tool], logprobs=True
)
message = first.choices[0].message
assert first.choices[0].logprobs.content[0].logprob < 0
messages += [message, *replies(message)]
text = ""
with client.chat.completions.stream(model="policy", messages=messages, tools=[tool]) as stream:
    for event in stream:
        text += event.delta if event.type == "content.delta" else ""
print(json.dumps({"reward": float(text == "3")}))
