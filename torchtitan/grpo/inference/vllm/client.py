# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Client and launcher of vLLM servers (0.32 and 0.33) with this project's weight transfer engine.

:func:`launch_command` sets the options that they need: ``--enable-scale-out`` (whose route for token ids
reports the weight version of every token), ``VLLM_SERVER_DEV_MODE=1`` (routes for reinforcement
learning), ``--weight-transfer-config`` and ``--logprobs-mode processed_logprobs``.
"""

import asyncio
import json
import logging
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from torchtitan.grpo.inference.answers import (
    UPDATING_LABEL,
    max_answer_bytes,
    max_rating_bytes,
    reading,
    smallest,
    version_or_none,
)
from torchtitan.grpo.inference.client import (
    MAX_TOP_TOKENS,
    Capabilities,
    LogprobsError,
    PromptRating,
    ServerError,
    ServerFacts,
    ServerLoad,
    SleepFrees,
)
from torchtitan.grpo.inference.http import HttpClient, RouteError, excerpt
from torchtitan.grpo.inference.join_check import require_kind
from torchtitan.grpo.inference.kinds import LaunchCommand, ServerSpec, batched_tokens, seed_option
from torchtitan.grpo.inference.vllm import answers
from torchtitan.grpo.types import GenerateRequest, Generation
from torchtitan.grpo.weight_wire.group_facts import GroupFacts, facts_from_json
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

logger = logging.getLogger(__name__)

_PROBE_TOKENS = (0, 1)  # in every vocabulary
_PROBE_TOLERANCE = 1e-3
# The class whose methods vLLM adds to its workers, and those methods.
_WORKER_EXTENSION = "torchtitan.grpo.inference.vllm.worker_extension.WorkerExtension"
_GROUP_FACTS_METHOD = "torchtitan_grpo_group_facts"
_SLEEP_FREES_METHOD = "torchtitan_grpo_sleep_frees"
NO_EXTENSION = (
    f"vLLM tells it if it is started with --worker-extension-cls {_WORKER_EXTENSION}, as "
    "scripts/serve_vllm.sh starts it."
)


class VLLMClient(HttpClient):
    """Client of one vLLM server.

    :meth:`pause` suspends running requests without ending them. :meth:`commit_update` drops their
    KV cache and the prefix cache, so every token after an update is sampled from the new policy.

    Buckets are staged while the server generates if all workers have room for a second copy of the
    weights, and otherwise while it is paused. :attr:`capabilities` are final when the server has
    joined a group.
    """

    _logprobs_probe: asyncio.Task[None] | None = None
    _takes_logit_bias = True  # not with speculative decoding

    async def generate(self, request: GenerateRequest) -> Generation:
        if not self._takes_logit_bias:
            request = replace(request, unknown_ids=())
        if request.temperature not in (0.0, 1.0):
            await self._require_processed_logprobs(request.prompt_ids)
        try:
            body = await self._ask_model(
                answers.GENERATE_ROUTE,
                answers.generate_body(request),
                max_answer_bytes(request),
                request.request_id,
            )
        except RouteError as error:
            if not (request.unknown_ids and error.is_refusal and "logit_bias" in str(error)):
                raise
            logger.warning(
                "%s samples from the whole vocabulary, because it takes no logit_bias (%s). Answers with "
                "tokens that are not in the tokenizer are refused.", self.url, error,
            )  # fmt: skip
            self._takes_logit_bias = False
            return await self.generate(request)
        return answers.parse_generation(f"{self.url}{answers.GENERATE_ROUTE}", request, body)

    async def _require_processed_logprobs(self, prompt_ids: list[int]) -> None:
        """Checks once that the server returns logprobs after temperature. Requests wait for the check."""
        probe = self._logprobs_probe
        if probe is None or (probe.done() and (probe.cancelled() or probe.exception())):
            probe = self._logprobs_probe = asyncio.ensure_future(self._probe_logprobs(prompt_ids))
        await asyncio.shield(probe)

    async def _probe_logprobs(self, prompt_ids: list[int]) -> None:
        """Requests two completions of one token, each with a different token as the only one allowed.

        Both logprobs are 0 if they are of the distribution that is sampled from. In the raw distribution
        they cannot both be 0. Raises LogprobsError if one is not 0. (``/server_info`` takes half a minute.)
        """
        for token in _PROBE_TOKENS:
            name = f"probe-{uuid.uuid4().hex}"
            request = GenerateRequest(name, prompt_ids, max_new_tokens=1)
            body = answers.generate_body(request)
            body["sampling_params"]["allowed_token_ids"] = [token]
            route = answers.GENERATE_ROUTE
            answer = await self._ask_model(route, body, max_answer_bytes(request))
            logprobs = answers.parse_logprobs(self.url + route, answer)
            if not all(abs(logprob) <= _PROBE_TOLERANCE for logprob in logprobs):  # nor NaN
                raise LogprobsError(
                    f"{self.url}: with rollout.temperature other than 1, the server must return "
                    "logprobs of the distribution after temperature, but it returns those before "
                    "it. Start it with --logprobs-mode processed_logprobs."
                )

    async def abort(self, request_id: str | None) -> None:
        ids = [] if request_id is None else [answers.REQUEST_ID_PREFIX + request_id]
        await self._http.post("/abort_requests", {"request_ids": ids})

    async def describe(self, temperature: float) -> ServerFacts:
        identity = await require_kind(self._http, "vllm")
        card = await self._model_card()
        found = await answers.examine(self._http)
        if found.can_generate and temperature not in (0.0, 1.0):
            try:
                await self._require_processed_logprobs([0])
            except LogprobsError:
                found.problems.append(answers.WRONG_LOGPROBS)
        if found.problems:  # not each of them shows while another is missing
            found.problems.append(answers.ALL_OPTIONS)
        return ServerFacts(
            software=identity.software,
            release=identity.software.removeprefix("vLLM").strip() or None,
            model_path=card.get("root"),
            vocab_size=found.vocab_size,
            max_model_len=smallest(card.get("max_model_len")),
            sleep_frees="nothing" if found.problems else await self._sleep_frees(),
            problems=tuple(found.problems),
            warnings=tuple(f"{self.url}: {text}." for text in found.warnings),
        )

    async def health(self) -> None:
        await self._http.get("/health")

    async def version(self) -> int | None:
        return version_or_none(await self._field("weight_version", "GET", "/weight_info"))

    async def load(self) -> ServerLoad:
        answer = await self._http.get("/metrics", scope="generation")
        return answers.parse_metrics(f"{self.url}/metrics", answer.body)

    async def num_workers(self) -> int:
        sizes = []
        for include_dp in ("true", "false"):
            route = f"/get_world_size?include_dp={include_dp}"
            size = await self._field("world_size", "GET", route)
            if not isinstance(size, int):
                raise ServerError(f"{self.url}{route} must answer a number, got {excerpt(size)}")
            sizes.append(size)
        if sizes[0] != sizes[1]:
            raise ServerError(
                f"{self.url}: vLLM must run without data parallelism to receive weights, got "
                f"{sizes[0]} workers in replicas of {sizes[1]}. Start one server for each replica."
            )
        return sizes[0]

    async def group_facts(self) -> list[GroupFacts]:
        results = await self._ask_workers(_GROUP_FACTS_METHOD)
        return [facts_from_json(result) for result in results] or [GroupFacts(hint=NO_EXTENSION)]

    async def _ask_workers(self, method: str) -> list[Any]:
        """Calls a method of all workers. Returns their answers, or [] if vLLM runs without our extension."""
        body = {"method": method}
        answer = await self._http.post("/collective_rpc", body, accept=(400, 404, 500))
        results = answer.body.get("results") if isinstance(answer.body, dict) else None
        return results if answer.status == 200 and isinstance(results, list) else []

    async def pause(self) -> None:
        await self._http.post("/pause?mode=keep")

    async def resume(self) -> None:
        await self._http.post("/resume")

    async def _sleep_frees(self) -> SleepFrees:
        results = await self._ask_workers(_SLEEP_FREES_METHOD)
        return "memory" if results and set(results) == {"memory"} else "nothing"

    async def sleep(self) -> SleepFrees:
        frees = await self._sleep_frees()
        if frees == "memory":
            await self._mark_updating()
        # Level 2 discards weights, of which level 1 would keep a copy on the host, although they are
        # replaced after training. Level 0 stops generation. Each ends the requests.
        level = 2 if frees == "memory" else 0
        await self._http.post(f"/sleep?level={level}&mode=abort")
        return frees

    async def wake(self) -> None:
        status = await self._field("status", "POST", "/wake_up")
        if status != "awake":
            raise ServerError(f"{self.url}/wake_up must answer 'awake', got {excerpt(status)}")

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        route, body = "/init_weight_transfer_engine", asdict(info)
        # Asked before any worker waits for the rendezvous: either all workers have room, or none
        # stages. vLLM does not return the workers' answers, so an error means "no room".
        probe = await self._http.post(
            route, {"init_info": {**body, "probe": True}}, accept=(400, 500)
        )
        has_room, text = probe.status == 200, excerpt(probe.body)
        if not has_room:
            if answers.NO_ROOM not in text:
                message = f"{self.url}{route} refused to join a weight group: {text}"
                raise RouteError(message, probe.status)
            logger.warning("%s is paused while it receives weights: %s", self.url, text)
        self.capabilities = Capabilities(
            stops_for="commit" if has_room else "transfer",
            verifies_checksums=has_room,
            takes_deltas=has_room and info.deltas,
            receives_in_parallel=has_room,
            receives_pieces=True,
        )
        await self._http.post(route, {"init_info": body}, timeout_seconds=info.timeout_seconds)
        self._groups[info.group_name] = info

    async def leave_weight_groups(self) -> None:
        self._groups.clear()
        route = "/shutdown_weight_transfer_engine"
        if (await self._http.post(route, accept=(400, 500))).status != 200:
            await self._abandon_update()  # vLLM refuses to shut down while an update is open
            await self._http.post(route)

    async def begin_update(self) -> None:
        self._update_marked = False
        self._sequences.clear()
        answer = await self._http.post("/start_weight_update", accept=(400, 500))
        if answer.status != 200:  # most likely, an earlier trainer left an update open
            await self._abandon_update()
            await self._http.post("/start_weight_update")

    async def _abandon_update(self) -> None:
        """Drops staged buckets, restores layers that have no weights, and ends the update."""
        await self._update({"action": "abandon"}, accept=(400, 500))
        # The server refuses this if no update was open.
        await self._http.post("/finish_weight_update", {"weight_version": None}, accept=(400, 500))

    async def _update(self, info: dict[str, Any], **options: Any) -> None:
        await self._http.post("/update_weights", {"update_info": info}, **options)

    async def receive_bucket(
        self, bucket: BucketSpec, *, group_name: str, last: bool, version: int
    ) -> None:
        group = self._joined(group_name)
        info = {**asdict(bucket), "group_name": group_name}
        if self.capabilities.stops_for != "transfer":
            sequence = self._next_sequence(group_name)
            await self._update({"action": "stage", **info, "sequence": sequence})
            return
        async with self._one_bucket:
            if not self._update_marked:
                # Lets the server refuse wrong weights while the old ones are still whole.
                await self._update({"action": "check", **info})
                await self._mark_updating()
            await self._update({"action": "receive", **info}, timeout_seconds=group.timeout_seconds)

    async def _mark_updating(self) -> None:
        """Replaces the version by a marker, so that no token gets the old version if a load fails half-way."""
        await self._http.post("/update_weight_version", {"new_version": UPDATING_LABEL})
        self._update_marked = True

    async def commit_update(self, version: int) -> float:
        patience = max((g.timeout_seconds for g in self._groups.values()), default=None)
        await self._commit(version, patience, staged=self.capabilities.stops_for == "commit")
        return 0.0

    async def _commit(self, version: int, patience: float | None, *, staged: bool) -> None:
        if staged:
            # Lets the server refuse the update while it still serves the old weights as a whole.
            info = {"action": "verify", "version": str(version)}
            await self._update(info, timeout_seconds=patience)
            await self._mark_updating()
        await self._http.post(
            "/finish_weight_update", {"weight_version": str(version)}, timeout_seconds=patience
        )
        # Running requests are preempted, because their KV cache is of the old weights, too.
        route = "/reset_prefix_cache?reset_running_requests=true"
        success = await self._field("success", "POST", route)
        if success is not True:
            raise ServerError(
                f"{self.url}{route}: the server must drop the caches of the old weights after an "
                f"update, got success = {excerpt(success)}"
            )

    async def update_from_disk(self, path: str, version: int) -> float:
        patience = self._request_timeout_seconds
        await self.begin_update()
        await self._update({"action": "disk", "path": path}, timeout_seconds=patience)
        await self._commit(version, patience, staged=True)
        return 0.0

    async def rate(
        self, sequences: Sequence[list[int]], starts: Sequence[int], num_top: int = 0
    ) -> list[PromptRating]:
        return [
            await self._rate(token_ids, start, num_top)
            for token_ids, start in zip(sequences, starts, strict=True)
        ]

    async def _rate(self, token_ids: list[int], start: int, num_top: int) -> PromptRating:
        try:
            body = await self._ask_model(
                answers.GENERATE_ROUTE,
                answers.rating_body(token_ids, num_top),
                max_rating_bytes([token_ids], num_top),
            )
        except RouteError as error:
            if not answers.refuses_num_top(error):
                raise
            raise RouteError(
                f"{self.url} must return the {num_top} most likely tokens at each position, but it "
                f"refuses that: {excerpt(error.body)}. Start it with --max-logprobs {num_top} or "
                "more",
                error.status,
            ) from error
        source = f"{self.url}{answers.GENERATE_ROUTE}"
        return answers.parse_rating(source, token_ids, start, num_top, body)

    async def close(self) -> None:
        if self._logprobs_probe is not None:
            self._logprobs_probe.cancel()
        await super().close()

    async def _field(self, name: str, method: str, route: str) -> Any:
        """Returns one field of the answer to a request."""
        body = (await self._http.request(method, route)).body
        with reading(self.url + route, body, name):
            return body[name]


def launch_command(spec: ServerSpec) -> LaunchCommand:
    # The module, not the console script `vllm serve`, which fails in vLLM's CPU package.
    command = [spec.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", spec.model_path, "--host", spec.host, "--port", str(spec.port)]
    command += ["--dtype", spec.dtype, "--max-model-len", str(spec.max_model_len or "auto")]
    command += ["--max-num-seqs", str(spec.max_running_requests)]
    # Running requests come first in vLLM, and prompts get what is left of the budget.
    command += ["--enable-chunked-prefill", "--max-num-batched-tokens", str(batched_tokens(spec))]
    # The route that takes and returns token ids, with the weight version of each token.
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    # A teacher returns its most likely tokens (teacher.top_k); vLLM's default limit is 20.
    command += ["--max-logprobs", str(MAX_TOP_TOKENS)]
    command += [
        "--weight-transfer-config",
        json.dumps({"backend": "torchtitan_grpo"}, allow_nan=False),
    ]
    command += ["--worker-extension-cls", _WORKER_EXTENSION]
    command += ["--middleware", answers.GUARD]
    command += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    if spec.is_lent and spec.device == "cuda":  # the CPU build refuses the option
        command += ["--enable-sleep-mode"]
    if spec.gpu_memory_utilization is not None and spec.device == "cuda":
        command += ["--gpu-memory-utilization", f"{spec.gpu_memory_utilization:g}"]
    command += seed_option("--seed", spec)
    defaults = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if spec.device == "cpu":
        command += ["--enforce-eager"]
        # The KV cache takes 1 GiB. Threads are not pinned to cores, because vLLM would choose
        # the cores on which the trainer's threads run.
        defaults |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return LaunchCommand(command, defaults, {"VLLM_API_KEY": spec.api_key})
