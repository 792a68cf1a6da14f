# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Memory is pinned once for each tensor, and a refusal says what was asked and what helps."""

import pytest
import torch

from torchtitan.grpo.system.pinned_memory import pin


class Driver:
    """The CUDA runtime's function, which this machine may lack; it refuses from a call on."""

    def __init__(self, refuses_from: int) -> None:
        self.refuses_from = refuses_from
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1  # for all contexts of the process
        if len(self.registered) == self.refuses_from:
            return 2  # cudaErrorMemoryAllocation
        self.registered.append((address, num_bytes))
        return 0


@pytest.fixture
def driver(monkeypatch):
    def install(refuses_from: int) -> Driver:
        found = Driver(refuses_from)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
        return found

    return install


def test_each_tensor_is_registered_with_its_own_memory(driver):
    found = driver(refuses_from=9)
    tensors = [torch.zeros(3), torch.zeros(0), torch.zeros(5, dtype=torch.bfloat16)]
    pin(tensors)
    assert found.registered == [(tensors[0].data_ptr(), 12), (tensors[2].data_ptr(), 10)]


def test_a_refusal_names_the_size_the_error_and_the_settings(driver):
    found = driver(refuses_from=1)
    with pytest.raises(RuntimeError) as error:
        pin([torch.zeros(1), torch.zeros(2**26)])
    assert len(found.registered) == 1
    for part in ("0.25 GiB", "cudaError 2", "--ulimit memlock=-1", "weight_sync.num_slots"):
        assert part in str(error.value)
