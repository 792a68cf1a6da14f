# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Client and launcher of the embedded server, which extends SGLang's routes."""

from dataclasses import asdict, replace
from typing import Any

from torchtitan.grpo.inference.answers import reading
from torchtitan.grpo.inference.client import SleepFrees
from torchtitan.grpo.inference.kinds import LaunchCommand, ServerSpec, seed_option
from torchtitan.grpo.inference.sglang.client import SGLangClient
from torchtitan.grpo.system.light_start import LIGHT_PYTHON
from torchtitan.grpo.types import GenerateRequest, Generation
from torchtitan.grpo.weight_wire.group_facts import GroupFacts, facts_from_json
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec


class EmbeddedClient(SGLangClient):
    """Client of one embedded server. The server swaps weights between two steps, so pushes need no pause."""

    _KIND = "embedded"
    _GROUP_FIELDS = (*SGLangClient._GROUP_FIELDS, "piece_bytes")

    async def generate(self, request: GenerateRequest) -> Generation:
        # The server knows its tokenizer, and so the ids that it must not sample.
        return await super().generate(replace(request, unknown_ids=()))

    async def group_facts(self) -> list[GroupFacts]:
        return [facts_from_json((await self._server_info()).get("group_facts"))]

    def _frees(self, info: dict[str, Any]) -> SleepFrees:
        return "memory"

    async def sleep(self) -> SleepFrees:
        await self._http.post("/release_memory_occupation", {})
        return "memory"

    async def wake(self) -> None:
        await self._http.post("/resume_memory_occupation", {})

    async def leave_weight_groups(self) -> None:
        self._groups.clear()
        await self._http.post("/leave_weight_groups", {})

    async def begin_update(self) -> None:
        self._sequences.clear()
        await self._close_session()
        await self._http.post("/begin_weight_update", {"selector": "target"})

    async def receive_bucket(
        self, bucket: BucketSpec, *, group_name: str, last: bool, version: int
    ) -> None:
        group = self._joined(group_name)
        await self._http.post(
            "/update_weights_from_distributed",
            {
                **asdict(bucket),
                "sequence": self._next_sequence(group_name),
                "group_name": group_name,
                "load_format": "flattened_bucket",
                "weight_version": str(version) if last else None,
            },
            timeout_seconds=group.timeout_seconds,
        )

    async def commit_update(self, version: int) -> float:
        return await self._swap(version, "/end_weight_update", {})

    async def served_checksums(self, dtype: str) -> dict[str, int] | None:
        route, body = "/weights_checker", {"action": "checksum"}
        answer = await self._http.post(route, body, timeout_seconds=self._request_timeout_seconds)
        with reading(self.url + route, answer.body, "one rank with dtype and checksums"):
            (rank,) = answer.body["ranks"]
            return dict(rank["checksums"]) if rank["dtype"] == dtype else None

    async def update_from_disk(self, path: str, version: int) -> float:
        await self._close_session()
        patience = self._request_timeout_seconds
        return await self._swap(
            version, "/update_weights_from_disk", {"model_path": path}, timeout_seconds=patience
        )

    async def _swap(self, version: int, route: str, body: dict[str, Any], **options: Any) -> float:
        body = {**body, "weight_version": str(version)}
        answer = await self._http.post(route, body, **options)
        await self._require_version(version)
        with reading(self.url + route, answer.body, "swap_seconds"):
            return float(answer.body["swap_seconds"])


def launch_command(spec: ServerSpec) -> LaunchCommand:
    command = [spec.python or LIGHT_PYTHON[0], *LIGHT_PYTHON[1:]]
    command += ["torchtitan.grpo.inference.embedded"]
    command += ["--model-path", spec.model_path, "--host", spec.host, "--port", str(spec.port)]
    command += ["--device", spec.device, "--dtype", spec.dtype]
    command += ["--max-model-len", str(spec.max_model_len)]
    command += ["--max-running-requests", str(spec.max_running_requests)]
    command += ["--max-batched-tokens", str(spec.max_batched_tokens)]
    command += seed_option("--seed", spec)
    return LaunchCommand(command, {"HF_HUB_OFFLINE": "1"})
