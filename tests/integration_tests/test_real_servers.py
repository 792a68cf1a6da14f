# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Real servers of every kind through the clients: generation, and weights in flight."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from torchtitan.grpo.inference.client import BucketSpec, InferenceClient, ServerError
from torchtitan.grpo.inference.factory import make_client
from torchtitan.grpo.inference.launch import (
    LaunchedServer,
    ServerSpec,
    free_ports,
    start_server,
    wait_until_up,
)
from torchtitan.grpo.types import GenerateRequest, Generation, ServerKind
from torchtitan.grpo.weight_sync.connection import Bucket, ServerConnection

REPOSITORY = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 320
LONG_COMPLETION = 400
KEYS = {"api_key": "generation-key", "admin_key": "control-key"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # not hidden_size / heads
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.08,  # large enough for weights to matter
    )
    return Qwen3ForCausalLM(config).float().eval()


def save_model(model: Qwen3ForCausalLM, directory: Path) -> None:
    model.save_pretrained(directory)
    vocabulary = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(directory)


def make_buckets(model: Qwen3ForCausalLM, num_buckets: int) -> list[Bucket]:
    items = [(name, p.detach().contiguous()) for name, p in model.state_dict().items()]
    size = -(-len(items) // num_buckets)
    return [make_bucket(items[i : i + size]) for i in range(0, len(items), size)]


def make_bucket(items: list[tuple[str, torch.Tensor]]) -> Bucket:
    return Bucket(
        BucketSpec(
            names=tuple(name for name, _ in items),
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for _, t in items),
            shapes=tuple(tuple(t.shape) for _, t in items),
        ),
        torch.cat([t.flatten().view(torch.uint8) for _, t in items]),
    )


@torch.no_grad()
def reference_logprobs(
    model: Qwen3ForCausalLM, prompt: list[int], completion: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """[completion_len] of the completion's tokens, by transformers."""
    ids = torch.tensor([prompt + completion.tolist()])
    logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1] / temperature, -1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


@dataclass
class RunningServer:
    kind: ServerKind
    launched: LaunchedServer
    model: Qwen3ForCausalLM

    def client(self) -> InferenceClient:
        return make_client(self.kind, self.launched.url, request_timeout_seconds=120, **KEYS)


@pytest.fixture(scope="module")
def server(server_kind: tuple[ServerKind, str | None], tmp_path_factory) -> Iterator[RunningServer]:
    """One server for the tests of its kind: they leave it pushed, resumed and idle."""
    kind, python = server_kind
    folder = tmp_path_factory.mktemp(kind)
    model = make_model(seed=0)
    save_model(model, folder / "model")
    spec = ServerSpec(
        kind=kind,
        model_path=str(folder / "model"),
        port=free_ports(1)[0],
        device="cpu",
        dtype="float32",
        max_model_len=768,
        max_running_requests=16,
        python=python,
        **KEYS,
    )
    launched = start_server(spec, folder / "server.log")
    running = RunningServer(kind, launched, model)
    try:
        asyncio.run(_wait_until_up(running))
        yield running
        assert launched.process.poll() is None, launched.log_tail()
    finally:
        launched.stop()


async def _wait_until_up(running: RunningServer) -> None:
    client = running.client()
    try:
        await wait_until_up([client], [running.launched], timeout_seconds=180)
    finally:
        await client.close()


@asynccontextmanager
async def connected(server: RunningServer):
    client = server.client()
    connection = ServerConnection(
        client,
        master_address="127.0.0.1",
        backend="gloo",
        timeout_seconds=30,
        device=torch.device("cpu"),
    )
    try:
        await connection.join()
        yield client, connection
    finally:
        await connection.close()
        await client.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(200):
            await test()

    asyncio.run(bounded())


def greedy(name: str, prompt: list[int], max_new_tokens: int = 24) -> GenerateRequest:
    return GenerateRequest(name, prompt, max_new_tokens, temperature=0.0)


def sampled(name: str, prompt: list[int], max_new_tokens: int) -> GenerateRequest:
    return GenerateRequest(name, prompt, max_new_tokens, temperature=0.8)


async def assert_serves(client: InferenceClient, model: Qwen3ForCausalLM, version: int) -> None:
    prompts = [[7, 8, 9], [50, 60, 70, 80, 90], list(range(100, 140))]
    requests = [greedy(f"check-{version}-{i}", prompt) for i, prompt in enumerate(prompts)]
    generations = await asyncio.gather(*(client.generate(request) for request in requests))
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = reference_logprobs(model, prompt, generation.token_ids)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)
        assert {segment.version for segment in generation.segments} == {version}
    assert await client.version() == version


async def push_in_flight(
    client: InferenceClient,
    connection: ServerConnection,
    model: Qwen3ForCausalLM,
    version: int,
) -> dict[int, Generation]:
    """Pushes while long requests run; returns their prompts' first tokens and answers."""
    prompts = {token: [token, 4, 5] for token in (20, 30, 40, 50)}
    flights = {
        token: asyncio.create_task(
            client.generate(sampled(f"flight-{version}-{token}", prompt, LONG_COMPLETION))
        )
        for token, prompt in prompts.items()
    }
    # A short request through the same queue: when it is back, the long ones are running.
    await client.generate(greedy(f"pilot-{version}", [3, 2, 4], 8))
    report = await connection.push(version, make_buckets(model, 3))
    assert report.version == version
    assert report.num_bytes == 4 * sum(p.numel() for p in model.parameters())
    return {token: await flight for token, flight in flights.items()}


