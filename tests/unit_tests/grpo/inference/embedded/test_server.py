# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests the embedded server as a process, over HTTP and real gloo groups."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, Qwen3Config

from torchtitan.grpo.inference.embedded.client import EmbeddedClient
from torchtitan.grpo.inference.embedded.model import load_model
from torchtitan.grpo.inference.embedded.weights import tensor_sha256
from torchtitan.grpo.inference.http import HttpConnection
from torchtitan.grpo.inference.kinds import KINDS
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.system.light_start import LIGHT_PYTHON
from torchtitan.grpo.types import GenerateRequest
from torchtitan.grpo.weight_wire.adapters import base_digest
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.process_group import create_weight_group, destroy_weight_group
from torchtitan.grpo.weight_wire.sparse import encode
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

VOCAB = 40
EOS = 39
TIMEOUT = 240.0
Tensors = dict[str, torch.Tensor]
_names = (f"test-group-{i}" for i in itertools.count())


def make_model(seed: int) -> Any:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        eos_token_id=EOS,
        max_position_embeddings=4096,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


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
    """A server process; ``log`` holds its output."""

    def __init__(
        self, folder: Path, model_path: str, *arguments: str, keys: dict[str, str] | None = None
    ) -> None:
        port_file = folder / "port"
        self.log = folder / "log"
        module = "torchtitan.grpo.inference.embedded"
        command = [*LIGHT_PYTHON, module, "--model-path", model_path, "--port", "0"]
        command += ["--port-file", str(port_file), "--device", "cpu", "--seed", "0", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(keys or {})}
        self.process = start_child(command, env=environment, log_file=self.log)
        self._port_file = port_file

    def wait(self) -> "Server":
        async def poll() -> int:
            while not self._port_file.exists():
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.05)
            return int(self._port_file.read_text())

        self.url = f"http://127.0.0.1:{asyncio.run(asyncio.wait_for(poll(), TIMEOUT))}"
        return self


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(make_model(1), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--max-running-requests", "8", "--dist-timeout", "30")
    made = Server(tmp_path_factory.mktemp("server"), model_path, *arguments)
    try:
        yield made.wait()
    finally:
        stop_children([made.process])


class Client:
    """Sends requests to one server and returns parsed bodies."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url, self.key = session, url, ""

    async def call(
        self, method: str, route: str, body: Any = None, key: str = ""
    ) -> tuple[int, Any]:
        key = key or self.key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.session.request(
            method, self.url + route, json=body, headers=headers
        ) as response:
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
        return await self.post(
            "/generate", input_ids=prompt, return_logprob=True, sampling_params=sampling, **more
        )

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async def poll() -> dict[str, Any]:
            while not holds(info := await self.get("/server_info")):
                await asyncio.sleep(0.01)
            return info

        return await asyncio.wait_for(poll(), TIMEOUT)


def with_client(server: Server, test: Callable[[Client], Awaitable[None]]) -> None:
    async def run() -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await test(Client(session, server.url))

    asyncio.run(run())


class Trainer:
    """Rank 0 of a weight group with the server."""

    def __init__(self, client: Client) -> None:
        self.client, self.name = client, next(_names)

    async def __aenter__(self) -> "Trainer":
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        arguments = ("127.0.0.1", store.port, 0, 2, self.name, "gloo", 30.0)
        joining = asyncio.create_task(
            asyncio.to_thread(create_weight_group, *arguments, store=store)
        )
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
        # A test may have ended the group already: 400 is as good.
        await self.client.call("POST", "/end_weight_update", {})
        await self.client.call("POST", "/destroy_weights_update_group", {"group_name": self.name})
        destroy_weight_group(self.group)

    def describe(self, tensors: Tensors, **more: Any) -> dict[str, Any]:
        return {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": self.name,
            **more,
        }

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.contiguous(), src=0, group=self.group)

    async def send(self, tensors: Tensors, flattened: bool = True, **more: Any) -> None:
        body = self.describe(tensors, load_format="flattened_bucket" if flattened else None, **more)
        answer = asyncio.create_task(self.client.post("/update_weights_from_distributed", **body))
        wire = list(tensors.values())
        if flattened:
            wire = [torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in wire])]
        await asyncio.to_thread(self.broadcast, wire)
        await answer


def weights_of(model: Any) -> Tensors:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = list(tensors)
    cut = len(names) // 2
    return {n: tensors[n] for n in names[:cut]}, {n: tensors[n] for n in names[cut:]}


async def serve_weights(client: Client, model: Any, version: str, **options: Any) -> None:
    async with Trainer(client) as trainer:
        await client.post("/begin_weight_update", selector="target")
        await trainer.send(weights_of(model), weight_version=version, flush_cache=True, **options)
        await client.post("/end_weight_update")


# -- generation -----------------------------------------------------------------------


def test_an_answer_has_the_dialects_shape_and_exact_logprobs(server: Server) -> None:
    async def test(client: Client) -> None:
        await serve_weights(client, make_model(1), "shape")
        answer = await client.generate([1, 2, 3], rid="my-id")
        meta = answer["meta_info"]
        assert meta["id"] == "my-id"
        assert meta["finish_reason"] == {"type": "length", "length": 8}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 8)
        assert meta["weight_version"] == "shape"
        assert meta["weight_versions"] == [{"version": "shape", "start": 0, "end": 8}]
        assert answer["text"].replace(" ", "") == "".join(
            chr(ord("0") + i) for i in answer["output_ids"]
        )
        expected = reference_logprobs(make_model(1), [1, 2, 3], answer["output_ids"])
        torch.testing.assert_close(served_logprobs(answer), expected, atol=1e-4, rtol=0)
        info = await client.get("/server_info")
        assert info["embedded"] is True and info["version"].startswith("0.5.")

    with_client(server, test)


def test_prompt_logprobs_have_sglangs_form_and_need_no_new_token(server: Server) -> None:
    async def test(client: Client) -> None:
        await serve_weights(client, make_model(1), "prompt")
        prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 40  # longer than the logits kept at once
        for start in (0, 5):
            answer = await client.generate(
                prompt, logprob_start_len=start, sampling={"max_new_tokens": 0}
            )
            assert answer["output_ids"] == []
            assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
            entries = answer["meta_info"]["input_token_logprobs"]
            assert [entry[1] for entry in entries] == prompt[start:]
            assert (entries[0][0] is None) == (start == 0)
            served = torch.tensor([entry[0] for entry in entries[1:]])
            expected = reference_logprobs(make_model(1), prompt[:1], prompt[1:])[start:]
            torch.testing.assert_close(served, expected, atol=1e-4, rtol=0)
        answer = await client.generate(prompt, logprob_start_len=len(prompt))
        assert "input_token_logprobs" not in answer["meta_info"]

    with_client(server, test)


def test_batches_and_n_answer_a_list_in_order(server: Server) -> None:
    async def test(client: Client) -> None:
        answers = await client.generate([[1], [2, 3]], sampling={"n": 2, "max_new_tokens": 3})
        assert [a["meta_info"]["prompt_tokens"] for a in answers] == [1, 1, 2, 2]
        assert all(len(a["output_ids"]) == 3 for a in answers)

    with_client(server, test)


def test_a_completion_stops_at_the_models_own_eos(server: Server) -> None:
    async def test(client: Client) -> None:
        sampling = {"max_new_tokens": 500, "ignore_eos": False}
        answers = await client.generate([[i] for i in range(8)], sampling=sampling)
        stopped = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
        assert stopped
        for answer in stopped:
            assert answer["output_ids"].index(EOS) == len(answer["output_ids"]) - 1
            assert answer["meta_info"]["finish_reason"]["matched"] == EOS

    with_client(server, test)


def test_a_stream_is_cumulative_and_closed_by_done(server: Server) -> None:
    async def test(client: Client) -> None:
        body = {
            "input_ids": [4, 5],
            "stream": True,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 20, "ignore_eos": True},
        }
        async with client.session.post(client.url + "/generate", json=body) as response:
            assert response.content_type == "text/event-stream"
            lines = [line for line in (await response.text()).split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        whole = events[-1]
        assert len(whole["output_ids"]) == len(events) == 20
        assert whole["meta_info"]["finish_reason"]["type"] == "length"
        for count, event in enumerate(events, start=1):
            assert event["output_ids"] == whole["output_ids"][:count]
            assert len(event["meta_info"]["output_token_logprobs"]) == count
            assert event is whole or event["meta_info"]["finish_reason"] is None

    with_client(server, test)


LONG = {"max_new_tokens": 4000}


def test_bad_requests_answer_400_and_the_server_lives(server: Server) -> None:
    async def test(client: Client) -> None:
        assert "[0, 40), got 40" in await client.refused("/generate", input_ids=[1, 40])
        assert "non-empty" in await client.refused("/generate", input_ids=[])
        assert "--max-model-len" in await client.refused("/generate", input_ids=[1] * 5000)
        unknown = {"beam_width": 2}
        message = await client.refused("/generate", input_ids=[1], sampling_params=unknown)
        assert "beam_width is not supported" in message
        headers = {"Content-Type": "application/json"}
        async with client.session.post(
            client.url + "/generate", data="{", headers=headers
        ) as response:
            assert response.status == 400
        assert "abort_all" in await client.refused("/abort_request")
        assert "retract" in await client.refused("/pause_generation", mode="later")
        await client.generate([1])

    with_client(server, test)


def test_a_running_request_is_aborted_by_its_rid_alone(server: Server) -> None:
    async def test(client: Client) -> None:
        first = asyncio.create_task(client.generate([1], rid="first", sampling=LONG))
        second = asyncio.create_task(client.generate([2], rid="second", sampling=LONG))
        await client.until(lambda info: info["num_running"] == 2)
        assert "unique" in await client.refused("/generate", input_ids=[1], rid="first")
        await client.post("/abort_request", rid="fir")
        answer = await first
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(served_logprobs(answer)) == len(answer["output_ids"]) > 0
        assert not second.done()
        await client.post("/pause_generation", mode="abort")
        assert (await second)["meta_info"]["finish_reason"]["type"] == "abort"
        await client.post("/continue_generation")

    with_client(server, test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_row(server: Server, stream: bool) -> None:
    async def test(client: Client) -> None:
        task = asyncio.create_task(client.generate([1], stream=stream, sampling=LONG))
        await client.until(lambda info: info["num_running"] == 1)
        task.cancel()
        info = await client.until(lambda info: info["num_running"] == 0)
        before = info["num_tokens"]
        await client.generate([1], sampling={"max_new_tokens": 1})
        assert (await client.get("/server_info"))["num_tokens"] == before + 1

    with_client(server, test)


def test_pause_keeps_requests_and_probes_tell_it_from_death(server: Server) -> None:
    async def test(client: Client) -> None:
        await client.post("/pause_generation", mode="retract")
        task = asyncio.create_task(client.generate([1, 2]))
        await client.until(lambda info: info["num_waiting"] == 1)
        assert (await client.call("GET", "/health"))[0] == 200
        assert (await client.call("GET", "/ready"))[0] == 503
        await client.post("/continue_generation")
        assert len((await task)["output_ids"]) == 8
        assert (await client.call("GET", "/ready"))[0] == 200

    with_client(server, test)


# -- weights --------------------------------------------------------------------------


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_from_the_trainer_are_served_exactly(
    server: Server, flattened: bool, dtype: torch.dtype
) -> None:
    async def test(client: Client) -> None:
        new = make_model(5)
        sent = {name: tensor.to(dtype) for name, tensor in weights_of(new).items()}
        async with Trainer(client) as trainer:
            await client.post("/begin_weight_update")
            first, second = halves(sent)
            await trainer.send(first, flattened)
            await trainer.send(second, flattened, weight_version="5", flush_cache=True)
            await client.post("/end_weight_update")
        assert (await client.get("/model_info"))["weight_version"] == "5"
        checker = await client.post("/weights_checker", action="checksum")
        new.load_state_dict(sent)
        assert checker["ranks"][0]["checksums"] == {
            name: tensor_sha256(tensor) for name, tensor in weights_of(new).items()
        }
        answer = await client.generate([7, 8])
        expected = reference_logprobs(new, [7, 8], answer["output_ids"])
        torch.testing.assert_close(served_logprobs(answer), expected, atol=1e-4, rtol=0)

    with_client(server, test)


@pytest.mark.parametrize("pause", [None, "retract"])
def test_requests_in_flight_cross_an_update_exactly(server: Server, pause: str | None) -> None:
    async def test(client: Client) -> None:
        old, new = make_model(1), make_model(2)
        await serve_weights(client, old, "old")
        prompts = [[i, 3] for i in range(4)]
        sampling = {"max_new_tokens": 800}
        tasks = [asyncio.create_task(client.generate(p, sampling=sampling)) for p in prompts]
        async with Trainer(client) as trainer:
            await client.until(lambda info: info["num_running"] == 4)
            if pause is not None:
                await client.post("/pause_generation", mode=pause)
            await client.post("/begin_weight_update")
            for i, half in enumerate(halves(weights_of(new))):
                await trainer.send(half, weight_version="new" if i else None)
            assert (await client.get("/model_info"))["weight_version"] == "old"
            await client.post("/end_weight_update")
            await client.post("/continue_generation")
            answers = await asyncio.gather(*tasks)
        for prompt, answer in zip(prompts, answers, strict=True):
            first, second = answer["meta_info"]["weight_versions"]
            cut = first["end"]
            assert (first["version"], second["version"]) == ("old", "new")
            assert (first["start"], second["start"], second["end"]) == (0, cut, 800)
            served = served_logprobs(answer)
            before = reference_logprobs(old, prompt, answer["output_ids"])
            after = reference_logprobs(new, prompt, answer["output_ids"])
            torch.testing.assert_close(served[:cut], before[:cut], atol=1e-4, rtol=0)
            torch.testing.assert_close(served[cut:], after[cut:], atol=1e-4, rtol=0)

    with_client(server, test)


def test_half_an_update_is_never_served(server: Server) -> None:
    async def test(client: Client) -> None:
        await serve_weights(client, make_model(1), "whole")
        held = (await client.post("/weights_checker"))["ranks"]
        async with Trainer(client) as trainer:
            await client.post("/begin_weight_update")
            assert "open" in await client.refused("/begin_weight_update")
            await trainer.send(halves(weights_of(make_model(2)))[0])
            answer = await client.generate([1, 2])
            expected = reference_logprobs(make_model(1), [1, 2], answer["output_ids"])
            torch.testing.assert_close(served_logprobs(answer), expected, atol=1e-4, rtol=0)
            # As a trainer does that came back after a crash.
            assert "Nothing was changed" in await client.refused("/end_weight_update")
        assert (await client.post("/weights_checker"))["ranks"] == held
        assert (await client.get("/model_info"))["weight_version"] == "whole"

    with_client(server, test)


def test_a_chunk_that_does_not_fit_is_refused_before_any_broadcast(server: Server) -> None:
    async def test(client: Client) -> None:
        held = (await client.post("/weights_checker"))["ranks"]
        good = weights_of(make_model(3))
        name = "lm_head.weight"
        route = "/update_weights_from_distributed"
        async with Trainer(client) as trainer:
            body = trainer.describe(good, weight_version="3")
            assert "begin_weight_update first" in await client.refused(route, **body)
            bad: list[tuple[Tensors, dict[str, Any], str]] = [
                ({"lm_head.wait": good[name]}, {}, "not the model's"),
                ({name: good[name][:-1]}, {}, "shape must be [40, 32]"),
                ({name: good[name].long()}, {}, "dtype must be one of"),
                (good, {"group_name": "nobody"}, "does not exist"),
                (good, {"load_format": "direct"}, "load_format must be"),
                (good, {"shapes": 3}, "shapes must be"),
            ]
            for tensors, more, message in bad:
                await client.post("/begin_weight_update")
                body = {**trainer.describe(tensors, weight_version="3"), **more}
                assert message in await client.refused(route, **body)
                assert "a chunk failed" in await client.refused("/end_weight_update")
        assert (await client.post("/weights_checker"))["ranks"] == held

    with_client(server, test)


def test_the_server_generates_while_it_waits_for_a_broadcast_and_can_be_freed(
    server: Server,
) -> None:
    async def test(client: Client) -> None:
        async with Trainer(client) as trainer:
            await client.post("/begin_weight_update")
            body = trainer.describe(weights_of(make_model(3)), load_format="flattened_bucket")
            waiting = asyncio.create_task(
                client.refused("/update_weights_from_distributed", **body)
            )
            assert len((await client.generate([1]))["output_ids"]) == 8
            assert (await client.call("GET", "/ready"))[0] == 200
            assert not waiting.done()
            assert "under way" in await client.refused("/end_weight_update")
            await client.post("/destroy_weights_update_group", group_name=trainer.name)
            assert "was left" in await waiting
            assert "a chunk failed" in await client.refused("/end_weight_update")
        await serve_weights(client, make_model(1), "after")

    with_client(server, test)


def test_a_trainer_that_dies_leaves_the_server_ready_for_the_next(server: Server) -> None:
    async def test(client: Client) -> None:
        trainer = await Trainer(client).__aenter__()
        await client.post("/begin_weight_update")
        body = trainer.describe(weights_of(make_model(3)), load_format="flattened_bucket")
        waiting = asyncio.create_task(client.refused("/update_weights_from_distributed", **body))
        await client.generate([1])
        destroy_weight_group(trainer.group)
        del trainer.group
        await waiting
        await client.refused("/end_weight_update")
        await client.post("/destroy_weights_update_group", group_name=trainer.name)
        await client.refused("/destroy_weights_update_group", group_name=trainer.name)
        await serve_weights(client, make_model(2), "next")
        assert (await client.get("/model_info"))["weight_version"] == "next"

    with_client(server, test)


def test_buckets_that_overtook_one_another_are_received_in_their_order(server: Server) -> None:
    async def test(client: Client) -> None:
        # Two tensors of one size: taken for one another, nothing would look wrong.
        new = make_model(11)
        names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
        rest = {n: t for n, t in weights_of(new).items() if n not in names}
        route = "/update_weights_from_distributed"
        async with Trainer(client) as trainer:
            await client.post("/begin_weight_update")
            bodies = [
                trainer.describe(
                    {name: weights_of(new)[name]}, load_format="flattened_bucket", sequence=i
                )
                for i, name in enumerate(names)
            ]
            late = asyncio.create_task(client.post(route, **bodies[1]))
            await client.generate([1])
            twice = await client.refused(route, **bodies[1])
            assert "announced twice" in twice
            await client.refused("/end_weight_update")  # one is still expected
            await client.post("/leave_weight_groups")
            assert (await asyncio.gather(late, return_exceptions=True))[0]
        async with Trainer(client) as trainer:
            await client.post("/begin_weight_update")
            for body in bodies:
                body["group_name"] = trainer.name
            tasks = [asyncio.create_task(client.post(route, **bodies[1]))]
            await client.generate([1])
            tasks.append(asyncio.create_task(client.post(route, **bodies[0])))
            wire = [weights_of(new)[name].contiguous().view(-1) for name in names]
            await asyncio.to_thread(trainer.broadcast, [t.view(torch.uint8) for t in wire])
            await asyncio.gather(*tasks)
            await trainer.send(rest, sequence=2, weight_version="ordered")
            await client.post("/end_weight_update")
        checker = await client.post("/weights_checker", action="checksum")
        assert checker["ranks"][0]["checksums"] == {
            name: tensor_sha256(tensor) for name, tensor in weights_of(new).items()
        }

    with_client(server, test)


def test_leaving_all_groups_ends_a_broadcast_and_drops_the_update(server: Server) -> None:
    async def test(client: Client) -> None:
        await client.post("/leave_weight_groups")  # harmless without any
        held = (await client.post("/weights_checker"))["ranks"]
        async with Trainer(client) as one, Trainer(client) as other:
            groups = (await client.get("/server_info"))["weight_groups"]
            assert groups == [one.name, other.name]
            await client.post("/begin_weight_update")
            first, second = halves(weights_of(make_model(3)))
            await one.send(first)
            body = other.describe(second, load_format="flattened_bucket", weight_version="left")
            waiting = asyncio.create_task(
                client.refused("/update_weights_from_distributed", **body)
            )
            for _ in range(5):  # by then the server has been asked
                await client.generate([1])
            await client.post("/leave_weight_groups")
            assert "was left" in await waiting
            assert "No weight update" in await client.refused("/end_weight_update")
        assert (await client.get("/server_info"))["weight_groups"] == []
        assert (await client.post("/weights_checker"))["ranks"] == held

    with_client(server, test)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delta_is_exact_in_a_model_that_holds_its_dtype(
    server: Server, dtype: torch.dtype
) -> None:
    async def test(client: Client) -> None:
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
        checksums = [tensor_checksum(tensor) for tensor in new.values()]
        route = "/update_weights_from_distributed"
        async with Trainer(client) as trainer:
            await client.post("/begin_weight_update")
            await trainer.send(old, weight_version="70")
            await client.post("/end_weight_update")
            body = trainer.describe(
                new,
                load_format="flattened_bucket",
                num_changed=list(num_changed),
                checksums=checksums,
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
        checker = await client.post("/weights_checker", action="checksum")
        assert checker["ranks"][0]["checksums"] == {
            name: tensor_sha256(tensor.float()) for name, tensor in new.items()
        }
        assert (await client.get("/model_info"))["weight_version"] == "71"

    with_client(server, test)


def test_a_checkpoint_is_served_from_disk_whole_or_not_at_all(
    server: Server, tmp_path: Path
) -> None:
    async def test(client: Client) -> None:
        new = make_model(6)
        path = save(new, tmp_path / "six")
        await client.post("/update_weights_from_disk", model_path=path, weight_version="6")
        answer = await client.generate([7, 8])
        assert answer["meta_info"]["weight_version"] == "6"
        expected = reference_logprobs(new, [7, 8], answer["output_ids"])
        torch.testing.assert_close(served_logprobs(answer), expected, atol=1e-4, rtol=0)
        message = await client.refused("/update_weights_from_disk", model_path=str(tmp_path))
        assert "safetensors" in message
        await client.post("/update_weight_version", new_version="six")
        assert (await client.get("/model_info"))["weight_version"] == "six"

    with_client(server, test)


def test_adapters_are_added_to_the_directory_whatever_the_server_has_served_before(
    server: Server, model_path: str
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
        return {name: tensor_sha256(tensor) for name, tensor in weights.items()}

    async def test(client: Client) -> None:
        # Another run pushed whole weights, and a third one adapters of another layer.
        await serve_weights(client, make_model(7), "7")
        for version, target in enumerate(("o_proj", "q_proj"), start=8):
            factors = adapter(target, version)
            async with Trainer(client) as trainer:
                await client.post("/begin_weight_update")
                described = {"lora_scale": 0.5, "lora_base": base_digest(model_path)}
                await trainer.send(factors, weight_version=str(version), **described)
                await client.post("/end_weight_update")
            checker = await client.post("/weights_checker", action="checksum")
            assert checker["ranks"][0]["checksums"] == adapted(target, factors)

    with_client(server, test)


def test_the_client_serves_the_embedded_server(server: Server) -> None:
    async def run() -> None:
        http = HttpConnection(server.url, api_key=None, admin_key=None, timeout_seconds=TIMEOUT)
        client = EmbeddedClient(
            http, KINDS["embedded"].capabilities, request_timeout_seconds=TIMEOUT
        )
        new, name = make_model(4), next(_names)
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        info = WeightGroupInfo("127.0.0.1", store.port, 1, 2, name, "gloo", 30.0)
        arguments = ("127.0.0.1", store.port, 0, 2, name, "gloo", 30.0)
        rank_0 = asyncio.create_task(
            asyncio.to_thread(create_weight_group, *arguments, store=store)
        )
        assert await client.num_workers() == 1
        await client.join_weight_group(info)
        group = await rank_0
        running = asyncio.create_task(client.generate(GenerateRequest("long", [1], 4000)))
        await client.health()
        await client.begin_update()
        for last, half in enumerate(halves(weights_of(new))):
            shapes = tuple(tuple(t.shape) for t in half.values())
            bucket = BucketSpec(tuple(half), ("float32",) * len(half), shapes)
            wire = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in half.values()])
            receiving = asyncio.create_task(
                client.receive_bucket(bucket, group_name=name, last=bool(last), version=12)
            )
            await asyncio.to_thread(dist.broadcast, wire, 0, group)
            await receiving
        assert await client.commit_update(12) > 0
        ids = [3, 1, 4, 1, 5, 9, 2, 6]
        torch.testing.assert_close(
            torch.tensor(await client.prompt_logprobs(ids)),
            reference_logprobs(new, ids[:1], ids[1:]),
            atol=1e-4,
            rtol=0,
        )
        generation = await client.generate(GenerateRequest("short", [5, 6], 6))
        expected = reference_logprobs(new, [5, 6], generation.token_ids.tolist())
        torch.testing.assert_close(
            torch.from_numpy(generation.logprobs), expected, atol=1e-4, rtol=0
        )
        assert {segment.version for segment in generation.segments} == {12}
        await client.abort("long")
        await asyncio.gather(running, return_exceptions=True)
        await client.leave_weight_groups()
        await client.close()
        destroy_weight_group(group)

    asyncio.run(run())


# -- process --------------------------------------------------------------------------


def test_keys_follow_sglangs_rule_and_sigterm_answers_those_who_wait(
    model_path: str, tmp_path: Path
) -> None:
    keys = {"TORCHTITAN_GRPO_API_KEY": "user", "TORCHTITAN_GRPO_ADMIN_KEY": "admin"}
    server = Server(tmp_path, model_path, keys=keys)
    generate = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}

    async def check_keys(client: Client) -> None:
        for route, body, right, wrong in (
            ("/generate", generate, "user", "admin"),
            ("/flush_cache", {}, "admin", "user"),
        ):
            assert (await client.call("POST", route, body))[0] == 401
            assert (await client.call("POST", route, body, key=wrong))[0] == 401
            assert (await client.call("POST", route, body, key=right))[0] == 200
        assert (await client.call("GET", "/health"))[0] == 200
        assert (await client.call("GET", "/healthz"))[0] == 200
        assert (await client.call("GET", "/model_info"))[0] == 401
        assert (await client.call("GET", "/metrics"))[0] == 401

    async def stop_busy_server(client: Client) -> None:
        """Sends SIGTERM while one request streams and a broadcast is awaited."""
        client.key = "admin"
        trainer = await Trainer(client).__aenter__()
        await client.post("/begin_weight_update")
        chunk = trainer.describe(weights_of(make_model(3)))
        waiting = asyncio.create_task(
            client.call("POST", "/update_weights_from_distributed", chunk)
        )
        long = {"input_ids": [1], "sampling_params": {**LONG, "ignore_eos": True}, "stream": True}
        headers = {"Authorization": "Bearer user"}
        async with client.session.post(
            client.url + "/generate", json=long, headers=headers
        ) as response:
            await response.content.readuntil(b"\n\n")
            server.process.send_signal(signal.SIGTERM)
            lines = (await response.text()).strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        assert "shutting down" in lines[-2]
        assert await asyncio.to_thread(server.process.wait, 10) == 0
        # Answered, or cut off: either way it does not hang.
        await asyncio.wait_for(asyncio.wait([waiting]), TIMEOUT)
        waiting.exception()
        destroy_weight_group(trainer.group)

    try:
        with_client(server.wait(), check_keys)
        with_client(server, stop_busy_server)
    finally:
        stop_children([server.process])
    assert "Traceback" not in server.log.read_text()


def test_a_directory_without_a_model_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"with a config.json, got {tmp_path}"):
        load_model(str(tmp_path), "cpu", "float32")
