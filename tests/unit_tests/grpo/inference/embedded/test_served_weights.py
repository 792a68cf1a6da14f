# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Weights that the embedded server, as a process, receives over real gloo groups and from disk."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_process import (
    Client,
    Tensors,
    Trainer,
    assert_serves,
    checksums,
    checksums_of,
    halves,
    make_model,
    reference_logprobs,
    save,
    serve_weights,
    served_logprobs,
    weights_of,
)

from torchtitan.grpo.inference.embedded.model import load_model
from torchtitan.grpo.weight_wire.adapters import base_digest
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.sparse import encode


@pytest.mark.parametrize("pause", [False, True])
async def test_requests_in_flight_cross_an_update_exactly(client: Client, pause: bool) -> None:
    old, new = make_model(1), make_model(2)
    await serve_weights(client, old, "old")
    prompts = [[i, 3] for i in range(4)]
    first_half, second_half = halves(weights_of(new))
    async with Trainer(client) as trainer:
        # Everything that takes long comes first, because requests that nothing holds back soon end.
        await client.post("/begin_weight_update")
        await trainer.send(first_half, sequence=0)
        sampling = {"max_new_tokens": 1600}
        tasks = [asyncio.create_task(client.generate(p, sampling=sampling)) for p in prompts]
        await client.until(lambda info: info["num_running"] == 4)
        if pause:
            await client.post("/pause_generation", mode="retract")
        await trainer.send(second_half, sequence=1, weight_version="new")
        assert (await client.get("/model_info"))["weight_version"] == "old"
        await client.post("/end_weight_update")
        await client.post("/continue_generation")
        answers = await asyncio.gather(*tasks)
    for prompt, answer in zip(prompts, answers, strict=True):
        first, second = answer["meta_info"]["weight_versions"]
        cut = first["end"]
        assert (first["version"], second["version"]) == ("old", "new")
        assert (first["start"], second["start"], second["end"]) == (0, cut, 1600)
        served = served_logprobs(answer)
        before = reference_logprobs(old, prompt, answer["output_ids"])
        after = reference_logprobs(new, prompt, answer["output_ids"])
        torch.testing.assert_close(served[:cut], before[:cut], atol=1e-4, rtol=0)
        torch.testing.assert_close(served[cut:], after[cut:], atol=1e-4, rtol=0)


async def test_half_an_update_is_never_served(client: Client) -> None:
    await serve_weights(client, make_model(1), "whole")
    held = await checksums(client)
    async with Trainer(client) as trainer:
        await client.post("/begin_weight_update")
        assert "open" in await client.refused("/begin_weight_update")
        await trainer.send(halves(weights_of(make_model(2)))[0])
        await assert_serves(client, make_model(1), [1, 2])
        # As a trainer does that came back after a crash.
        assert "Nothing was changed" in await client.refused("/end_weight_update")
    assert await checksums(client) == held
    assert (await client.get("/model_info"))["weight_version"] == "whole"


async def test_a_chunk_that_does_not_fit_is_refused_before_any_broadcast(client: Client) -> None:
    held = await checksums(client)
    good = weights_of(make_model(3))
    name = "lm_head.weight"
    route = "/update_weights_from_distributed"
    async with Trainer(client) as trainer:
        body = trainer.describe(good, weight_version="3")
        assert "No weight update is open" in await client.refused(route, **body)
        bad: list[tuple[Tensors, dict[str, Any], str]] = [
            ({"lm_head.wait": good[name]}, {}, "not the model's"),
            ({name: good[name][:-1]}, {}, "shape must be [40, 32]"),
            ({name: good[name].long()}, {}, "dtypes must be among"),
            (good, {"group_name": "nobody"}, "does not exist"),
            (good, {"load_format": "direct"}, "load_format"),
            (good, {"sequence": None}, "sequence must be the number"),
            (good, {"shapes": 3}, "shapes"),
        ]
        for tensors, more, message in bad:
            await client.post("/begin_weight_update")
            body = {**trainer.describe(tensors, weight_version="3"), **more}
            assert message in await client.refused(route, **body)
            assert message in await client.refused("/end_weight_update")
    assert await checksums(client) == held


async def test_buckets_that_overtook_one_another_are_received_in_their_order(
    client: Client,
) -> None:
    """gloo would end the server if the bytes of one were received as those of the other."""
    new = weights_of(make_model(4))
    route = "/update_weights_from_distributed"
    async with Trainer(client) as trainer:
        await client.post("/begin_weight_update")
        first, second = (
            trainer.describe(half, sequence=i, weight_version="4")
            for i, half in enumerate(halves(new))
        )
        early = asyncio.create_task(client.post(route, **second))
        await client.generate([1])  # by then the server has been asked
        late = asyncio.create_task(client.post(route, **first))
        wires = [torch.cat([t.reshape(-1) for t in half.values()]) for half in halves(new)]
        assert wires[0].numel() != wires[1].numel()
        await asyncio.to_thread(trainer.broadcast, [w.view(torch.uint8) for w in wires])
        await asyncio.gather(early, late)
        await client.post("/end_weight_update")
    assert await checksums(client) == checksums_of(new)


