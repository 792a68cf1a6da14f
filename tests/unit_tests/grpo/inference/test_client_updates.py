# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The order of requests in which each kind's client updates its server's weights.

Each client talks to an HTTP server that records the requests and answers as the real server
does; the real servers themselves are tested in `integration_tests/test_real_servers.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.inference.kinds import KINDS, make_client
from torchtitan.grpo.weight_wire.transfer_messages import (
    PROBE,
    READY,
    AdapterNote,
    BucketSpec,
    WeightGroupInfo,
    note_of,
)

GROUP = WeightGroupInfo("127.0.0.1", 1, 1, 2, "group", "gloo", 5.0, deltas=True)
BUCKETS = (
    BucketSpec(("a.weight",), ("float32",), ((2, 2),), (17,)),
    BucketSpec(("b.weight",), ("float32",), ((3,),), (18,)),
)
TAKE_OFF = "/update_weight_version updating"


class RecordingServer:
    """Answers every route; ``log`` holds route and action or version of each request.

    Attributes:
        version: What the server says that it serves.
        answers: ``(status, body)`` by route, in place of the usual answer.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.version = "default"
        self.answers: dict[str, tuple[int, Any]] = {}

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        detail = body.get("update_info", {}).get("action") or body.get("new_version") or ""
        self.log.append(f"{request.path_qs} {detail}".strip())
        self.bodies.append(body)
        if request.path in self.answers:
            status, answer = self.answers[request.path]
            return web.json_response(answer, status=status)
        return web.json_response(
            {
                "version": "0.5.23",
                "weight_version": self.version,
                "success": True,
                "swap_seconds": 0.25,
                "ranks": [{"checksums": {"a.weight": "x", "b.weight": "y"}}],
            }
        )

    def index(self, entry: str) -> int:
        assert self.log.count(entry) == 1, (entry, self.log)
        return self.log.index(entry)


def with_client(
    kind: str, test: Callable[[InferenceClient, RecordingServer], Awaitable[None]]
) -> None:
    async def run() -> None:
        server = RecordingServer()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = make_client(kind, f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            async with asyncio.timeout(60):
                await test(client, server)
        finally:
            await client.close()
            await runner.cleanup()

    asyncio.run(run())


async def receive(client: InferenceClient, version: int) -> None:
    await client.begin_update()
    for i, bucket in enumerate(BUCKETS):
        last = i == len(BUCKETS) - 1
        await client.receive_bucket(bucket, group_name="group", last=last, version=version)


def test_vllm_verifies_takes_the_version_off_loads_and_drops_the_caches_in_this_order() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        assert (client.stops_for, client.takes_deltas) == ("commit", True)
        await receive(client, 7)
        assert TAKE_OFF not in server.log  # the old weights are whole, and served as such
        server.log.clear()
        await client.commit_update(7)
        assert server.log == [
            "/update_weights verify",
            TAKE_OFF,
            "/finish_weight_update",
            "/reset_prefix_cache?reset_running_requests=true",
        ]
        assert server.bodies[-2] == {"weight_version": "7"}

    with_client("vllm", test)


def test_vllm_numbers_the_buckets_of_each_update_from_0() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        for version in (7, 8):
            await receive(client, version)
        staged = [body["update_info"] for body in server.bodies if "update_info" in body]
        assert [info["sequence"] for info in staged] == [0, 1, 0, 1]
        assert {info["action"] for info in staged} == {"stage"}
        assert [info["checksums"] for info in staged] == [[17], [18], [17], [18]]

    with_client("vllm", test)


def test_a_vllm_that_keeps_its_caches_fails_the_commit() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        await receive(client, 7)
        server.answers["/reset_prefix_cache"] = (200, {"success": False})
        with pytest.raises(ServerError, match="reset_prefix_cache"):
            await client.commit_update(7)

    with_client("vllm", test)


def test_a_vllm_that_does_not_verify_is_not_told_to_load() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        await receive(client, 7)
        server.answers["/update_weights"] = (500, {"error": "b.weight must have checksum 18"})
        with pytest.raises(ServerError, match="checksum 18"):
            await client.commit_update(7)
        assert "/finish_weight_update" not in server.log
        assert TAKE_OFF not in server.log

    with_client("vllm", test)


def test_a_vllm_without_room_is_checked_and_marked_before_the_first_bucket() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        refusal = {"error": "There is no room to stage weights on cuda:0"}
        server.answers["/init_weight_transfer_engine"] = (500, refusal)
        with pytest.raises(ServerError, match="answered 500"):  # the second request, to join
            await client.join_weight_group(GROUP)
        assert (client.stops_for, client.takes_deltas) == ("transfer", False)
        assert client.verifies_checksums is False
        client._groups["group"] = GROUP  # type: ignore[attr-defined]
        await receive(client, 7)
        await client.commit_update(7)
        updates = [entry for entry in server.log if not entry.startswith("/init")]
        assert updates == [
            "/start_weight_update",
            "/update_weights check",
            TAKE_OFF,
            "/update_weights receive",
            "/update_weights receive",
            "/finish_weight_update",
            "/reset_prefix_cache?reset_running_requests=true",
        ]

    with_client("vllm", test)


def test_a_vllm_with_an_update_left_open_is_made_to_abandon_it() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        server.answers["/start_weight_update"] = (400, {"error": "an update is open"})
        with pytest.raises(ServerError):  # this server never lets it be opened
            await client.begin_update()
        assert server.log == [
            "/start_weight_update",
            "/update_weights abandon",
            "/finish_weight_update",
            "/start_weight_update",
        ]

    with_client("vllm", test)


def test_sglangs_version_is_taken_off_once_and_before_the_first_tensor() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        await receive(client, 7)
        first_tensor = server.log.index("/update_weights_from_distributed")
        assert server.index(TAKE_OFF) < first_tensor
        versions = [
            (body["weight_version"], body["flush_cache"])
            for body in server.bodies
            if "load_format" in body
        ]
        assert versions == [(None, False), ("7", True)]
        # The next update takes it off again.
        server.log.clear()
        await receive(client, 8)
        assert server.index(TAKE_OFF) < server.log.index("/update_weights_from_distributed")

    with_client("sglang", test)


def test_sglangs_version_is_taken_off_before_it_reads_from_disk() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        server.version = "7"
        await client.update_from_disk("/pushed/7", 7)
        assert server.index(TAKE_OFF) < server.index("/update_weights_from_disk")

    with_client("sglang", test)


@pytest.mark.parametrize("served", ["6", "default", "updating"])
@pytest.mark.parametrize("kind", ["sglang", "embedded"])
def test_a_commit_after_which_another_version_is_served_has_failed(kind: str, served: str) -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        await receive(client, 7)
        server.version = served
        with pytest.raises(ServerError, match="must serve version 7"):
            await client.commit_update(7)
        with pytest.raises(ServerError, match="must serve version 7"):
            await client.update_from_disk("/pushed/7", 7)
        server.version = "7"
        await client.commit_update(7)

    with_client(kind, test)


def test_the_embedded_server_says_how_long_it_stood_still() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        await receive(client, 7)
        server.version = "7"
        assert await client.commit_update(7) == 0.25
        server.answers["/end_weight_update"] = (200, {"success": True})
        with pytest.raises(ServerError, match="swap_seconds"):
            await client.commit_update(7)

    with_client("embedded", test)


def test_the_embedded_server_is_sent_checksums_the_base_and_the_order() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        await receive(client, 7)
        sent = [body for body in server.bodies if "load_format" in body]
        assert [body["sequence"] for body in sent] == [0, 1]
        assert [body["checksums"] for body in sent] == [[17], [18]]
        assert [body["weight_version"] for body in sent] == [None, "7"]
        delta = BucketSpec(("a.weight",), ("float32",), ((2, 2),), (17,), (1,), 6)
        await client.begin_update()
        await client.receive_bucket(delta, group_name="group", last=True, version=7)
        body = server.bodies[-1]
        assert (body["num_changed"], body["base_version"], body["sequence"]) == ([1], 6, 0)

    with_client("embedded", test)


def test_a_delta_is_not_sent_to_sglang() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        await client.begin_update()
        delta = BucketSpec(("a.weight",), ("float32",), ((2, 2),), None, (1,), 6)
        with pytest.raises(ServerError, match="cannot apply deltas"):
            await client.receive_bucket(delta, group_name="group", last=True, version=7)
        assert "/update_weights_from_distributed" not in server.log

    with_client("sglang", test)


def test_sglang_is_asked_once_a_group_whether_it_adds_adapters_and_is_told_which_bucket_it_is() -> (
    None
):
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        with pytest.raises(ServerError, match=r"serve_sglang.sh .* lora.push = 'merged'"):
            await receive_adapters(client)
        assert TAKE_OFF not in server.log, "the old weights are whole, and stay served"
        server.answers["/update_weights_from_distributed"] = (
            200,
            {"success": True, "message": READY},
        )
        server.bodies.clear()
        for _ in range(2):
            await receive_adapters(client)
        formats = [body["load_format"] for body in server.bodies if "load_format" in body]
        assert formats[0] == PROBE and PROBE not in formats[1:]
        notes = [note_of(load_format) for load_format in formats[1:]]
        assert notes == 2 * [AdapterNote(0, False, 0.5, "base"), AdapterNote(1, True, 0.5, "base")]
        await client.join_weight_group(GROUP)  # perhaps another server with the same address
        await receive_adapters(client)
        assert [body.get("load_format") for body in server.bodies].count(PROBE) == 2

    async def receive_adapters(client: InferenceClient) -> None:
        await client.begin_update()
        for i, module in enumerate("ab"):
            name = f"base_model.model.{module}.lora_A.weight"
            bucket = BucketSpec((name,), ("float32",), ((2, 2),), lora_scale=0.5, lora_base="base")
            await client.receive_bucket(bucket, group_name="group", last=i == 1, version=7)

    with_client("sglang", test)


def test_adapters_of_weights_that_sglang_does_not_have_are_refused() -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        name = "base_model.model.typo.lora_A.weight"
        bucket = BucketSpec((name,), ("float32",), ((2, 2),), lora_scale=0.5, lora_base="base")
        await client.begin_update()
        with pytest.raises(ServerError, match=r"no parameters named \['typo.weight'\]"):
            await client.receive_bucket(bucket, group_name="group", last=True, version=7)
        assert "/update_weights_from_distributed" not in server.log

    with_client("sglang", test)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_for_a_group_that_was_left_is_refused(kind: str) -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.join_weight_group(GROUP)
        await client.leave_weight_groups()
        with pytest.raises(ServerError, match="not joined weight group group"):
            await client.receive_bucket(BUCKETS[0], group_name="group", last=True, version=7)

    with_client(kind, test)


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_asked_of_the_server(kind: str) -> None:
    async def test(client: InferenceClient, server: RecordingServer) -> None:
        await client.pause()
        await client.resume()
        pause, resume = server.log
        assert pause.startswith(("/pause?mode=keep", "/pause_generation"))
        assert resume in ("/resume", "/continue_generation")
        assert server.bodies[0].get("mode", "keep") in ("keep", "retract")

    with_client(kind, test)
