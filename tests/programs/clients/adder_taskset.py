# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A taskset of the `verifiers` package, sums whose right answer earns 1, with a harness."""

import sys
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["AdderHarness", "AdderTaskset"]

PROGRAM = """
import sys
from openai import OpenAI
url, key, prompt = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
OpenAI(base_url=url, api_key=key).chat.completions.create(model="any", messages=messages)
"""


class AdderData(vf.TaskData):
    answer: str


class AdderTask(vf.Task[AdderData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class AdderTaskset(vf.Taskset[AdderTask, vf.TasksetConfig]):
    def load(self) -> Iterator[AdderTask]:
        for number in range(3):
            data = AdderData(prompt=f"{number}+{number}", answer=str(2 * number))
            yield AdderTask(data, self.config.task)


class AdderHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        *rest: Any,
        **more: Any,
    ) -> vf.ProgramResult:
        arguments = [endpoint, secret, trace.task.data.prompt]
        return await runtime.run_program([sys.executable, "-c", PROGRAM, *arguments], {})