async def test_the_server_generates_while_it_waits_for_a_broadcast_and_can_be_freed(
    client: Client,
) -> None:
    async with Trainer(client) as trainer:
        await client.post("/begin_weight_update")
        body = trainer.describe(weights_of(make_model(3)))
        waiting = asyncio.create_task(client.refused("/update_weights_from_distributed", **body))
        assert len((await client.generate([1]))["output_ids"]) == 8
        assert (await client.call("GET", "/ready"))[0] == 200
        assert not waiting.done()
        assert "under way" in await client.refused("/end_weight_update")
        await client.post("/leave_weight_groups")
        assert "was left" in await waiting
    await serve_weights(client, make_model(1), "after")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_delta_is_exact_in_a_model_that_holds_its_dtype(
    client: Client, dtype: torch.dtype
) -> None:
    old = {name: tensor.to(dtype) for name, tensor in weights_of(make_model(12)).items()}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["lm_head.weight"][3, 5] = 0.5
    new["model.norm.weight"][:] = -0.25
    wires = [
        torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()])
        for tensors in (old, new)
    ]
    numels = [tensor.numel() for tensor in old.values()]
    payload, num_changed = encode(*wires, numels, dtype.itemsize)
    route = "/update_weights_from_distributed"
    async with Trainer(client) as trainer:
        await client.post("/begin_weight_update")
        await trainer.send(old, weight_version="70")
        await client.post("/end_weight_update")
        body = trainer.describe(
            new,
            num_changed=list(num_changed),
            checksums=[tensor_checksum(tensor) for tensor in new.values()],
            weight_version="71",
        )
        await client.post("/begin_weight_update")
        assert "base_version 69" in await client.refused(route, **body, base_version=69)
        await client.refused("/end_weight_update")
        await client.post("/begin_weight_update")
        other = "float16" if dtype is torch.bfloat16 else "int32"
        wrong = {**body, "dtypes": [other] * len(new), "base_version": 70}
        await client.refused(route, **wrong)
        await client.refused("/end_weight_update")
        await client.post("/begin_weight_update")
        sent = asyncio.create_task(client.post(route, **body, base_version=70))
        await asyncio.to_thread(trainer.broadcast, [payload])
        await sent
        await client.post("/end_weight_update")
    assert await checksums(client) == checksums_of({n: t.float() for n, t in new.items()})
    assert (await client.get("/model_info"))["weight_version"] == "71"


async def test_a_checkpoint_is_served_from_disk_whole_or_not_at_all(
    client: Client, tmp_path: Path
) -> None:
    new = make_model(6)
    path = save(new, tmp_path / "six")
    await client.post("/update_weights_from_disk", model_path=path, weight_version="6")
    answer = await assert_serves(client, new, [7, 8])
    assert answer["meta_info"]["weight_version"] == "6"
    route = "/update_weights_from_disk"
    message = await client.refused(route, model_path=str(tmp_path), weight_version="7")
    assert "Nothing was changed" in message and "safetensors" in message
    await client.post("/update_weight_version", new_version="six")
    assert (await client.get("/model_info"))["weight_version"] == "six"


async def test_adapters_are_added_to_the_directory_whatever_the_server_has_served_before(
    client: Client, model_path: str
) -> None:
    layer = "model.layers.1.self_attn"

    def adapter(target: str, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        rows, columns = make_model(1).get_submodule(f"{layer}.{target}").weight.shape
        stem = f"base_model.model.{layer}.{target}"
        return {
            f"{stem}.lora_A.weight": torch.randn(2, columns, generator=generator),
            f"{stem}.lora_B.weight": torch.randn(rows, 2, generator=generator),
        }

    def adapted(target: str, factors: Tensors) -> dict[str, str]:
        weights = weights_of(load_model(model_path, "cpu", "float32"))
        rows, columns = factors.values()
        weights[f"{layer}.{target}.weight"].addmm_(columns, rows, alpha=0.5)
        return checksums_of(weights)

    # Another run pushed whole weights, and a third one adapters of another layer.
    await serve_weights(client, make_model(7), "7")
    for version, target in enumerate(("o_proj", "q_proj", "q_proj"), start=8):
        if version == 10:  # the weights are gone
            await client.post("/release_memory_occupation")
            await client.post("/resume_memory_occupation")
        factors = adapter(target, version)
        async with Trainer(client) as trainer:
            await client.post("/begin_weight_update")
            described = {"lora_scale": 0.5, "lora_base": base_digest(model_path)}
            await trainer.send(factors, weight_version=str(version), **described)
            await client.post("/end_weight_update")
        assert await checksums(client) == adapted(target, factors)
