# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What every kind of real server must do in a push, as `inference/client.py` promises.

The trainer's part is played here by bare process groups: two source ranks, each with half
of the weights and a group of its own.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from torchtitan.grpo.inference.client import (
    BucketSpec,
    InferenceClient,
    ServerError,
    WeightGroupInfo,
)
from torchtitan.grpo.inference.factory import make_client
from torchtitan.grpo.inference.launch import (
    LaunchedServer,
    ServerSpec,
    free_ports,
    start_server,
    wait_until_up,
)
from torchtitan.grpo.types import GenerateRequest, ServerKind
from torchtitan.grpo.weight_sync import sparse
from torchtitan.grpo.weight_sync.checksum import tensor_checksum
from torchtitan.grpo.weight_sync.process_group import create_weight_group, destroy_weight_group

REPOSITORY = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 320
TIMEOUT = 60.0
PROBE = [7, 8, 9, 50, 60, 70, 80, 90, *range(100, 140), 7, 8, 9]
KEYS = {"api_key": "generation-key", "admin_key": "control-key"}
_names = (f"contract-{i}" for i in itertools.count())
_versions = itertools.count(1)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.08,
    )
    return Qwen3ForCausalLM(config).float().eval()


def save_model(model: Qwen3ForCausalLM, directory: Path) -> None:
    model.save_pretrained(directory)
    vocabulary = {f"w{i}": i for i in range(VOCAB_SIZE)}  # SGLang warms up on a text
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(directory)


@torch.no_grad()
def expected_logprobs(model: Qwen3ForCausalLM) -> np.ndarray:
    ids = torch.tensor([PROBE])
    logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()


@dataclass
class Bucket:
    spec: BucketSpec
    payload: torch.Tensor


def make_bucket(tensors: dict[str, torch.Tensor], **more: Any) -> Bucket:
    spec = BucketSpec(
        names=tuple(tensors),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors.values()),
        shapes=tuple(tuple(t.shape) for t in tensors.values()),
        checksums=tuple(tensor_checksum(t) for t in tensors.values()),
        **more,
    )
    parts = [t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()]
    return Bucket(spec, torch.cat(parts))


