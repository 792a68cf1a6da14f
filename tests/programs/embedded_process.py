# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An embedded server as a process of its own, a client, and a trainer that sends it weights."""

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import engine_harness
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models

from torchtitan.grpo.system.child import start_child
from torchtitan.grpo.system.light_start import LIGHT_PYTHON
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.process_group import create_weight_group, destroy_weight_group
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

VOCAB = 40
EOS = 39
TIMEOUT = 240.0
Tensors = dict[str, torch.Tensor]
_names = (f"test-group-{i}" for i in itertools.count())


def make_model(seed: int) -> Any:
    return engine_harness.make_model(
        "qwen3", seed, vocab_size=VOCAB, eos_token_id=EOS, max_position_embeddings=4096
    )


def reference_logprobs(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(output).unsqueeze(-1)).squeeze(-1)


def served_logprobs(answer: dict[str, Any]) -> torch.Tensor:
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == answer["output_ids"]
    return torch.tensor([entry[0] for entry in entries])


def save(model: Any, directory: Path) -> str:
    model.save_pretrained(directory)
    vocab = {chr(ord("0") + i): i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(vocab, unk_token="0")).save(str(directory / "tokenizer.json"))
    return str(directory)


class Server:
    def __init__(self, folder: Path, model_path: str, *arguments: str) -> None:
        port_file = folder / "port"
        self.log = folder / "log"
        module = "torchtitan.grpo.inference.embedded"
        # With the usual limit of open files, whatever that of the tests is.
        command = ["bash", "-c", 'ulimit -Sn 1024; exec "$@"', "_", *LIGHT_PYTHON, module]
        command += ["--model-path", model_path, "--port", "0"]
        command += ["--port-file", str(port_file), "--device", "cpu", "--seed", "0", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = start_child(command, env=environment, log_file=self.log)
        self._port_file = port_file

    def wait(self) -> "Server":
        async def poll() -> int:
            while not self._port_file.exists():
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.05)
            return int(self._port_file.read_text())

        self.port = asyncio.run(asyncio.wait_for(poll(), TIMEOUT))
        self.url = f"http://127.0.0.1:{self.port}"
        return self


class Client:
    def __init__(self, url: str) -> None:
        self.url = url

    async def call(self, method: str, route: str, body: Any = None) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as session,
            session.request(method, self.url + route, json=body) as response,
        ):
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text

    async def post(self, route: str, **body: Any) -> dict[str, Any]:
        status, answer = await self.call("POST", route, body)
        assert status == 200, answer
        return answer

    async def refused(self, route: str, **body: Any) -> str:
        status, answer = await self.call("POST", route, body)
        assert status == 400, answer
        return answer["message"]

    async def get(self, route: str) -> dict[str, Any]:
        status, answer = await self.call("GET", route)
        assert status == 200, answer
        return answer

    async def generate(self, prompt: Any, **more: Any) -> Any:
        sampling = {"max_new_tokens": 8, "ignore_eos": True, **more.pop("sampling", {})}
        return await self.post("/generate", input_ids=prompt, sampling_params=sampling, **more)

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async def poll() -> dict[str, Any]:
            while not holds(info := await self.get("/server_info")):
                await asyncio.sleep(0.01)
            return info

        return await asyncio.wait_for(poll(), TIMEOUT)


async def assert_serves(client: Client, model: Any, prompt: list[int]) -> dict[str, Any]:
    answer = await client.generate(prompt)
    expected = reference_logprobs(model, prompt, answer["output_ids"])
    torch.testing.assert_close(served_logprobs(answer), expected, atol=1e-4, rtol=0)
    return answer


async def checksums(client: Client) -> dict[str, int]:
    return (await client.post("/weights_checker", action="checksum"))["ranks"][0]["checksums"]


def checksums_of(tensors: Tensors) -> dict[str, int]:
    return {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


class Trainer:
    def __init__(self, client: Client) -> None:
        self.client, self.name = client, next(_names)

    async def __aenter__(self) -> "Trainer":
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        info = WeightGroupInfo("127.0.0.1", store.port, 1, 2, self.name, "gloo", 30.0)
        joining = asyncio.create_task(asyncio.to_thread(create_weight_group, info, 0, store))
        await self.client.post(
            "/init_weights_update_group",
            master_address="127.0.0.1",
            master_port=store.port,
            rank_offset=1,
            world_size=2,
            group_name=self.name,
            backend="gloo",
        )
        self.group = await joining
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.post("/leave_weight_groups")
        destroy_weight_group(self.group)

    def describe(self, tensors: Tensors, **more: Any) -> dict[str, Any]:
        return {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": self.name,
            "load_format": "flattened_bucket",
            "sequence": 0,
            **more,
        }

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.contiguous(), src=0, group=self.group)

    async def send(self, tensors: Tensors, **more: Any) -> None:
        body = self.describe(tensors, **more)
        answer = asyncio.create_task(self.client.post("/update_weights_from_distributed", **body))
        wire = [t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()]
        await asyncio.to_thread(self.broadcast, [torch.cat(wire)])
        await answer


def weights_of(model: Any) -> Tensors:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = list(tensors)
    cut = len(names) // 2
    return {n: tensors[n] for n in names[:cut]}, {n: tensors[n] for n in names[cut:]}


async def serve_weights(client: Client, model: Any, version: str) -> None:
    async with Trainer(client) as trainer:
        await client.post("/begin_weight_update", selector="target")
        await trainer.send(weights_of(model), weight_version=version)
        await client.post("/end_weight_update")
