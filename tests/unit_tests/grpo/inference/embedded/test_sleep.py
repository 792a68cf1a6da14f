# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A server that sleeps gives up its memory, and serves again only what is pushed as a whole."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import engine_harness
import pytest
from embedded_process import (
    EOS,
    VOCAB,
    Client,
    Server,
    Trainer,
    assert_serves,
    halves,
    save,
    serve_weights,
    served_logprobs,
    weights_of,
)

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.system.child import stop_children

SLEEP, WAKE = "/release_memory_occupation", "/resume_memory_occupation"
LONG = {"max_new_tokens": 4000}


def large_model(seed: int) -> Any:
    """A model of 101 MB."""
    return engine_harness.make_model(
        "qwen3", seed, vocab_size=VOCAB, eos_token_id=EOS, max_position_embeddings=4096,
        hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, initializer_range=0.05,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model_path = save(large_model(1), tmp_path_factory.mktemp("model"))
    made = Server(tmp_path_factory.mktemp("server"), model_path, "--dist-timeout", "30")
    try:
        yield made.wait()
    finally:
        stop_children([made.process])


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url)


@asynccontextmanager
async def run_client(server: Server) -> AsyncIterator[InferenceClient]:
    client = make_client("embedded", server.url)
    try:
        yield client
    finally:
        await client.close()


def resident_bytes(server: Server) -> int:
    """Of the server's own process, which bash has become."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


async def refusal(client: Client, route: str, status: int, **body: Any) -> str:
    found, answer = await client.call("POST", route, body)
    assert found == status, answer
    return answer["message"]


async def test_sleep_frees_the_memory_of_the_weights_until_all_are_pushed_again(
    server: Server, client: Client
) -> None:
    weights = weights_of(large_model(2))
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    for is_pushed in (False, True):
        if is_pushed:  # the weights and the buffer in which they arrived are the same memory
            await client.post(WAKE)
            await serve_weights(client, large_model(2), "1")
        await client.generate([[i] for i in range(8)], sampling={"max_new_tokens": 60})
        awake = resident_bytes(server)
        await client.post(SLEEP)
        # 16 slots of 128 positions are allocated, with 8 layers and 4 heads of 64 numbers.
        cache_bytes = 16 * 128 * 8 * 4 * 64 * 2 * 4
        assert resident_bytes(server) < awake - 0.95 * num_bytes - 0.5 * cache_bytes
    assert (await client.get("/server_info"))["asleep"] is True
    assert (await client.call("GET", "/ready"))[0] == 503
    assert "asleep" in await refusal(client, "/generate", 503, input_ids=[1])
    assert "asleep" in await refusal(client, "/weights_checker", 503, action="checksum")
    assert "asleep" in await client.refused("/begin_weight_update", selector="target")
    model_path = (await client.get("/model_info"))["model_path"]
    update = {"model_path": model_path, "weight_version": "1"}
    assert "asleep" in await client.refused("/update_weights_from_disk", **update)

    await client.post(WAKE)
    assert (await client.get("/server_info"))["asleep"] is False
    rating = {"input_ids": [[1, 2]], "logprob_start_len": [0]}
    assert "holds no weights" in await refusal(client, "/generate", 503, **rating)
    first, _ = halves(weights)
    async with Trainer(client) as trainer:
        await client.post("/begin_weight_update")
        await trainer.send(first, weight_version="2")
        message = await client.refused("/end_weight_update")
        assert "Push all of the weights" in message and "missing" in message
        await client.post("/begin_weight_update")
        delta = trainer.describe(weights, num_changed=[0] * len(weights), base_version=1)
        message = await client.refused("/update_weights_from_distributed", **delta)
        assert "applied to version None" in message
        await client.refused("/end_weight_update")
        await refusal(client, "/generate", 503, input_ids=[1])
    await serve_weights(client, large_model(3), "2")
    answer = await assert_serves(client, large_model(3), [1, 2, 3])
    assert answer["meta_info"]["weight_version"] == "2"


async def test_requests_and_an_open_update_end_when_the_server_sleeps(client: Client) -> None:
    await client.post(WAKE)  # also where this test runs alone, and after one that failed
    await serve_weights(client, large_model(1), "1")
    running = asyncio.create_task(client.generate([1], sampling=LONG))
    await client.until(lambda info: info["num_running"] == 1)
    num_tokens = (await client.get("/server_info"))["num_tokens"]
    await client.until(lambda info: info["num_tokens"] > num_tokens)
    await client.post("/begin_weight_update")
    for _ in range(2):  # a second time changes nothing
        await client.post(SLEEP)
    answer = await running
    assert "sleep" in answer["meta_info"]["finish_reason"]["message"]
    assert len(served_logprobs(answer)) == len(answer["output_ids"]) > 0
    for _ in range(2):
        await client.post(WAKE)
    await serve_weights(client, large_model(1), "3")  # no update is open any more
    await client.post(WAKE)  # nor does it harm a server that serves
    await assert_serves(client, large_model(1), [1, 2, 3])
    assert "tags" in await client.refused(SLEEP, tags=["weights"])


async def test_clients_see_a_server_without_a_version_that_is_up(
    server: Server, tmp_path: Path
) -> None:
    later = save(large_model(4), tmp_path)
    async with run_client(server) as client:
        assert (await client.describe(1.0)).sleep_frees == await client.sleep() == "memory"
        assert await client.version() is None
        async with run_client(server) as other:  # has not seen the server awake
            await other.health()
        with pytest.raises(ServerError, match="asleep"):
            await client.prompt_logprobs([1, 2, 3])
        await client.wake()
        await client.health()
        await client.update_from_disk(later, 5)
        assert await client.version() == 5
    await assert_serves(Client(server.url), large_model(4), [1, 2, 3])
