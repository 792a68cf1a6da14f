# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The client's part of pushes of adapters alone. `adapter_updates.py` is the server's part."""

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.http import HttpConnection, excerpt
from torchtitan.grpo.inference.sglang.adapter_note import PROBE, READY, AdapterNote
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

RECEIVE_ROUTE = "/update_weights_from_distributed"


class LoadFormats:
    """Chooses the text that is sent as the load format of each bucket.

    Args:
        http: Connection to the server.
    """

    def __init__(self, http: HttpConnection) -> None:
        self._http = http
        self._adds_adapters = False
        self._num_buckets = 0

    def joined(self) -> None:
        """Notes that the server has joined a group. It may have been restarted before."""
        self._adds_adapters = False

    def begin(self) -> None:
        """Notes that an update begins."""
        self._num_buckets = 0

    async def of(self, bucket: BucketSpec, *, is_last: bool) -> str:
        """Returns the text that is sent as the load format of the next bucket.

        Raises:
            ServerError: If the bucket holds adapters, and the server lacks this project's hooks. Such
                a server would wait for other broadcasts than those that are sent, so it is asked first.
        """
        if bucket.lora_scale is None or bucket.lora_base is None:
            return "flattened_bucket"
        if not self._adds_adapters:
            await self._require_hooks()
            self._adds_adapters = True
        index, self._num_buckets = self._num_buckets, self._num_buckets + 1
        return AdapterNote(index, is_last, bucket.lora_scale, bucket.lora_base).as_load_format()

    async def _require_hooks(self) -> None:
        nothing: dict[str, list[str]] = {"names": [], "dtypes": [], "shapes": []}
        body = {**nothing, "group_name": "", "load_format": PROBE, "flush_cache": False}
        answer = await self._http.post(RECEIVE_ROUTE, body, accept=(400,))
        if READY not in excerpt(answer.body):
            raise ServerError(
                f"{self._http.url} must run SGLang with this project's hooks to add adapters to its base "
                f"weights, and does not (it answered: {excerpt(answer.body)}). Start it with "
                "scripts/serve_sglang.sh or `torchtitan-grpo serve sglang`, with SGLang 0.5.23, or set "
                "lora.push = 'merged'."
            )
