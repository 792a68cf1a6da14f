"""The publisher under pipeline parallelism, beside a training thread that does not wait."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.inference.local_servers import (
    LaunchedServer,
    free_ports,
)
from torchtitan.grpo.inference.server_spec import ServerSpec
from torchtitan.grpo.inference.waiting import wait_until_up


@pytest.fixture
def server(make_model, tmp_path: Path, fork_server) -> Iterator[LaunchedServer]:
    """An embedded server of the tiny Qwen3."""
    _, folder = make_model("qwen3")
    spec = ServerSpec("embedded", folder, free_ports(1)[0], "cpu", "float32", 32, 4)
    launched = fork_server.start_server(spec, tmp_path / "server.log")

    async def wait() -> None:
        client = make_client("embedded", launched.url)
        try:
            await wait_until_up([client], [launched], timeout_seconds=120)
        finally:
            await client.close()

    try:
        asyncio.run(wait())
        yield launched
    finally:
        launched.stop()


def test_versions_published_from_pipeline_stages_arrive_whole(server, run_ranks):
    layout = {"pp": 2, "dp_shard": 2, "schedule": "ZBVZeroBubble"}
    leader, *followers = run_ranks(
        "publish_while_training", 4, model=server.spec.model_path, url=server.url, layout=layout
    )
    assert leader["unequal"] == []
    assert leader["failures"] == 0
    assert leader["told"] == sorted(set(leader["told"]))
    # The last one, and others on the way, each seen while the next was trained.
    assert leader["seen"][-1] == leader["told"][-1] == 11
    assert len(leader["seen"]) > 1
    assert leader["num_collectives"] >= 12
    assert all(rank["wrong_sums"] == 0 for rank in (leader, *followers))
