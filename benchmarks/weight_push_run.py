# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the ranks of `weight_push.py`, which push with the trainer's publisher and do not train.

torchrun --nproc_per_node=2 benchmarks/weight_push_run.py JOB.json
"""

# ruff: noqa: E402  (the device is settled before torchtitan's modules read it)

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from torchtitan.grpo.system.device import settle_device

settle_device()

import torch
import torch.distributed as dist
from boundary_run import CannedRollouts

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.start.entry import leave, run
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo_train import GRPOTrainer

_PUSH_TIMEOUT_SECONDS = 120.0
_WATCHED = ("begin_update", "receive_bucket", "commit_update")

Calls = list[tuple[str, float, float]]
"""Calls of the client in order: the name, the begin and the end in seconds."""


def watch_client(kind: Any, url: str) -> Calls:
    """Records the publisher's calls of all clients of this kind."""
    calls: Calls = []
    cls = type(make_client(kind, url))
    for name in _WATCHED:
        original = getattr(cls, name)

        async def watched(*args: Any, _name=name, _original=original, **kwargs: Any) -> Any:
            begin = time.monotonic()
            try:
                return await _original(*args, **kwargs)
            finally:
                calls.append((_name, begin, time.monotonic()))

        setattr(cls, name, functools.wraps(original)(watched))
    return calls


class PushTrainer(GRPOTrainer):
    """Pushes ``rounds`` versions. A plain broadcast of as many bytes may follow each push."""

    source: CannedRollouts | None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        config: JobConfig,
        hf_model: HFModel,
        stop: StopRequest,
        channel: RankChannel,
        *,
        job: dict[str, Any],
    ) -> None:
        super().__init__(config, hf_model, stop, channel)
        self.job = job
        self.calls = watch_client(config.inference.kind, config.inference.urls[0])

    def _start_rollouts(self) -> None:
        self.source = CannedRollouts(self.config, self.hf_model)

    def train(self) -> None:
        self._load_weights()
        self.first_step = self.step
        self._start()
        num_bytes = self._num_bytes()
        payload = torch.ones(num_bytes, dtype=torch.uint8)
        rounds = []
        for version in range(1, self.job["rounds"] + 1):
            push = self._push(version)
            bare = self._broadcast(payload) if self.job["compares"] else 0.0
            rounds.append(push | {"bare_seconds": bare})
            time.sleep(self.job["rest_seconds"])
        if self.is_rank_zero:
            result = {"num_bytes": num_bytes, "rounds": rounds}
            Path(self.job["out"]).write_text(json.dumps(result))

    def _num_bytes(self) -> int:
        """Returns the number of bytes of all parameters in the dtype of the transfer."""
        dtype = getattr(torch, self.config.weight_sync.dtype)
        return dtype.itemsize * sum(
            p.numel() for part in self.model_parts for p in part.parameters()
        )

    def _push(self, version: int) -> dict[str, Any]:
        """Pushes one version, and waits until the server has confirmed it."""
        slot = torch.tensor(self._reserve_slot())
        dist.broadcast(slot, src=0)
        self.calls.clear()
        dist.barrier()
        self.publisher.fence()
        begin = time.monotonic()
        self.publisher.publish(version, int(slot))
        if self.is_rank_zero:
            self.publisher.wait_for(version, _PUSH_TIMEOUT_SECONDS, lambda: False)
        end = time.monotonic()
        dist.barrier()
        if not self.is_rank_zero:
            return {}
        metrics = self.publisher.metrics()
        received = [(b, e) for name, b, e in self.calls if name == "receive_bucket"]
        committed = next(b for name, b, _ in self.calls if name == "commit_update")
        return {
            "arrived_seconds": committed - begin,
            "transfer_seconds": committed - received[0][0],
            "confirmed_seconds": end - begin,
            "gather_seconds": metrics.get("weight_sync/gather_seconds", 0.0),
            "pause_seconds": metrics["weight_sync/pause_seconds"],
            "num_buckets": len(received),
            "failures": metrics["weight_sync/failures"],
        }

    def _broadcast(self, payload: torch.Tensor) -> float:
        dist.barrier()
        begin = time.monotonic()
        dist.broadcast(payload, src=0)
        dist.barrier()  # a sender may finish before the receiver
        return time.monotonic() - begin


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    return run(functools.partial(PushTrainer, job=job), job["args"])


if __name__ == "__main__":
    leave(main)