def test_sampled_logprobs_are_those_of_the_tempered_distribution(server: RunningServer) -> None:
    async def test() -> None:
        async with connected(server) as (client, connection):
            await connection.push(1, make_buckets(server.model, 2))
            generation = await client.generate(sampled("tempered", [11, 12, 13], 64))
            expected = reference_logprobs(server.model, [11, 12, 13], generation.token_ids, 0.8)
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)

    run(test)


def test_requests_in_flight_cross_two_pushes_and_end_on_the_new_weights(
    server: RunningServer,
) -> None:
    async def test() -> None:
        async with connected(server) as (client, connection):
            old = server.model
            await connection.push(1, make_buckets(old, 2))
            crossed = 0
            for version in (2, 3):
                new = make_model(seed=version)
                flights = await push_in_flight(client, connection, new, version)
                for token, generation in flights.items():
                    assert generation.finish_reason in ("stop", "length")
                    crossed += check_segments([token, 4, 5], generation, old, new, version)
                await assert_serves(client, new, version)
                old = new
            assert crossed > 0, "no request was in flight during a push"

    run(test)


def check_segments(
    prompt: list[int],
    generation: Generation,
    old: Qwen3ForCausalLM,
    new: Qwen3ForCausalLM,
    version: int,
) -> bool:
    """Each segment's logprobs are those of its own weights over all that came before."""
    for segment in generation.segments:
        model = {version - 1: old, version: new}[segment.version]
        expected = reference_logprobs(model, prompt, generation.token_ids, 0.8)
        part = slice(segment.start, segment.end)
        np.testing.assert_allclose(generation.logprobs[part], expected[part], atol=1e-3)
    return len(generation.segments) > 1


@pytest.mark.parametrize("mistake", ["name", "shape"])
def test_wrong_weights_are_refused_and_the_next_push_heals(
    server: RunningServer, mistake: str
) -> None:
    async def test() -> None:
        async with connected(server) as (client, connection):
            await connection.push(5, make_buckets(server.model, 2))
            wrong = {
                "name": ("model.layers.0.mlp.sideways_proj.weight", torch.zeros(8, 8)),
                "shape": ("model.layers.0.mlp.up_proj.weight", torch.zeros(8, 8)),
            }[mistake]
            flight = asyncio.create_task(
                client.generate(sampled(f"bystander-{mistake}", [9, 9], LONG_COMPLETION))
            )
            with pytest.raises(ServerError):
                await connection.push(6, [make_bucket([wrong])])
            assert not connection.is_joined
            if server.kind == "sglang" and mistake == "shape":
                # Found out only as it was loaded: nothing passes for version 5 any more.
                assert await client.version() is None
                with pytest.raises(ServerError, match="broke off half-way"):
                    await flight
            else:
                assert (await flight).segments[0].version == 5
                await assert_serves(client, server.model, 5)
            await connection.join()
            await connection.push(7, make_buckets(server.model, 2))
            await assert_serves(client, server.model, 7)

    run(test)


def test_a_push_that_breaks_off_half_way_is_never_served_as_a_version(
    server: RunningServer,
) -> None:
    async def test() -> None:
        async with connected(server) as (client, connection):
            await connection.push(8, make_buckets(server.model, 2))
            is_staged = client.stops_for != "transfer"
            other = make_buckets(make_model(seed=8), 4)
            bad = make_bucket([("model.layers.3.mlp.sideways_proj.weight", torch.zeros(4))])
            with pytest.raises(ServerError):
                await connection.push(9, [other[0], other[1], bad])
            if is_staged:
                await assert_serves(client, server.model, 8)
            else:
                assert await client.version() is None
                with pytest.raises(ServerError, match="broke off half-way"):
                    await client.generate(greedy("torn", [5, 6, 7]))
            await connection.join()
            await connection.push(10, make_buckets(server.model, 2))
            await assert_serves(client, server.model, 10)

    run(test)


def test_leaving_and_joining_again_works(server: RunningServer) -> None:
    async def test() -> None:
        for version in (11, 12):
            async with connected(server) as (client, connection):
                await connection.push(version, make_buckets(server.model, 3))
                await client.leave_weight_groups()  # once more than needed: harmless
                await assert_serves(client, server.model, version)

    run(test)


def test_a_trainer_that_dies_amid_an_update_does_not_block_its_successor(
    server: RunningServer,
) -> None:
    async def test() -> None:
        async with connected(server) as (client, _connection):
            await client.pause()
            await client.begin_update()  # and then nothing more
        async with connected(server) as (client, connection):
            await connection.push(13, make_buckets(server.model, 3))
            await assert_serves(client, server.model, 13)

    run(test)


def test_a_cancelled_request_leaves_the_server(server: RunningServer) -> None:
    async def test() -> None:
        async with connected(server) as (client, connection):
            await connection.push(14, make_buckets(server.model, 2))
            doomed = asyncio.create_task(client.generate(sampled("doomed", [9], 700)))
            await client.generate(greedy("pilot", [3, 2], 4))
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            # With nothing left to do, SGLang can flush, and vLLM is at rest.
            await connection.push(15, make_buckets(server.model, 2))
            await assert_serves(client, server.model, 15)

    run(test)


def test_the_wrong_key_is_refused(server: RunningServer) -> None:
    async def test() -> None:
        client = make_client(server.kind, server.launched.url, api_key="wrong", admin_key="wrong")
        try:
            with pytest.raises(ServerError, match=r"inference\.api_key"):
                await client.generate(greedy("unwanted", [5]))
        finally:
            await client.close()

    run(test)


def test_no_thread_of_a_closed_connection_is_left(server: RunningServer) -> None:
    async def test() -> None:
        async with connected(server) as (_client, connection):
            await connection.push(16, make_buckets(server.model, 2))
            names = [thread.name for thread in threading.enumerate()]
            assert any(name.startswith("weight-push-") for name in names)

    run(test)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("weight-push-")]
