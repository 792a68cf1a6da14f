# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Client and launcher of SGLang servers (0.5.20 and later). The embedded server has the same routes."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.grpo.inference.answers import (
    UNPUSHED_LABEL,
    UPDATING_LABEL,
    as_object,
    first_architecture,
    max_answer_bytes,
    max_rating_bytes,
    smallest,
    version_or_none,
)
from torchtitan.grpo.inference.client import (
    PromptRating,
    ServerError,
    ServerFacts,
    ServerLoad,
    SleepFrees,
)
from torchtitan.grpo.inference.http import HttpClient, excerpt
from torchtitan.grpo.inference.join_check import require_kind
from torchtitan.grpo.inference.kinds import LaunchCommand, ServerSpec, batched_tokens, seed_option
from torchtitan.grpo.inference.sglang import answers
from torchtitan.grpo.types import GenerateRequest, Generation, ServerKind
from torchtitan.grpo.weight_wire.adapter_names import served_weight_of
from torchtitan.grpo.weight_wire.group_facts import GroupFacts
from torchtitan.grpo.weight_wire.transfer_messages import (
    PROBE,
    READY,
    AdapterNote,
    BucketSpec,
    WeightGroupInfo,
)

# In later releases, an update is a session with a begin and an end request.
_WITHOUT_SESSIONS = re.compile(r"0\.5\.20(?!\d)")  # its pre-releases too
_RECEIVE_ROUTE = "/update_weights_from_distributed"
_OUTSIDE_VOCABULARY = 2**31 - 1
_SERVER_MAIN = Path(__file__).with_name("server_main.py")
# On a CPU, SGLang would otherwise allocate 15 GB for its KV cache.
_CPU_MAX_TOKENS = 32768
# In the message that refuses a logit bias of a token that is not in the vocabulary.
_LAST_TOKEN = re.compile(r"keys in \[0, (\d+)\]")


