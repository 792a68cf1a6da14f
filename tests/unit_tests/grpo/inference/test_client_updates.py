# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The order of requests in which each kind's client updates its server's weights."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from stub_clients import serving

from torchtitan.grpo.inference.client import Capabilities, InferenceClient, ServerError
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
DELTA = replace(BUCKETS[0], num_changed=(1,), base_version=6)
TAKE_OFF = "/update_weight_version updating"
RECEIVE = "/update_weights_from_distributed"


def adapter_of(module: str) -> BucketSpec:
    name = f"base_model.model.{module}.lora_A.weight"
    return BucketSpec((name,), ("float32",), ((2, 2),), lora_scale=0.5, lora_base="base")


class RecordingServer:
    """Answers every route as the real server does, or by ``answers``, and notes the requests."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.version, self.release = "default", "0.5.23"
        self.answers: dict[str, tuple[int, Any]] = {}

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        detail = body.get("update_info", {}).get("action") or body.get("new_version") or ""
        self.log.append(f"{request.path_qs} {detail}".strip())
        self.bodies.append(body)
        usual = {
            "version": self.release,
            "weight_version": self.version,
            "success": True,
            "swap_seconds": 0.25,
            "ranks": [{"checksums": {"a.weight": "x", "b.weight": "y"}}],
        }
        status, answer = self.answers.get(request.path, (200, usual))
        return web.json_response(answer, status=status)

    def index(self, entry: str) -> int:
        assert self.log.count(entry) == 1, (entry, self.log)
        return self.log.index(entry)

    def buckets(self) -> list[dict[str, Any]]:
        return [body for body in self.bodies if "load_format" in body]


@asynccontextmanager
async def connected(
    kind: str, joins: bool = True
) -> AsyncIterator[tuple[InferenceClient, RecordingServer]]:
    server = RecordingServer()
    async with serving(server.handle) as url:
        client = make_client(kind, url)  # pyright: ignore[reportArgumentType]
        if joins:
            await client.join_weight_group(GROUP)
        yield client, server
        await client.close()


async def receive(
    client: InferenceClient, version: int, buckets: tuple[BucketSpec, ...] = BUCKETS
) -> None:
    await client.begin_update()
    for bucket in buckets:
        last = bucket is buckets[-1]
        await client.receive_bucket(bucket, group_name="group", last=last, version=version)


async def test_vllm_verifies_takes_the_version_off_loads_and_drops_the_caches_in_this_order():
    async with connected("vllm") as (client, server):
        assert (client.capabilities.stops_for, client.capabilities.takes_deltas) == ("commit", True)
        for version in (6, 7):
            await receive(client, version)
        assert TAKE_OFF not in server.log  # the old weights are whole, and served as such
        staged = [body["update_info"] for body in server.bodies if "update_info" in body]
        assert [info["sequence"] for info in staged] == [0, 1, 0, 1]
        assert {info["action"] for info in staged} == {"stage"}
        assert [info["checksums"] for info in staged] == [[17], [18], [17], [18]]
        server.log.clear()
        await client.commit_update(7)
        assert server.log == [
            "/update_weights verify",
            TAKE_OFF,
            "/finish_weight_update",
            "/reset_prefix_cache?reset_running_requests=true",
        ]
        assert server.bodies[-2] == {"weight_version": "7"}
        server.answers["/reset_prefix_cache"] = (200, {"success": False})
        with pytest.raises(ServerError, match="reset_prefix_cache"):
            await client.commit_update(7)


async def test_a_vllm_that_does_not_verify_is_not_told_to_load():
    async with connected("vllm") as (client, server):
        await receive(client, 7)
        server.answers["/update_weights"] = (500, {"error": "b.weight must have checksum 18"})
        with pytest.raises(ServerError, match="checksum 18"):
            await client.commit_update(7)
        assert not {"/finish_weight_update", TAKE_OFF} & {*server.log}


async def test_a_vllm_without_room_is_checked_and_marked_before_the_first_bucket():
    async with connected("vllm", joins=False) as (client, server):
        refusal = {"error": "There is no room to stage weights on cuda:0"}
        server.answers["/init_weight_transfer_engine"] = (500, refusal)
        with pytest.raises(ServerError, match="answered 500"):  # the second request, to join
            await client.join_weight_group(GROUP)
        assert client.capabilities == Capabilities("transfer", receives_pieces=True)
        client._groups["group"] = GROUP  # type: ignore[attr-defined]
        await receive(client, 7)
        await client.commit_update(7)
        assert [entry for entry in server.log if not entry.startswith("/init")] == [
            "/start_weight_update",
            "/update_weights check",
            TAKE_OFF,
            "/update_weights receive",
            "/update_weights receive",
            "/finish_weight_update",
            "/reset_prefix_cache?reset_running_requests=true",
        ]


async def test_a_vllm_with_an_update_left_open_is_made_to_abandon_it():
    async with connected("vllm", joins=False) as (client, server):
        server.answers["/start_weight_update"] = (400, {"error": "an update is open"})
        with pytest.raises(ServerError):  # this server never lets it be opened
            await client.begin_update()
        assert server.log == [
            "/start_weight_update",
            "/update_weights abandon",
            "/finish_weight_update",
            "/start_weight_update",
        ]


async def test_sglangs_version_is_taken_off_once_and_before_the_first_tensor_of_each_update():
    async with connected("sglang") as (client, server):
        for version in (7, 8):
            server.log.clear()
            await receive(client, version)
            assert server.index(TAKE_OFF) < server.log.index(RECEIVE)
        sent = [(body["weight_version"], body["flush_cache"]) for body in server.buckets()]
        assert sent == [(None, False), ("7", True), (None, False), ("8", True)]
        server.log.clear()
        server.version = "7"
        await client.update_from_disk("/pushed/7", 7)
        assert server.index(TAKE_OFF) < server.index("/update_weights_from_disk")


async def test_sglang_before_0_5_21_is_updated_without_a_session():
    async with connected("sglang", joins=False) as (client, server):
        server.release, server.version = "0.5.20", "3"
        server.answers |= dict.fromkeys(
            ("/weights_checker", "/update_weight_version"), (404, {"detail": "Not Found"})
        )
        await client.join_weight_group(GROUP)
        await receive(client, 3)
        await client.commit_update(3)
        assert RECEIVE in server.log
        assert not {"/begin_weight_update", "/end_weight_update"} & {*server.log}


@pytest.mark.parametrize("served", ["6", "default", "updating"])
@pytest.mark.parametrize("kind", ["sglang", "embedded"])
async def test_a_commit_after_which_another_version_is_served_has_failed(kind: str, served: str):
    async with connected(kind) as (client, server):
        await receive(client, 7)
        server.version = served
        with pytest.raises(ServerError, match="must serve version 7"):
            await client.commit_update(7)
        with pytest.raises(ServerError, match="must serve version 7"):
            await client.update_from_disk("/pushed/7", 7)
        server.version = "7"
        await client.commit_update(7)


async def test_the_embedded_server_is_sent_checksums_base_and_order_and_says_how_long_it_stood():
    async with connected("embedded") as (client, server):
        await receive(client, 7)
        sent = server.buckets()
        assert [body["sequence"] for body in sent] == [0, 1]
        assert [body["checksums"] for body in sent] == [[17], [18]]
        assert [body["weight_version"] for body in sent] == [None, "7"]
        server.version = "7"
        assert await client.commit_update(7) == 0.25
        await receive(client, 7, (DELTA,))
        body = server.bodies[-1]
        assert (body["num_changed"], body["base_version"], body["sequence"]) == ([1], 6, 0)
        server.answers["/end_weight_update"] = (200, {"success": True})
        with pytest.raises(ServerError, match="swap_seconds"):
            await client.commit_update(7)


async def test_the_embedded_server_alone_tells_what_it_serves():
    route, held = "/weights_checker", {"dtype": "bfloat16", "checksums": {"a": 2**63 + 1}}
    async with connected("embedded") as (client, server):
        server.answers[route] = (200, {"ranks": [held]})
        assert await client.served_checksums("bfloat16") == {"a": 2**63 + 1}
        assert await client.served_checksums("float32") is None
        server.answers[route] = (200, {"ranks": []})
        with pytest.raises(ServerError, match="one rank with dtype and checksums"):
            await client.served_checksums("bfloat16")
    async with connected("sglang") as (client, server):
        assert await client.served_checksums("bfloat16") is None
        assert not [entry for entry in server.log if entry.startswith(route)], (
            "its tensors are fused"
        )


WRONG_FOR_SGLANG = {
    "a delta": (replace(DELTA, checksums=None), "cannot apply deltas"),
    "an adapter": (adapter_of("typo"), r"no parameters named \['typo.weight'\]"),
    "a name": (replace(BUCKETS[0], names=("c.9",)), r"no parameters named \['c\.9'\]"),
}


@pytest.mark.parametrize("what", WRONG_FOR_SGLANG)
async def test_what_sglang_cannot_load_is_refused_before_it_is_asked_to_receive(what: str):
    bucket, message = WRONG_FOR_SGLANG[what]
    async with connected("sglang") as (client, server):
        with pytest.raises(ServerError, match=message):
            await receive(client, 7, (bucket,))
        assert RECEIVE not in server.log


async def test_sglang_is_asked_once_a_group_whether_it_adds_adapters_and_told_each_buckets_place():
    adapters = (adapter_of("a"), adapter_of("b"))
    async with connected("sglang") as (client, server):
        with pytest.raises(ServerError, match=r"serve_sglang.sh .* lora.push = 'merged'"):
            await receive(client, 7, adapters)
        assert TAKE_OFF not in server.log, "the old weights are whole, and stay served"
        server.answers[RECEIVE] = (200, {"success": True, "message": READY})
        server.bodies.clear()
        for _ in range(2):
            await receive(client, 7, adapters)
        first, *formats = [body["load_format"] for body in server.buckets()]
        assert first == PROBE
        notes = [note_of(load_format) for load_format in formats]
        assert notes == 2 * [AdapterNote(0, False, 0.5, "base"), AdapterNote(1, True, 0.5, "base")]
        await client.join_weight_group(GROUP)  # perhaps another server with the same address
        await receive(client, 7, adapters)
        assert [body["load_format"] for body in server.buckets()].count(PROBE) == 2


SAVES = (200, {"enable_memory_saver": True, "version": "0.5.23"})
SLEEPS = (200, {"results": ["memory", "memory"]})
AWAKE = (200, {"status": "awake"})


@pytest.mark.parametrize(
    ("kind", "answers", "sleep", "wake"),
    [
        (
            "vllm",
            {"/collective_rpc": SLEEPS, "/wake_up": AWAKE},
            ["/collective_rpc", TAKE_OFF, "/sleep?level=2&mode=abort"],
            ["/wake_up"],
        ),
        *(
            (
                "vllm",
                {"/collective_rpc": workers, "/wake_up": AWAKE},
                ["/collective_rpc", "/sleep?level=0&mode=abort"],
                ["/wake_up"],
            )
            for workers in (
                (500, "no such method"),  # without the worker extension
                (200, {"results": ["memory", "nothing"]}),  # one without --enable-sleep-mode
            )
        ),
        (
            "sglang",
            {"/server_info": SAVES},
            ["/pause_generation", "/server_info", TAKE_OFF, "/release_memory_occupation"],
            ["/model_info", "/resume_memory_occupation", "/continue_generation"],
        ),
        ("sglang", {}, ["/pause_generation", "/server_info"], ["/continue_generation"]),
        (
            "sglang",
            {"/server_info": (200, SAVES[1] | {"device": "cpu"})},
            ["/pause_generation", "/server_info"],
            ["/continue_generation"],
        ),
    ],
)
async def test_a_server_that_loses_its_weights_in_its_sleep_has_no_version(
    kind: str, answers: dict[str, Any], sleep: list[str], wake: list[str]
):
    async with connected(kind) as (client, server):
        server.answers = answers
        server.log.clear()
        freed = await client.sleep()
        assert (freed == "memory") == (TAKE_OFF in sleep) and server.log == sleep
        server.version = "updating"
        server.log.clear()
        await client.sleep()  # SGLang would die if it released its memory twice
        assert "/release_memory_occupation" not in server.log
        server.log.clear()
        await client.wake()
        assert server.log == wake
        server.log.clear()
        await client.wake()
        assert "/resume_memory_occupation" not in server.log


async def test_what_sglang_has_done_is_known_though_it_has_not_answered():
    async with connected("sglang") as (client, server):
        server.answers, server.version = {"/server_info": SAVES}, "updating"
        for route, method, again in (
            ("/release_memory_occupation", client.sleep, False),  # would end the server
            ("/resume_memory_occupation", client.wake, True),
        ):
            server.answers[route] = (500, "late")
            with pytest.raises(ServerError, match="late"):
                await method()
            del server.answers[route]
            server.log.clear()
            await method()
            assert (route in server.log) == again
        for _ in range(2):
            server.log.clear()
            await client.sleep()
            assert server.log[-2:] == [TAKE_OFF, "/release_memory_occupation"]
            await client.join_weight_group(GROUP)  # it was restarted


async def test_an_sglang_that_may_be_awake_after_an_unanswered_wake_up_is_not_said_to_sleep():
    async with connected("sglang") as (client, server):
        server.answers, server.version = {"/server_info": SAVES}, "updating"
        await client.sleep()
        server.answers["/resume_memory_occupation"] = (500, "late")
        with pytest.raises(ServerError, match="late"):
            await client.wake()
        with pytest.raises(ServerError, match="Only a restart tells"):
            await client.sleep()
        server.version = "default"  # it was restarted
        assert await client.sleep() == "memory"


async def test_an_sglang_that_was_restarted_in_its_sleep_is_put_to_sleep_again_and_not_woken():
    async with connected("sglang") as (client, server):
        server.answers = {"/server_info": SAVES}
        await client.sleep()
        assert server.version == "default", "as after a restart"
        await client.wake()  # the server would die of it
        assert "/resume_memory_occupation" not in server.log
        for _ in range(2):
            await client.sleep()
        assert server.log.count("/release_memory_occupation") == 3, "its memory is free each time"


async def test_a_vllm_that_stays_partly_asleep_is_not_awake():
    async with connected("vllm") as (client, server):
        server.answers["/wake_up"] = (200, {"status": "sleeping"})
        with pytest.raises(ServerError, match="must answer 'awake', got sleeping"):
            await client.wake()


@pytest.mark.parametrize("kind", KINDS)
async def test_servers_are_paused_and_resumed_and_a_group_that_was_left_gets_no_bucket(kind: str):
    async with connected(kind, joins=False) as (client, server):
        await client.pause()
        await client.resume()
        pause, resume = server.log
        assert pause.startswith(("/pause?mode=keep", "/pause_generation"))
        assert resume in ("/resume", "/continue_generation")
        assert server.bodies[0].get("mode", "keep") in ("keep", "retract")
        await client.join_weight_group(GROUP)
        await client.leave_weight_groups()
        with pytest.raises(ServerError, match="not joined weight group group"):
            await client.receive_bucket(BUCKETS[0], group_name="group", last=True, version=7)
