# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Real servers of every kind keep the promises of `inference/client.py` on generation and pushes.

The trainer's part is played by bare process groups (`programs/bare_trainer.py`).
"""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bare_trainer import (
    KEYS,
    PROBE,
    VOCAB_SIZE,
    RunningServer,
    Trainer,
    assert_serves,
    joined,
    make_bucket,
    make_buckets,
    make_deltas,
    make_model,
    new_versions,
    tempered_logprobs,
    with_trainer,
)
from lone_trainer import LoneTrainer
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.inference.join_check import ServerNeeds, WrongServer, check_server
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.trajectory import TrajectoryWriter
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.group_facts import NCCL_SETTINGS, choose_backend
from torchtitan.grpo.weight_wire.process_group import own_group_facts

LONG_COMPLETION = 400
TEMPERATURE = 0.8

pytestmark = pytest.mark.slow


def sampled(name: str, prompt: list[int], max_new_tokens: int) -> GenerateRequest:
    return GenerateRequest(name, prompt, max_new_tokens, temperature=TEMPERATURE)


@with_trainer
async def test_ids_that_are_no_token_are_not_sampled(server, client, trainer):
    if server.kind == "embedded":
        return  # it reads from its tokenizer which ids are tokens
    await trainer.push(make_buckets(make_model(19), 2), next(new_versions))
    unknown = tuple(token for token in range(VOCAB_SIZE) if token % 4)
    request = replace(sampled("tokens", [11, 12, 13], 64), unknown_ids=unknown)
    generation = await client.generate(request)
    assert not set(generation.token_ids.tolist()) & set(unknown)


@with_trainer
async def test_requests_in_flight_cross_two_pushes_and_end_on_the_new_weights(
    server, client, trainer
):
    by_version, crossed = {}, 0
    # Twice, and again until the server was slower than a push.
    for seed in range(12, 32):
        version = next(new_versions)
        by_version[version] = make_model(seed)
        flights = [] if seed == 12 else await fly(client, version)
        await trainer.push(make_buckets(by_version[version], 3), version)
        for prompt, flight in flights:
            generation = await flight
            assert generation.finish_reason in ("stop", "length")
            assert_segments_are_of_their_versions(prompt, generation, by_version)
            crossed += len(generation.segments) > 1
        await assert_serves(client, by_version[version], version)
        if seed >= 14 and crossed > 0:
            break
    assert crossed > 0, "no request was in flight during a push"


async def fly(
    client: InferenceClient, name: int
) -> list[tuple[list[int], "asyncio.Task[Generation]"]]:
    flights = []
    for token in (20, 30, 40, 50):
        request = sampled(f"flight-{name}-{token}", [token, 4, 5], LONG_COMPLETION)
        flights.append(([token, 4, 5], asyncio.create_task(client.generate(request))))
    # A short request through the same queue: when it is back, the long ones are running.
    await client.generate(sampled(f"pilot-{name}", [3, 2, 4], 8))
    return flights


def assert_segments_are_of_their_versions(
    prompt: list[int], generation: Generation, by_version: dict[int, Qwen3ForCausalLM]
) -> None:
    for segment in generation.segments:
        expected = tempered_logprobs(
            by_version[segment.version], prompt, generation.token_ids, TEMPERATURE
        )
        part = slice(segment.start, segment.end)
        np.testing.assert_allclose(generation.logprobs[part], expected[part], atol=1e-3)


@with_trainer
async def test_wrong_weights_are_refused_and_the_next_push_heals(server, client, trainer):
    for mistake in ("name", "shape", "half-way"):
        model, old, wrong, new = make_model(15), *(next(new_versions) for _ in range(3))
        await trainer.push(make_buckets(model, 2), old)
        name = "up_proj" if mistake == "shape" else "sideways_proj"
        bad = make_bucket({f"model.layers.0.mlp.{name}.weight": torch.zeros(8, 8)})
        before = make_buckets(make_model(17), 4)[:2] if mistake == "half-way" else []
        flight = asyncio.create_task(
            client.generate(
                replace(sampled(f"bystander-{mistake}", [9, 9], LONG_COMPLETION), ignore_eos=True)
            )
        )
        with pytest.raises(ServerError):
            await trainer.push([*before, bad], wrong)
        await trainer.give_up()
        if server.kind == "sglang" and mistake != "name":
            # Found out only as it was loaded: nothing passes for the old version any more.
            assert await client.version() is None
            for request in (flight, client.generate(sampled(f"torn-{mistake}", [5, 6], 8))):
                with pytest.raises(ServerError, match="broke off half-way"):
                    await request
        else:
            assert (await flight).segments[0].version == old
            await assert_serves(client, model, old)
        await trainer.join()
        await trainer.push(make_buckets(model, 2), new)
        await assert_serves(client, model, new)


@with_trainer
async def test_a_cancelled_request_leaves_the_server(server, client, trainer):
    model, version = make_model(18), next(new_versions)
    for attempt in range(20):
        doomed = asyncio.create_task(client.generate(sampled(f"doomed-{attempt}", [9], 700)))
        await client.generate(sampled(f"pilot-{attempt}", [3, 2], 4))
        if doomed.cancel():  # it may have sampled the end of its sequence by now
            break
    with pytest.raises(asyncio.CancelledError):
        await doomed
    # With nothing left to do, SGLang can flush, and vLLM is at rest.
    await trainer.push(make_buckets(model, 2), version)
    await assert_serves(client, model, version)


@with_trainer
async def test_cut_completions_go_on_after_the_server_has_slept(server, client, trainer):
    old, new = next(new_versions), next(new_versions)
    by_version = {old: make_model(27), new: make_model(28)}
    await trainer.push(make_buckets(by_version[old], 2), old)
    config = Rollout(request_timeout_seconds=300.0)
    dispatcher = Dispatcher([client], config, vocab_size=VOCAB_SIZE)
    sampling = Sampling(700, 800, TEMPERATURE, 1.0, -1, (), ignore_eos=True)
    writer = TrajectoryWriter(dispatcher, sampling, config)
    dispatcher.set_version(client.url, old)
    trajectories = [
        writer.start(
            Prompt(i, "", np.array([20 + i, 4, 5], np.int32), {}), dispatcher.servers[client.url]
        )
        for i in range(20)  # four of them wait for one of the 16 places
    ]
    await client.generate(sampled(f"pilot-{old}", [3, 2, 4], 8))
    assert await dispatcher.cut(client.url) == 20

    freed = await client.sleep()
    assert freed == ("memory" if server.kind == "embedded" else "nothing")  # on a CPU
    await client.health()
    await client.wake()
    assert await client.version() == (None if freed == "memory" else old)
    await trainer.push(make_buckets(by_version[new], 2), new)
    await assert_serves(client, by_version[new], new)
    dispatcher.admit(client.url)
    dispatcher.set_version(client.url, new)
    crossed = 0
    for trajectory in trajectories:
        whole = await trajectory.task
        assert (len(whole.token_ids), whole.finish_reason) == (700, "length")
        prompt = trajectory.prompt.token_ids.tolist()
        assert_segments_are_of_their_versions(prompt, whole, by_version)
        crossed += len(whole.segments) > 1
    assert crossed > 0, "no completion has kept its tokens"
    assert dispatcher.attempts.num_failed == 0


@with_trainer
async def test_a_request_that_was_not_cut_does_not_end_a_server_that_sleeps(
    server, client, trainer
):
    if server.kind == "embedded":
        return  # see the unit tests of its sleep
    if server.kind == "sglang":
        # On a CPU its routes free nothing, but an unexpected request in flight ends the server.
        client._frees = lambda info: "memory"
    old, new = next(new_versions), next(new_versions)
    await trainer.push(make_buckets(make_model(29), 2), old)
    flights = [flight for _, flight in await fly(client, old)]
    await client.sleep()
    await client.health()
    await client.wake()
    await trainer.push(make_buckets(make_model(30), 2), new)
    await assert_serves(client, make_model(30), new)
    ended = await asyncio.gather(*flights, return_exceptions=True)
    for end in ended:
        assert isinstance(end, ServerError | Generation), end


@with_trainer
async def test_the_server_says_how_busy_it_is(server, client, trainer):
    await trainer.push(make_buckets(make_model(19), 2), next(new_versions))
    # It was started with room for 16 requests.
    flights = [
        asyncio.create_task(
            client.generate(GenerateRequest(f"busy-{i}", [20 + i, 4, 5], 250, ignore_eos=True))
        )
        for i in range(24)
    ]
    async with asyncio.timeout(60):
        while (load := await client.load()).waiting == 0 or load.running < 16:
            await asyncio.sleep(0.05)
    assert load.running <= 16
    assert load.running + load.waiting <= 24
    assert load.kv_use is not None
    assert 0 < load.kv_use <= 1
    await asyncio.gather(*flights)
    async with asyncio.timeout(60):
        while (load := await client.load()).running > 0:
            await asyncio.sleep(0.05)
    assert load.waiting == 0


async def test_the_server_tells_what_it_is_and_a_run_that_needs_another_one_refuses_it(
    server: RunningServer, tmp_path: Path
) -> None:
    """The server was started with --max-model-len 1024."""
    spec = server.launched.spec
    needs = ServerNeeds(server.kind, spec.model_path, 1024, "training.seq_len = 1024", TEMPERATURE)
    config = json.loads((Path(spec.model_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))

    async def refusal(**changes) -> str:
        changed = replace(needs, **changes)
        client = make_client(changed.kind, server.launched.url, **KEYS)
        try:
            with pytest.raises(WrongServer) as caught:
                await check_server(client, changed)
        finally:
            await client.close()
        return str(caught.value)

    client = server.client()
    try:
        facts, warnings = await check_server(client, needs)
    finally:
        await client.close()
    assert warnings == []
    assert (facts.vocab_size, facts.max_model_len, facts.problems) == (VOCAB_SIZE, 1024, ())
    assert facts.architecture == (None if server.kind == "vllm" else "Qwen3ForCausalLM")
    assert "but this run needs 1025" in await refusal(num_tokens=1025)
    other_model = await refusal(model_path=str(tmp_path))
    assert "vocab_size of the model that it serves is 320" in other_model
    for other in {"embedded", "sglang", "vllm"} - {server.kind}:
        assert f'or set inference.kind = "{server.kind}"' in await refusal(kind=other)


@with_trainer
async def test_the_server_generates_between_the_first_bucket_and_the_commit(
    server, client, trainer
):
    if client.capabilities.stops_for == "transfer":
        assert server.kind == "sglang"
        return
    old, new = next(new_versions), next(new_versions)
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
    if client.capabilities.stops_for == "commit":
        await client.pause()
    await client.commit_update(new)
    await client.resume()
    await assert_serves(client, make_model(4), new)
    assert (await flight).segments[0].version == old


@with_trainer
async def test_a_corrupted_bucket_is_refused_and_the_old_weights_are_served(
    server, client, trainer
):
    old, new = next(new_versions), next(new_versions)
    await trainer.push(make_buckets(make_model(5), 4), old)
    if not client.capabilities.verifies_checksums:
        assert server.kind == "sglang"
        return
    before = await client.prompt_logprobs(PROBE)
    buckets = make_buckets(make_model(6), 4)
    buckets[2].payload[12345] ^= 1
    with pytest.raises(ServerError, match="must have checksum"):
        await trainer.push(buckets, new)
    await trainer.give_up()
    assert await client.prompt_logprobs(PROBE) == before
    await assert_serves(client, make_model(5), old)
    await trainer.join()
    await trainer.push(make_buckets(make_model(6), 4), new)
    await assert_serves(client, make_model(6), new)


def step_from(model: Qwen3ForCausalLM, seed: int) -> Qwen3ForCausalLM:
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


@with_trainer
async def test_a_delta_makes_the_model_bitwise_and_a_wrong_base_is_refused(server, client, trainer):
    versions = [next(new_versions) for _ in range(5)]
    steps = [make_model(7)]
    steps += [step_from(steps[0], 1)]
    steps += [step_from(steps[1], 2)]
    await trainer.push(make_buckets(steps[0], 4), versions[0])
    if not client.capabilities.takes_deltas:
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
    await trainer.give_up()
    assert await client.prompt_logprobs(PROBE) == by_delta
    await trainer.join()
    await trainer.push(make_buckets(steps[2], 4), versions[4])
    assert await client.prompt_logprobs(PROBE) == by_delta
    assert await client.version() == versions[4]


async def test_a_directory_is_served_if_its_checksums_are_right(
    server: RunningServer, tmp_path: Path
) -> None:
    client = server.client()
    good, bad = next(new_versions), next(new_versions)
    tensors = {name: t.contiguous() for name, t in make_model(8).state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(make_model(8).config.to_json_string())
    checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    (tmp_path / "checksums.json").write_text(json.dumps(checksums))
    try:
        if client.capabilities.stops_for != "nothing":
            await client.pause()
        await client.update_from_disk(str(tmp_path), good)
        await client.resume()
        await assert_serves(client, make_model(8), good)
        if client.capabilities.verifies_checksums:
            checksums["lm_head.weight"] ^= 1
            (tmp_path / "checksums.json").write_text(json.dumps(checksums))
            with pytest.raises(ServerError, match="must have checksum"):
                await client.update_from_disk(str(tmp_path), bad)
            await assert_serves(client, make_model(8), good)
    finally:
        await client.resume()
        await client.close()


async def test_a_trainer_that_died_amid_a_push_leaves_the_server_to_the_next(
    server: RunningServer,
) -> None:
    dead_client = server.client()
    dead = Trainer(dead_client)
    await dead.join()
    await dead_client.pause()
    await dead_client.begin_update()
    first = next(iter(dead.groups))
    announced = dead.announce(first, make_buckets(make_model(9), 2)[0], next(new_versions))
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
        version = next(new_versions)
        await trainer.push(make_buckets(make_model(10), 3), version)
        await assert_serves(client, make_model(10), version)
        await client.leave_weight_groups()  # once more than needed: harmless


async def test_a_server_that_stands_still_is_lost_and_gets_the_newest_when_it_goes_on(
    server: RunningServer, tmp_path: Path
) -> None:
    url, folder = server.launched.url, Path(server.launched.spec.model_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = LoneTrainer(
        [url], tmp_path, kind=server.kind, model=folder, keys=KEYS, control_seconds=6.0,
        timeout_seconds=6.0, push_timeout_seconds=15.0,
    )  # fmt: skip
    trainer.version = 1000 * next(new_versions)
    try:
        trainer.publish()
        trainer.wait_served(url)
        os.killpg(server.launched.process.pid, signal.SIGSTOP)
        try:
            trainer.publish()
            trainer.wait_lost(url)
            trainer.publish()
        finally:
            os.killpg(server.launched.process.pid, signal.SIGCONT)
        trainer.wait_served(url)
        assert trainer.versions_told(url)[-2:] == [-1, trainer.version]
        model = make_model(0)
        model.load_state_dict(dict(trainer.weights()))
    finally:
        trainer.publisher.close(15)
        dist.destroy_process_group()

    client = server.client()
    try:
        await assert_serves(client, model, trainer.version)
    finally:
        await client.close()


@with_trainer
async def test_a_server_tells_what_weight_groups_over_nccl_depend_on(server, client, trainer):
    """On a CPU every kind means gloo. Embedded and vLLM workers know all; SGLang tells its device."""
    # What torch compiles for a server is kept for the next one: vLLM compiles some C++ on a CPU.
    assert server.launched.folder is not None
    assert list(server.launched.folder.glob("torchinductor*")) == []
    (facts,) = await client.group_facts()
    assert facts.device == "cpu"
    assert (facts.nccl, facts.gpu) == (None, None)
    if server.kind == "sglang":
        assert (facts.torch, facts.settings) == (None, None)
        assert "SGLang 0.5.23 requires torch 2.14.1 and sets NCCL_CUMEM_ENABLE=0" in facts.hint
    else:
        assert facts.torch is not None
        assert facts.settings == {name: os.environ.get(name, "") for name in NCCL_SETTINGS}
    ours = own_group_facts(torch.device("cpu"))
    assert choose_backend("auto", [ours], [facts]).backend == "gloo"
    refused = choose_backend("nccl", [replace(ours, device="cuda")], [facts])
    assert refused.obstacles == ("NCCL needs a GPU on both sides, but the server runs on a CPU.",)
