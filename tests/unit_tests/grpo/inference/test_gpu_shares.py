# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Launched servers divide GPUs, and the memory of shared ones."""

from typing import Any

import pytest

from torchtitan.grpo.inference.gpu_shares import GpuShare, gpus_of, share_gpus


def shares(num_servers: int, gpus: list[str], **settings: Any) -> list[GpuShare]:
    defaults = {"beside_training": False, "tensor_parallel_size": 0, "memory": 0.0, "num_heads": 8}
    return share_gpus(num_servers, gpus, **(defaults | settings))


@pytest.mark.parametrize(
    ("num_servers", "gpus", "expected"),
    [
        (1, ["2", "3"], [("2", "3")]),
        (2, ["2", "3"], [("2",), ("3",)]),
        (3, ["0"], [("0",), ("0",), ("0",)]),
        (2, [], [(), ()]),
    ],
)
def test_servers_share_the_gpus_evenly(num_servers, gpus, expected):
    assert [gpus_of(i, num_servers, gpus) for i in range(num_servers)] == expected


def test_a_server_with_gpus_of_its_own_uses_as_many_as_divide_the_heads():
    assert shares(1, ["4", "5", "6"]) == [GpuShare(("4", "5"), 2, None)]
    assert shares(1, ["4", "5", "6"], num_heads=12) == [GpuShare(("4", "5", "6"), 3, None)]
    assert shares(1, ["4", "5"], num_heads=None) == [GpuShare(("4",), 1, None)]
    assert shares(1, ["4", "5"], tensor_parallel_size=1) == [GpuShare(("4",), 1, None)]


@pytest.mark.parametrize(
    ("num_servers", "beside_training", "expected"),
    [(1, False, None), (2, False, 0.45), (1, True, 0.4), (2, True, 0.2)],
)
def test_the_memory_of_a_shared_gpu_is_divided(num_servers, beside_training, expected):
    found = shares(num_servers, ["0"], beside_training=beside_training)
    assert [share.memory for share in found] == [expected] * num_servers
    (own, *_) = shares(num_servers, ["0"], beside_training=beside_training, memory=0.7)
    assert own.memory == 0.7


def test_too_few_gpus_for_the_tensor_parallel_size_are_refused():
    with pytest.raises(ValueError, match=r"which is 1 with 2 GPUs for .* = 2, got 2\. Lower it"):
        shares(2, ["0", "1"], tensor_parallel_size=2)
    assert shares(2, [], tensor_parallel_size=2)[0].tensor_parallel_size == 2, "on CPU it is free"