class SGLangClient(HttpClient):
    """Client of one SGLang server.

    :meth:`pause` sends running requests back to the queue, so their KV cache is computed again afterwards.
    Every token after an update is therefore sampled from the new policy.
    """

    _KIND: ServerKind = "sglang"
    # What the server is told of a group, of the fields of WeightGroupInfo.
    _GROUP_FIELDS: tuple[str, ...] = (
        "master_address", "master_port", "rank_offset", "world_size", "group_name", "backend",
    )  # fmt: skip

    _has_sessions: bool | None = None
    _parameter_names: frozenset[str] | None = None
    _adds_adapters = False
    _num_adapter_buckets = 0
    _was_ready = False
    _is_asleep: bool | None = False  # None from the request to wake until its answer

    async def generate(self, request: GenerateRequest) -> Generation:
        body = await self._ask_model(
            "/generate",
            answers.generate_body(request),
            max_answer_bytes(request),
            request.request_id,
        )
        return answers.parse_generation(f"{self.url}/generate", request, body)

    async def abort(self, request_id: str | None) -> None:
        body = {"abort_all": True} if request_id is None else {"rid": answers.server_id(request_id)}
        await self._http.post("/abort_request", body)

    async def describe(self, temperature: float) -> ServerFacts:
        identity = await require_kind(self._http, self._KIND)
        info, server = await self._model_info(), await self._server_info()
        card = await self._model_card()
        return ServerFacts(
            software=identity.software,
            release=server.get("version"),
            model_path=info.get("model_path"),
            architecture=first_architecture(info),
            vocab_size=info.get("vocab_size") or await self._vocab_size(),
            # SGLang's KV cache may have room for less than the model's own length.
            max_model_len=smallest(
                card.get("max_model_len"),
                server.get("max_model_len"),
                server.get("max_total_num_tokens"),
            ),
            sleep_frees=self._frees(server),
        )

    async def _vocab_size(self) -> int | None:
        """Returns the size of the vocabulary, found by sending a request that the server refuses."""
        outside = {"max_new_tokens": 1, "logit_bias": {str(_OUTSIDE_VOCABULARY): 0.0}}
        body = {"input_ids": [0], "sampling_params": outside}
        answer = await self._http.post("/generate", body, scope="generation", accept=(400,))
        found = _LAST_TOKEN.search(excerpt(answer.body))
        return None if answer.status != 400 or found is None else int(found[1]) + 1

    async def health(self) -> None:
        # `/health` generates a token, which takes a second and fails while the server is paused.
        # `/ready` answers 503 while the server starts, is paused or sleeps. A server that was ready
        # before, or has had pushed weights, has started; then its scheduler must answer.
        answer = await self._http.get("/ready", accept=(503,))
        if answer.status == 503:
            label = None if self._was_ready else (await self._model_info()).get("weight_version")
            if label in (UNPUSHED_LABEL, None) and not self._was_ready:
                raise ServerError(f"{self.url}/ready answered 503: the server is starting.")
            await self._server_info()
        self._was_ready = True

    async def version(self) -> int | None:
        return version_or_none((await self._model_info()).get("weight_version"))

    async def _model_info(self) -> dict[str, Any]:
        # If both keys are set, routes that only report something need the generation key.
        answer = await self._http.get("/model_info", scope="generation")
        return as_object(answer.body, f"{self.url}/model_info")

    async def _server_info(self) -> dict[str, Any]:
        answer = await self._http.get("/server_info", scope="generation")
        return as_object(answer.body, f"{self.url}/server_info")

    async def load(self) -> ServerLoad:
        route = "/v1/loads?include=core"
        answer = await self._http.get(route, scope="generation")
        return answers.parse_loads(self.url + route, answer.body)

    async def num_workers(self) -> int:
        info = await self._server_info()
        for size in ("dp_size", "pp_size"):
            if info.get(size, 1) != 1:
                raise ServerError(
                    f"{self.url}: SGLang must run with {size} = 1 to receive weights, "
                    f"got {info[size]}. Start one server for each replica, with --tp alone."
                )
        tp_size = info.get("tp_size", 1)
        if not isinstance(tp_size, int):
            raise ServerError(
                f"{self.url}/server_info must give tp_size as a number, got {tp_size}."
            )
        return tp_size

    async def group_facts(self) -> list[GroupFacts]:
        return [answers.facts_of_server(await self._server_info())]

    async def pause(self) -> None:
        await self._http.post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {})

    def _frees(self, info: dict[str, Any]) -> SleepFrees:
        # On a CPU, the option is accepted and has no effect.
        frees = info.get("enable_memory_saver") is True and info.get("device") != "cpu"
        return "memory" if frees else "nothing"

    async def sleep(self) -> SleepFrees:
        # Requests in flight are held. A server that is not paused would die of an assertion about them.
        await self.pause()
        frees = self._frees(await self._server_info())
        sleeps = frees == "memory" and await self._sleeps()
        if sleeps and self._is_asleep is None:
            raise ServerError(
                f"{self.url} must be known to be asleep or awake, but it has not answered the request to "
                "wake. Only a restart tells."
            )
        if frees == "memory" and not sleeps:
            self._update_marked = False
            await self._mark_updating()
            self._is_asleep = True  # a second time, either request would end the server
            # Without tags, for weights, cache and CUDA graphs, in the right order.
            await self._http.post("/release_memory_occupation", {})
        return frees

    async def wake(self) -> None:
        if await self._sleeps():
            self._is_asleep = None
            await self._http.post("/resume_memory_occupation", {})
            self._is_asleep = False
        await self.resume()

    async def _sleeps(self) -> bool:
        # A server that was restarted in its sleep is awake, and would die of the request to wake.
        if self._is_asleep is not False:
            label = (await self._model_info()).get("weight_version")
            if label in (UNPUSHED_LABEL, None):
                self._is_asleep = False
        return self._is_asleep is not False

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        await self._http.post(
            "/init_weights_update_group",
            {name: getattr(info, name) for name in self._GROUP_FIELDS},
            timeout_seconds=info.timeout_seconds,
        )
        self._groups[info.group_name] = info
        self._adds_adapters = self._is_asleep = False  # it may have been restarted before

    async def leave_weight_groups(self) -> None:
        # Only the groups of this client have known names. The groups of a trainer that has ended
        # stay with the server, but no request makes it wait for them any more.
        await self._close_session()
        for name in list(self._groups):
            await self._http.post(
                "/destroy_weights_update_group", {"group_name": name}, accept=(400,)
            )
            del self._groups[name]

    async def begin_update(self) -> None:
        self._update_marked = False
        self._num_adapter_buckets = 0
        if await self._needs_session():
            await self._close_session()
            await self._http.post("/begin_weight_update", {"selector": "target"})

    async def _close_session(self) -> None:
        # 400: no session is open. 404: the release has no sessions.
        await self._http.post("/end_weight_update", {}, accept=(400, 404))

    async def _needs_session(self) -> bool:
        if self._has_sessions is None:
            release = str((await self._server_info()).get("version"))
            self._has_sessions = _WITHOUT_SESSIONS.match(release) is None
        return self._has_sessions

    async def receive_bucket(
        self, bucket: BucketSpec, *, group_name: str, last: bool, version: int
    ) -> None:
        group = self._joined(group_name)
        if bucket.num_changed is not None:
            raise ServerError(
                f"{self.url} runs SGLang, which cannot apply deltas. Set weight_sync.delta = false."
            )
        # One at a time, because requests may overtake each other, and the bytes of one bucket
        # would be taken for those of another one with the same size.
        async with self._one_bucket:
            await self._refuse_unknown_names(bucket, group)
            load_format = await self._load_format(bucket, is_last=last)
            await self._mark_updating()
            await self._http.post(
                _RECEIVE_ROUTE,
                {
                    "names": list(bucket.names),
                    "dtypes": list(bucket.dtypes),
                    "shapes": [list(shape) for shape in bucket.shapes],
                    "group_name": group.group_name,
                    "load_format": load_format,
                    "abort_all_requests": False,
                    "flush_cache": last,
                    "weight_version": str(version) if last else None,
                },
                timeout_seconds=group.timeout_seconds,
            )

    async def _load_format(self, bucket: BucketSpec, *, is_last: bool) -> str:
        """Returns the ``load_format`` of the next bucket. For adapters, first checks that our hooks are there."""
        if bucket.lora_scale is None or bucket.lora_base is None:
            return "flattened_bucket"
        if not self._adds_adapters:
            nothing: dict[str, list[str]] = {"names": [], "dtypes": [], "shapes": []}
            body = {**nothing, "group_name": "", "load_format": PROBE, "flush_cache": False}
            answer = excerpt((await self._http.post(_RECEIVE_ROUTE, body, accept=(400,))).body)
            if READY not in answer:
                raise ServerError(
                    f"{self.url} must run SGLang with this project's hooks to add adapters to its base "
                    f"weights, and does not (it answered: {answer}). Start it with "
                    "scripts/serve_sglang.sh or `torchtitan-grpo serve sglang`, with SGLang 0.5.23, or "
                    "set lora.push = 'merged'."
                )
            self._adds_adapters = True
        index, self._num_adapter_buckets = self._num_adapter_buckets, self._num_adapter_buckets + 1
        return AdapterNote(index, is_last, bucket.lora_scale, bucket.lora_base).as_load_format()

    async def _refuse_unknown_names(self, bucket: BucketSpec, group: WeightGroupInfo) -> None:
        """Raises ServerError for unknown names, which SGLang would ignore. (SGLang does check shapes.)"""
        if self._parameter_names is None:
            answer = await self._http.post(
                "/weights_checker",
                {"action": "checksum"},
                timeout_seconds=group.timeout_seconds,
                accept=(404,),
            )
            self._parameter_names = answers.checksum_names(answer.body)
        if self._parameter_names:
            names = map(served_weight_of, bucket.names)
            unknown = answers.unknown_names(names, self._parameter_names)
            if unknown:
                raise ServerError(
                    f"{self.url} has no parameters named {unknown[:4]} ({len(unknown)} of "
                    f"{len(bucket.names)} in this bucket). Trainer and server must hold the "
                    "same model."
                )

    async def _mark_updating(self) -> None:
        """Replaces the server's version by a marker before the first tensor changes.

        If a push fails half-way, tokens that are sampled afterwards then cannot be taken for tokens of the
        old version, whichever client resumes the server. (An old release answers 404.)
        """
        if not self._update_marked:
            await self._http.post(
                "/update_weight_version",
                {"new_version": UPDATING_LABEL, "abort_all_requests": False},
                accept=(404,),
            )
            self._update_marked = True

    async def commit_update(self, version: int) -> float:
        if await self._needs_session():
            await self._http.post("/end_weight_update", {})
        await self._require_version(version)
        return 0.0

    async def update_from_disk(self, path: str, version: int) -> float:
        self._update_marked = False
        await self._close_session()
        await self._mark_updating()
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        route = "/update_weights_from_disk"
        await self._http.post(route, body, timeout_seconds=self._request_timeout_seconds)
        await self._require_version(version)
        return 0.0

    async def _require_version(self, version: int) -> None:
        served = await self.version()
        if served != version:
            raise ServerError(
                f"{self.url} must serve version {version} after the update, got {served}."
            )

    async def rate(
        self, sequences: Sequence[list[int]], starts: Sequence[int], num_top: int = 0
    ) -> list[PromptRating]:
        body = await self._ask_model(
            "/generate",
            answers.rating_body(sequences, starts, num_top),
            max_rating_bytes(sequences, num_top),
        )
        source = f"{self.url}/generate"
        if not isinstance(body, list) or len(body) != len(sequences):
            raise ServerError(
                f"{source} must answer a list of {len(sequences)} entries, got {excerpt(body)}"
            )
        return [
            answers.parse_rating(source, token_ids, start, num_top, entry)
            for token_ids, start, entry in zip(sequences, starts, body, strict=True)
        ]


