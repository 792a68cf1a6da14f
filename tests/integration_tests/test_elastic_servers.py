# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Servers that end and are restarted, and servers that join and leave through the URL file."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from lone_trainer import ask as fetch
from lone_trainer import wait_until
from processes import descendants

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.rollout.link import RolloutFailed, RolloutLink

GROUPS_PER_BATCH, GROUP_SIZE = 3, 4
READY_SECONDS = 240.0
BATCH_SECONDS = 240.0

T = TypeVar("T")


def ask(url: str, do: Callable[[InferenceClient], Awaitable[T]]) -> T:
    async def main() -> T:
        client = make_client("embedded", url)
        try:
            return await do(client)
        finally:
            await client.close()

    return asyncio.run(main())


def num_requests(url: str) -> int:
    info = fetch(url, "/server_info")
    return info["num_running"] + info["num_waiting"]


def answers(url: str) -> bool:
    with contextlib.suppress(ServerError):
        ask(url, lambda client: client.health())
        return True
    return False


def process_of(url: str) -> psutil.Process:
    port = url.rsplit(":", 1)[1]
    (process,) = descendants(f" {port}")
    return process


def start_groups(link: RolloutLink, url: str, serve_version: Callable[..., None]) -> None:
    ask(url, lambda client: client.pause())
    serve_version(link, url, 0)
    wait_until(lambda: num_requests(url) == 2 * GROUPS_PER_BATCH * GROUP_SIZE)


def group_ids(link: RolloutLink, version: int) -> list[int]:
    batch = link.next_batch(version, BATCH_SECONDS)
    assert batch is not None
    assert all(len(group.rollouts) == GROUP_SIZE for group in batch.groups)
    return [group.group_id for group in batch.groups]


def replace_file(path: Path, *lines: str) -> None:
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    os.replace(new, path)


def log_of(config: RolloutProcessConfig) -> str:
    return (Path(config.dump_folder) / "rollout_process.log").read_text()


@pytest.fixture
def by_file(config: RolloutProcessConfig, tmp_path: Path) -> RolloutProcessConfig:
    config.inference.launch = False
    config.inference.urls_file = str(tmp_path / "servers.txt")
    return config


def test_servers_join_and_leave_by_the_file_and_no_group_is_lost(
    by_file: RolloutProcessConfig, open_link, serve, serve_version
):
    first, second = serve(), serve()
    file = Path(str(by_file.inference.urls_file))
    replace_file(file, "# servers of this run", "", f"{first.url}/")
    link = open_link(by_file)
    assert [server.url for server in link.wait_ready(READY_SECONDS)] == [first.url]
    assert link.watch.poll() is None
    start_groups(link, first.url, serve_version)

    replace_file(file, second.url)
    (server,) = wait_until(link.watch.poll)
    assert (server.url, server.num_joined) == (second.url, 1)
    wait_until(lambda: num_requests(first.url) == 0)
    assert num_requests(second.url) == 0, "it was given work before it was attested"
    # News of servers that are not there any more, or never were.
    link.notify_version(first.url, 0)
    link.notify_lost(first.url, "late")
    link.notify_version("http://127.0.0.1:9", 5)
    serve_version(link, second.url, 0)
    ids = group_ids(link, 0)
    serve_version(link, second.url, 1)
    ids += group_ids(link, 1)
    assert sorted(ids) == list(range(2 * GROUPS_PER_BATCH))
    assert num_requests(first.url) == 0

    # The first comes back, by a file that is written in place, and is asked to be read.
    file.write_text(f"{second.url}\n{first.url}\n")
    link.reread_urls()
    servers = wait_until(link.watch.poll)
    assert [(s.url, s.num_joined) for s in servers] == [(second.url, 1), (first.url, 2)]
    assert link.watch.servers() == servers
    ask(first.url, lambda client: client.resume())
    serve_version(link, first.url, 2)
    ids += group_ids(link, 2)
    assert len(set(ids)) == 3 * GROUPS_PER_BATCH
    assert link.watch.poll() is None


def test_a_killed_server_comes_back_under_its_url_and_no_group_is_lost(
    config: RolloutProcessConfig, open_link, serve_version
):
    config.inference.max_restarts = 1
    config.inference.restart_seconds = 0.2
    link = open_link(config)
    (server,) = link.wait_ready(READY_SECONDS)
    start_groups(link, server.url, serve_version)
    first = process_of(server.url)
    first.kill()
    wait_until(lambda: "Restart 1 of at most 1" in log_of(config))
    wait_until(lambda: answers(server.url))
    assert process_of(server.url).pid != first.pid
    assert num_requests(server.url) == 0, "it was given work before it was attested"
    assert ask(server.url, lambda client: client.version()) is None
    assert link.watch.poll() is None
    serve_version(link, server.url, 0)
    ids = group_ids(link, 0)
    serve_version(link, server.url, 1)
    ids += group_ids(link, 1)
    assert sorted(ids) == list(range(2 * GROUPS_PER_BATCH))

    process_of(server.url).kill()
    with pytest.raises(RolloutFailed, match=r"(?s)restarted 1 times .*exit status -9.*Serving"):
        link.next_batch(2, BATCH_SECONDS)


def test_a_whole_run_moves_to_other_servers_on_a_hangup(make_run, serve, tmp_path: Path):
    first, second = serve(), serve()
    file = tmp_path / "servers.txt"
    replace_file(file, first.url)
    run = make_run(
        *("--inference.no-launch", f"--inference.urls_file={file}", "--evaluation.num_prompts=8"),
        *("--grpo.prompts_per_step=2", "--training.steps=10000", "--observe.log_level=info"),
        "--rollout.max_head_offpolicyness=0",
        torchrun=True,
    )
    run.start()
    run.wait_for_step(3)
    rank_zero = run.rank(0)
    assert f"kill -HUP {rank_zero.pid}" in run.console
    assert run.console.count("Nothing reads inference.dtype, because") == 1
    replace_file(file, second.url)
    rank_zero.send_signal(signal.SIGHUP)
    run.wait_for(lambda: ask(second.url, lambda client: client.version()) is not None)
    first.stop()
    run.wait_for_step(len(run.metrics) + 4)
    assert all(record["staleness/max_steps"] == 0 for record in run.metrics)
    # Tokens of any other weights than the newest would show.
    assert all(record["mismatch/kl"] < 1e-6 for record in run.metrics)
    assert run.process is not None
    os.killpg(run.process.pid, signal.SIGTERM)
    run.finish(30)
    run.wait_until_processes_end()
