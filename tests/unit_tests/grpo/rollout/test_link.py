# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_files import process_config

from torchtitan.grpo.config import Prompts
from torchtitan.grpo.rollout import child_process, link_messages
from torchtitan.grpo.rollout.link import RolloutFailed, RolloutLink
from torchtitan.grpo.system.child import start_child
from torchtitan.grpo.types import BatchPart

# The real process and its messages, with a session that has no servers, prompts or rewards.
PROGRAM = """
import asyncio
from types import SimpleNamespace
from torchtitan.grpo.rollout import link_messages, process
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.results import RolloutBatch
from torchtitan.grpo.types import BatchPart, PromptProgress

async def for_ever(*arguments):
    await asyncio.Event().wait()

class Session:
    evaluator = None

    def __init__(self, config, announce):
        self.drops = DropLog(announce)
        self.producer = SimpleNamespace(
            run=for_ever, describe=lambda: "nothing", count_prompts=lambda: None,
            is_asked=False,
        )
        # The process reads its vital signs about once a second, which a slow host reaches.
        self.dispatcher = SimpleNamespace(watch_loads=for_ever, servers={}, num_tokens=0)
        self.fleet = SimpleNamespace(servers=[], watch=for_ever)
        self.inputs = SimpleNamespace(warnings=[])

    async def open(self): ...
    async def close(self): ...

process.RolloutSession = Session
process.main()
"""

# Lent servers want the devices before each part of a batch. That of version 1 comes in parts.
LENDING = """
async def batch(version):
    return RolloutBatch([], PromptProgress(version), {}, {}, BatchPart(version))

class Lending(process.RolloutProcess):
    async def _send_batch(self, session, command):
        session.producer.batch = batch
        ASK
        assert await self.devices.until_free(command.version, 60)
        await super()._send_batch(session, command)

process.RolloutProcess = Lending
process.main()
"""
ASK = "await self.devices.want(command.version)"
UNCHECKED = "await self._send(link_messages.DevicesWanted(command.version))"


@pytest.fixture
def open_link(tmp_path: Path, monkeypatch) -> Iterator[Callable[[str], RolloutLink]]:
    """Starts a program in place of the rollout process, and closes the link to it."""
    link = RolloutLink(process_config(Path(), Prompts(), dump_folder=str(tmp_path)))
    link._config.inference.api_key = "secret"

    def start_program(command, **options):
        *python, _, directory = command
        return start_child([*python, "program", directory], cwd=str(tmp_path), **options)

    def open_link(program: str) -> RolloutLink:
        (tmp_path / "program.py").write_text(program)
        monkeypatch.setattr(child_process, "start_child", start_program)
        link.start()
        assert link.wait_ready(120.0) == []
        return link

    yield open_link
    link.close()


def test_the_file_with_the_servers_keys_is_gone_once_it_is_read(open_link):
    folder = open_link(PROGRAM)._directory
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
    assert not [f for f in folder.iterdir() if f.is_file() and b"secret" in f.read_bytes()]
    assert not (folder / link_messages.CONFIG_FILE).exists()


@pytest.mark.parametrize(("ask", "refused_by"), [(ASK, RolloutFailed), (UNCHECKED, AssertionError)])
def test_devices_are_lent_before_a_batch_and_never_in_the_middle_of_one(open_link, ask, refused_by):
    """Each side of the link refuses it by itself."""
    link = open_link(PROGRAM.removesuffix("process.main()\n") + LENDING.replace("ASK", ask))
    lent: list[int] = []

    def next_part(version: int) -> BatchPart:
        def lend() -> None:
            lent.append(version)
            link.notify_devices_free(version)

        batch = link.next_batch(version, 60.0, None, lend)
        assert batch is not None and batch.progress.position == version
        return batch.part

    assert [next_part(0), next_part(1)] == [BatchPart.WHOLE, BatchPart.FIRST]
    assert lent == [0, 1], "once for each batch, before it arrives"
    with pytest.raises(refused_by, match="wanted for version 1 in the middle of a batch"):
        next_part(1)
    assert lent == [0, 1]
