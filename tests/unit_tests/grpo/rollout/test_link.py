# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rank 0's end of the connection to a rollout process whose session is a script."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_files import process_config

from torchtitan.grpo.config import Prompts
from torchtitan.grpo.rollout import child_process, link_messages
from torchtitan.grpo.rollout.link import RolloutLink
from torchtitan.grpo.system.child import start_child
from torchtitan.grpo.types import BatchPart, PromptProgress

# The real process and its messages, with a session that has no servers, prompts or rewards.
PROGRAM = """
import asyncio
from types import SimpleNamespace
from torchtitan.grpo.rollout import process
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.results import RolloutBatch
from torchtitan.grpo.types import BatchPart, PromptProgress

PARTS = iter([BatchPart.FIRST, BatchPart.MIDDLE, BatchPart.LAST, BatchPart.WHOLE])

async def for_ever(*arguments):
    await asyncio.Event().wait()

async def batch(version):
    part = next(PARTS)
    metrics = {"reward/mean": 0.5} if part.ends_batch else {}
    return RolloutBatch([], PromptProgress(version + 10, (version,)), {}, metrics, part)

class Session:
    evaluator = None

    def __init__(self, config, announce):
        self.drops = DropLog(announce)
        self.producer = SimpleNamespace(
            batch=batch, run=for_ever, describe=lambda: "nothing", count_prompts=lambda: None,
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
SECONDS = 120.0


@pytest.fixture
def link(tmp_path: Path, monkeypatch) -> Iterator[RolloutLink]:
    (tmp_path / "program.py").write_text(PROGRAM)

    def start_program(command, **options):
        *python, _, directory = command
        return start_child([*python, "program", directory], cwd=str(tmp_path), **options)

    monkeypatch.setattr(child_process, "start_child", start_program)
    link = RolloutLink(process_config(Path(), Prompts(), dump_folder=str(tmp_path)))
    yield link
    link.close()


def test_rank_zero_learns_which_part_of_its_batch_it_has_received(link: RolloutLink):
    link.start()
    assert link.wait_ready(SECONDS) == []
    for version, part in ((0, "FIRST"), (0, "MIDDLE"), (0, "LAST"), (1, "WHOLE")):
        batch = link.next_batch(version, SECONDS)
        assert batch is not None
        assert batch.part is BatchPart[part]
        assert batch.progress == PromptProgress(version + 10, (version,))
        assert ("reward/mean" in batch.metrics) == (part in ("LAST", "WHOLE"))


def test_the_file_with_the_servers_keys_is_gone_once_it_is_read(link: RolloutLink, monkeypatch):
    link._config.inference.api_key = "secret"
    link.start()
    assert link.wait_ready(SECONDS) == []
    assert link._directory is not None and link._directory.is_dir()
    assert link._directory.stat().st_mode & 0o777 == 0o700
    assert not [f for f in link._directory.iterdir() if f.is_file() and b"secret" in f.read_bytes()]
    assert not (link._directory / link_messages.CONFIG_FILE).exists()
