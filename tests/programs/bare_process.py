# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Programs in place of the rollout process: the real one, with a session that has nothing."""

from pathlib import Path

import pytest

from torchtitan.grpo.rollout import child_process
from torchtitan.grpo.system.child import start_child

BARE = """
import asyncio
from types import SimpleNamespace
from torchtitan.grpo.rollout import link_messages, process
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.results import RolloutBatch
from torchtitan.grpo.types import BatchPart, PromptProgress

async def for_ever(*arguments):
    await asyncio.Event().wait()

class Session:
    evaluator = lender = None

    def __init__(self, config, announce, say, devices, show):
        self.drops = DropLog(announce)
        self.producer = SimpleNamespace(
            run=for_ever, describe=lambda: "nothing", count_prompts=lambda: None,
            is_asked=False, save=lambda version: None, progress=lambda: (1, 4, 9),
        )
        # The process reads its vital signs about once a second, which a slow host reaches.
        attempts = SimpleNamespace(num_tokens=0)
        self.dispatcher = SimpleNamespace(watch_loads=for_ever, servers={}, attempts=attempts)
        self.fleet = SimpleNamespace(servers=[], watch=for_ever)
        self.inputs = SimpleNamespace(warnings=[])
        self.show = show

    async def open(self):
        await self.show("waiting for servers: 0 of 1 ready", 0, 1)

    async def close(self): ...

process.RolloutSession = Session
"""

# Lent servers want the devices before each batch.
LENDING = """
async def batch(version):
    return RolloutBatch([], PromptProgress(version), {}, {}, BatchPart.WHOLE)

class Lending(process.RolloutProcess):
    async def _send_batch(self, session, command):
        session.producer.batch = batch
        await self.ask(command.version)
        async with asyncio.timeout(60):
            while not self.devices.are_free:
                await asyncio.sleep(0.01)
        self.devices.deliver(command.version)
        await super()._send_batch(session, command)

    async def ask(self, version):
        ASK

process.RolloutProcess = Lending
"""


def run_instead(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rank 0 start a program, whose text lies in ``folder``, in place of the rollout process."""
    (folder / "program.py").write_text(f"{program}\nprocess.main()\n")

    def start_program(command, **options):
        *python, _, directory = command
        return start_child([*python, "program", directory], cwd=str(folder), **options)

    monkeypatch.setattr(child_process, "start_child", start_program)
