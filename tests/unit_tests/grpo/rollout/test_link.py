# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bare_process import BARE, LENDING, run_instead
from prompt_files import process_config

from torchtitan.grpo.config import Prompts
from torchtitan.grpo.rollout import link_messages
from torchtitan.grpo.rollout.link import RolloutLink

ASK = "await self.devices.want(version)"
LATE = "await self._send(link_messages.DevicesWanted(version - 1)); self.devices.free(version)"


SAVING = """
class Saving(process.RolloutProcess):
    num_saves = 0

    async def _save(self, saved, command):
        self.num_saves += 1
        count = self.num_saves
        await asyncio.sleep(0.3 * count)
        await self._send(link_messages.Saved(command.version, count))

process.RolloutProcess = Saving
"""


SPEAKING = """
class Speaking(process.RolloutProcess):
    async def _work(self):
        self._announcer.say("The server is not up yet.")
        self._announcer.announce("The server is wrong.")
        await super()._work()

process.RolloutProcess = Speaking
"""


@pytest.fixture
def open_link(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., RolloutLink]]:
    """Starts a program in place of the rollout process, and closes the link to it."""
    link = RolloutLink(process_config(Path(), Prompts(), dump_folder=str(tmp_path)))
    link._config.inference.api_key = "secret"

    def open_link(program: str, show: Callable[[str, int, int], None] | None = None) -> RolloutLink:
        run_instead(program, tmp_path, monkeypatch)
        link.show = show or link.show
        link.start()
        assert link.wait_ready(120.0) == []
        return link

    yield open_link
    link.close()


def test_the_file_with_the_servers_keys_is_gone_once_it_is_read(open_link):
    folder = open_link(BARE)._directory
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
    assert not [f for f in folder.iterdir() if f.is_file() and b"secret" in f.read_bytes()]
    assert not (folder / link_messages.CONFIG_FILE).exists()


def test_devices_are_lent_once_for_each_batch_that_they_are_wanted_for(open_link):
    link = open_link(BARE + LENDING.replace("ASK", ASK))
    lent: list[int] = []

    def take(version: int) -> None:
        def lend() -> None:
            lent.append(version)
            link.notify_devices_free(version)

        batch = link.next_batch(version, 60.0, None, lend)
        assert batch is not None and batch.progress.position == version

    take(0)
    take(1)
    assert lent == [0, 1], "before it arrives"


def test_a_wish_that_its_batch_has_overtaken_makes_no_room(open_link):
    link = open_link(BARE + LENDING.replace("ASK", LATE))
    assert link.next_batch(0, 60.0, None, lambda: pytest.fail("nothing is wanted")) is not None


def test_what_is_saved_again_for_one_version_is_waited_for_again(open_link):
    """As after SIGTERM just behind a checkpoint: the first answer is not the second's."""
    link = open_link(BARE + SAVING)
    link.save(4, [])
    link.save(4, [])
    assert link.wait_saved(4, 60.0) == 2


WAITING = """
process._PROGRESS_SECONDS = 0.05
tokens = itertools.count(9, 50)

async def batch(version):
    await asyncio.sleep(0.5)
    return RolloutBatch([], PromptProgress(version), {}, {}, BatchPart.WHOLE)

class Waiting(process.RolloutProcess):
    async def _send_batch(self, session, command):
        session.producer.batch = batch
        session.producer.progress = lambda: (1, 4, next(tokens))
        await super()._send_batch(session, command)

process.RolloutProcess = Waiting
"""


def test_what_is_waited_for_is_shown(open_link):
    shown: list[tuple[str, int, int]] = []
    link = open_link("import itertools\n" + BARE + WAITING, lambda *wait: shown.append(wait))
    assert shown == [("waiting for servers: 0 of 1 ready", 0, 1)]
    shown.clear()
    assert link.next_batch(6, 60.0) is not None
    lines = [line for line, *_ in shown]
    assert {(done, wanted) for _, done, wanted in shown} == {(1, 4)}
    assert lines[0].startswith("step 7: 1 of 4 completions, 50 tokens, ")
    assert lines[0].endswith(" tokens/s")


def test_a_start_that_is_merely_slow_is_told_without_a_warning(tmp_path, monkeypatch, capsys):
    warnings: list[str] = []
    config = process_config(Path(), Prompts(), dump_folder=str(tmp_path))
    link = RolloutLink(config, warnings.append)
    run_instead(BARE + SPEAKING, tmp_path, monkeypatch)
    link.start()
    try:
        link.wait_ready(120.0)
        deadline = time.monotonic() + 60
        while not warnings and time.monotonic() < deadline:  # it is sent after the other sentence
            link._receive()
            time.sleep(0.01)
    finally:
        link.close()
    assert warnings == ["The server is wrong."]
    assert capsys.readouterr().out == "The server is not up yet.\n"