def make_buckets(model: Qwen3ForCausalLM, num_buckets: int) -> list[Bucket]:
    items = list(model.state_dict().items())
    size = -(-len(items) // num_buckets)
    return [make_bucket(dict(items[i : i + size])) for i in range(0, len(items), size)]


def make_deltas(old: Qwen3ForCausalLM, new: Qwen3ForCausalLM, base: int) -> list[Bucket]:
    deltas = []
    for before, after in zip(make_buckets(old, 4), make_buckets(new, 4), strict=True):
        numels = [int(np.prod(shape)) for shape in after.spec.shapes]
        payload, num_changed = sparse.encode(before.payload, after.payload, numels, 4)
        spec = replace(after.spec, num_changed=num_changed, base_version=base)
        deltas.append(Bucket(spec, payload))
    return deltas


@dataclass
class RunningServer:
    kind: ServerKind
    launched: LaunchedServer

    def client(self) -> InferenceClient:
        return make_client(self.kind, self.launched.url, request_timeout_seconds=120, **KEYS)


@pytest.fixture(scope="module")
def server(server_kind: tuple[ServerKind, str | None], tmp_path_factory) -> Iterator[RunningServer]:
    kind, python = server_kind
    folder = tmp_path_factory.mktemp(kind)
    save_model(make_model(seed=0), folder / "model")
    spec = ServerSpec(
        kind=kind,
        model_path=str(folder / "model"),
        port=free_ports(1)[0],
        device="cpu",
        dtype="float32",
        max_model_len=1024,
        max_running_requests=16,
        python=python,
        **KEYS,
    )
    launched = start_server(spec, folder / "server.log")
    running = RunningServer(kind, launched)

    async def wait() -> None:
        client = running.client()
        try:
            await wait_until_up([client], [launched], timeout_seconds=180)
        finally:
            await client.close()

    try:
        asyncio.run(wait())
        yield running
        assert launched.process.poll() is None, launched.log_tail()
    finally:
        launched.stop()


class Trainer:
    """Two source ranks, in one weight group each with the server."""

    def __init__(self, client: InferenceClient) -> None:
        self.client = client
        self.groups: dict[str, dist.ProcessGroup] = {}

    async def join(self) -> None:
        for _ in range(2):
            store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
            name = next(_names)
            info = WeightGroupInfo(
                "127.0.0.1", store.port, 1, 2, name, "gloo", TIMEOUT, deltas=True
            )
            arguments = ("127.0.0.1", store.port, 0, 2, name, "gloo", TIMEOUT)
            ours = asyncio.create_task(
                asyncio.to_thread(create_weight_group, *arguments, store=store)
            )
            await self.client.join_weight_group(info)
            self.groups[name] = await ours

    def destroy(self) -> None:
        for group in self.groups.values():
            destroy_weight_group(group)
        self.groups = {}

    async def broadcast(self, name: str, bucket: Bucket) -> None:
        await asyncio.to_thread(dist.broadcast, bucket.payload, 0, group=self.groups[name])

    def announce(
        self, name: str, bucket: Bucket, version: int, last: bool = False
    ) -> "asyncio.Task[None]":
        return asyncio.create_task(
            self.client.receive_bucket(bucket.spec, group_name=name, last=last, version=version)
        )

    async def send(self, buckets: list[Bucket], version: int) -> None:
        """The source ranks take turns; the next bucket is announced while one travels."""
        names = list(self.groups)
        announced = [
            self.announce(names[i % 2], bucket, version, last=i == len(buckets) - 1)
            for i, bucket in enumerate(buckets)
        ]

        async def broadcast_all() -> None:
            for i, bucket in enumerate(buckets):
                await self.broadcast(names[i % 2], bucket)

        ours = asyncio.create_task(broadcast_all())
        done, _ = await asyncio.wait({ours, *announced}, return_when=asyncio.FIRST_EXCEPTION)
        failures = [error for task in announced if task in done and (error := task.exception())]
        if failures:
            await self.client.leave_weight_groups()  # a broadcast that it waits for ends
            await asyncio.wait({ours, *announced})
            ours.exception()
            raise failures[0]
        await asyncio.gather(ours, *announced)

    async def push(self, buckets: list[Bucket], version: int) -> float:
        """As a lane pushes; returns how long the server stood still."""
        client, started = self.client, time.monotonic()
        if client.stops_for == "transfer":
            await client.pause()
        await client.begin_update()
        await self.send(buckets, version)
        if client.stops_for == "commit":
            started = time.monotonic()
            await client.pause()
        stood_still = await client.commit_update(version)
        if client.stops_for != "nothing":
            await client.resume()
            stood_still = time.monotonic() - started
        assert await client.version() == version
        return stood_still


@asynccontextmanager
async def joined(server: RunningServer) -> AsyncIterator[tuple[InferenceClient, Trainer]]:
    client = server.client()
    trainer = Trainer(client)
    try:
        await trainer.join()
        yield client, trainer
    finally:
        await client.leave_weight_groups()
        await client.resume()
        trainer.destroy()
        await client.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(150):
            await test()

    asyncio.run(bounded())


async def assert_serves(client: InferenceClient, model: Qwen3ForCausalLM, version: int) -> None:
    served = await client.prompt_logprobs(PROBE)
    np.testing.assert_allclose(served, expected_logprobs(model), atol=1e-4, rtol=0)
    # Once more: a prefix that is in the cache by now must not hide its logprobs.
    np.testing.assert_allclose(await client.prompt_logprobs(PROBE), served, atol=1e-5, rtol=0)
    assert await client.version() == version


def test_two_source_ranks_push_a_model_whole(server: RunningServer) -> None:
    async def test() -> None:
        async with joined(server) as (client, trainer):
            for seed in (1, 2):
                model, version = make_model(seed), next(_versions)
                seconds = await trainer.push(make_buckets(model, 5), version)
                print(f"{server.kind} stood still for {1e3 * seconds:.1f} ms")
                assert seconds > 0
                await assert_serves(client, model, version)

    run(test)


def test_the_server_generates_between_the_first_bucket_and_the_commit(
    server: RunningServer,
) -> None:
    async def test() -> None:
        async with joined(server) as (client, trainer):
            if client.stops_for == "transfer":
                assert server.kind == "sglang"
                return
            old, new = next(_versions), next(_versions)
            await trainer.push(make_buckets(make_model(3), 2), old)
            flight = asyncio.create_task(
                client.generate(GenerateRequest(f"flight-{new}", [5, 6], 700, ignore_eos=True))
            )
            buckets = make_buckets(make_model(4), 2)
            first, second = trainer.groups
            await client.begin_update()
            announced = [
                trainer.announce(first, buckets[0], new),
                trainer.announce(second, buckets[1], new, last=True),
            ]
            await trainer.broadcast(first, buckets[0])
            await announced[0]
            # One bucket has come and the other is waited for.
            for i in range(3):
                request = GenerateRequest(f"between-{new}-{i}", [9, i], 8, ignore_eos=True)
                segments = (await client.generate(request)).segments
                assert [segment.version for segment in segments] == [old]
            await assert_serves(client, make_model(3), old)
            await trainer.broadcast(second, buckets[1])
            await asyncio.gather(*announced)
            if client.stops_for == "commit":
                await client.pause()
            await client.commit_update(new)
            await client.resume()
            await assert_serves(client, make_model(4), new)
            assert (await flight).segments[0].version == old

    run(test)


def test_a_corrupted_bucket_is_refused_and_the_old_weights_are_served(
    server: RunningServer,
) -> None:
    async def test() -> None:
        async with joined(server) as (client, trainer):
            old, new = next(_versions), next(_versions)
            await trainer.push(make_buckets(make_model(5), 4), old)
            if not client.verifies_checksums:
                assert server.kind == "sglang"
                return
            before = await client.prompt_logprobs(PROBE)
            buckets = make_buckets(make_model(6), 4)
            buckets[2].payload[12345] ^= 1
            with pytest.raises(ServerError, match="must have checksum"):
                await trainer.push(buckets, new)
            await client.leave_weight_groups()
            await client.resume()
            assert await client.prompt_logprobs(PROBE) == before
            await assert_serves(client, make_model(5), old)
            trainer.destroy()
            await trainer.join()
            await trainer.push(make_buckets(make_model(6), 4), new)
            await assert_serves(client, make_model(6), new)

    run(test)


def step_from(model: Qwen3ForCausalLM, seed: int) -> Qwen3ForCausalLM:
    """A model of which few elements of most tensors, and all of one, are new."""
    torch.manual_seed(seed)
    new = make_model(0)
    new.load_state_dict(model.state_dict())
    with torch.no_grad():
        for i, parameter in enumerate(new.parameters()):
            if i % 3:
                chosen = torch.rand_like(parameter) < 0.02
                parameter[chosen] += 0.1 * torch.randn_like(parameter)[chosen]
        new.lm_head.weight.mul_(1.01)
    return new


def test_a_delta_makes_the_model_bitwise_and_a_wrong_base_is_refused(
    server: RunningServer,
) -> None:
    async def test() -> None:
        async with joined(server) as (client, trainer):
            versions = [next(_versions) for _ in range(5)]
            steps = [make_model(7)]
            steps += [step_from(steps[0], 1)]
            steps += [step_from(steps[1], 2)]
            await trainer.push(make_buckets(steps[0], 4), versions[0])
            if not client.takes_deltas:
                assert server.kind == "sglang"
                return
            for i in (1, 2):
                deltas = make_deltas(steps[i - 1], steps[i], versions[i - 1])
                whole = sum(b.payload.numel() for b in make_buckets(steps[i], 4))
                assert sum(d.payload.numel() for d in deltas) < whole / 2
                await trainer.push(deltas, versions[i])
                await assert_serves(client, steps[i], versions[i])
            by_delta = await client.prompt_logprobs(PROBE)
            with pytest.raises(ServerError, match="A delta must be against"):
                await trainer.push(make_deltas(steps[1], steps[2], versions[1]), versions[3])
            await client.leave_weight_groups()
            await client.resume()
            assert await client.prompt_logprobs(PROBE) == by_delta
            trainer.destroy()
            await trainer.join()
            await trainer.push(make_buckets(steps[2], 4), versions[4])
            assert await client.prompt_logprobs(PROBE) == by_delta
            assert await client.version() == versions[4]

    run(test)


def test_a_directory_is_served_if_its_checksums_are_right(
    server: RunningServer, tmp_path: Path
) -> None:
    async def test() -> None:
        client = server.client()
        good, bad = next(_versions), next(_versions)
        tensors = {name: t.contiguous() for name, t in make_model(8).state_dict().items()}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(make_model(8).config.to_json_string())
        checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
        (tmp_path / "checksums.json").write_text(json.dumps(checksums))
        try:
            for path, version in ((tmp_path, good), (tmp_path, bad)):
                if version == bad and not client.verifies_checksums:
                    assert server.kind == "sglang"
                    break
                if version == bad:
                    checksums["lm_head.weight"] ^= 1
                    (path / "checksums.json").write_text(json.dumps(checksums))
                    with pytest.raises(ServerError, match="must have checksum"):
                        await client.update_from_disk(str(path), version)
                else:
                    if client.stops_for != "nothing":
                        await client.pause()
                    await client.update_from_disk(str(path), version)
                    await client.resume()
                await assert_serves(client, make_model(8), good)
        finally:
            await client.resume()
            await client.close()

    run(test)


def test_a_trainer_that_died_amid_a_push_leaves_the_server_to_the_next(
    server: RunningServer,
) -> None:
    async def test() -> None:
        dead_client = server.client()
        dead = Trainer(dead_client)
        await dead.join()
        await dead_client.pause()
        await dead_client.begin_update()
        first = next(iter(dead.groups))
        announced = dead.announce(first, make_buckets(make_model(9), 2)[0], next(_versions))
        announced.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait({announced}, timeout=1.0)
        announced.cancel()
        dead.destroy()
        await dead_client.close()
        client = server.client()
        await client.leave_weight_groups()
        await client.resume()
        await client.close()
        async with joined(server) as (client, trainer):
            version = next(_versions)
            await trainer.push(make_buckets(make_model(10), 3), version)
            await assert_serves(client, make_model(10), version)
            await client.leave_weight_groups()  # once more than needed: harmless

    run(test)
