# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""LiteLLM, which sends what it does not know as well."""

import json
import os

import litellm
from replies import replies

settings = {
    "model": "openai/policy",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    "metadata": {"a": "b"},
    "max_tokens": 100,
}
messages = [{"role": "user", "content": json.loads(input())["answer"]}]
message = litellm.completion(messages=messages, **settings).choices[0].message
messages += [message.model_dump(), *replies(message)]
text = litellm.completion(messages=messages, num_retries=2, **settings).choices[0].message.content
print(json.dumps({"reward": float(text == "3")}))