def launch_command(spec: ServerSpec) -> LaunchCommand:
    command = [spec.python or sys.executable, str(_SERVER_MAIN)]
    if spec.device == "cpu":
        # An idle scheduler would otherwise ask for requests in a loop, which takes a whole core.
        command += ["--attention-backend", "torch_native", "--sleep-on-idle"]
        wanted = spec.max_running_requests * spec.max_model_len or _CPU_MAX_TOKENS
        max_tokens = max(spec.max_model_len, min(wanted, _CPU_MAX_TOKENS))
        command += ["--max-total-tokens", str(max_tokens)]
    command += ["--model-path", spec.model_path, "--host", spec.host, "--port", str(spec.port)]
    command += ["--device", spec.device, "--dtype", spec.dtype]
    command += ["--context-length", str(spec.max_model_len)] if spec.max_model_len else []
    command += ["--max-running-requests", str(spec.max_running_requests)]
    # SGLang does not mix prompts and running requests in one batch when logprobs are asked for, so
    # its option --enable-mixed-chunk would do nothing here. The interval makes running requests
    # wait for one chunk of a prompt, and not for all of its chunks.
    command += ["--chunked-prefill-size", str(batched_tokens(spec))]
    command += ["--prefill-decode-interval", "1"]
    command += ["--tp-size", str(spec.tensor_parallel_size)]
    if spec.is_lent and spec.device == "cuda":
        command += ["--enable-memory-saver"]
    if spec.gpu_memory_utilization is not None and spec.device == "cuda":
        command += ["--mem-fraction-static", f"{spec.gpu_memory_utilization:g}"]
    command += seed_option("--random-seed", spec)
    return LaunchCommand(command, {"HF_HUB_OFFLINE": "1"})
