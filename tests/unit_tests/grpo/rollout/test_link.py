# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from pathlib import Path

from prompt_files import process_config

from torchtitan.grpo.config import Prompts
from torchtitan.grpo.rollout import child_process, link_messages
from torchtitan.grpo.rollout.link import RolloutLink
from torchtitan.grpo.system.child import start_child

# The real process and its messages, with a session that has no servers, prompts or rewards.
PROGRAM = """
import asyncio
from types import SimpleNamespace
from torchtitan.grpo.rollout import process
from torchtitan.grpo.rollout.drops import DropLog

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


def test_the_file_with_the_servers_keys_is_gone_once_it_is_read(tmp_path: Path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)

    def start_program(command, **options):
        *python, _, directory = command
        return start_child([*python, "program", directory], cwd=str(tmp_path), **options)

    monkeypatch.setattr(child_process, "start_child", start_program)
    link = RolloutLink(process_config(Path(), Prompts(), dump_folder=str(tmp_path)))
    link._config.inference.api_key = "secret"
    try:
        link.start()
        assert link.wait_ready(120.0) == []
        folder = link._directory
        assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
        assert not [f for f in folder.iterdir() if f.is_file() and b"secret" in f.read_bytes()]
        assert not (folder / link_messages.CONFIG_FILE).exists()
    finally:
        link.close()
