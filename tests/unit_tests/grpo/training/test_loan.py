# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ranks give up memory while their devices are lent, and then train on as if they had not."""

import copy

import pytest
import torch

from torchtitan.grpo.training.loan import CudaMemory, Room

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "muon_lr": 2e-2, "muon_dtype": "float32"}


def test_ranks_lend_their_devices_together_and_lose_nothing(make_model, run_ranks):
    _, folder = make_model("qwen3", intermediate_size=78)
    results = run_ranks(
        "room_ranks", 2, model=folder, seq_len=12, optimizer=SETTINGS, reference="",
        sequences=[[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]],
        rows=[[0, 1], [2, 3], [], []],
    )  # fmt: skip
    for rank, result in enumerate(results):
        assert result["before_the_first_step"] == 0, "there is nothing yet"
        assert result["sharded"] and result["num_gradients"] > 10
        assert result["given"] == result["expected"] > 0
        assert result["gathered_before"] > result["gathered"] == 0
        assert result["gradients_left"] == result["given_again"] == 0
        assert result["readable_while_given"], "a stopped run writes a checkpoint from there"
        assert not result["usable_too_early"], "the stand-in for a copy would show nothing"
        assert result["bits_are_the_same"] and result["safe_in_between"]
        assert result["num_hosts"] == result["num_states"], "host memory is made once"
        first = ["release", "out", "release", "release", "back"]
        assert result["calls"] == [*first, "out", "release", "back", "out", "release", "back"]
        assert result["learns_the_same"]
        assert result["lent"]["calls"] == ["staged", "out", "release", "staged", "release", "back"]
        metrics = result["lent"]["metrics"]
        assert metrics["lend/room_bytes"] == result["lent"]["total"] > 0
        assert metrics["lend/room_give_seconds"] > 0 == metrics["lend/room_take_seconds"]
        assert set(result["lent"]["later"].values()) == {0.0}, "each loan counts once"
        expected = (
            "rank 0 has failed" if rank else "1 of 2 could not. rank 1: RuntimeError: no host"
        )
        assert expected in result["lent"]["error"]


def trained(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    take_step(model, optimizer)
    return model, optimizer


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    device = next(model.parameters()).device
    model(torch.ones(4, 256, device=device)).square().sum().backward()
    optimizer.step()


def test_on_cpu_gradients_are_given_up_and_states_have_nowhere_to_go():
    model, optimizer = trained("cpu")
    assert Room([model], [optimizer]).give() == 4 * (256 * 256 + 256)
    with pytest.raises(AssertionError, match="refused on CPU"):
        Room([model], [optimizer], offloads=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_states_move_to_pinned_memory_and_back():
    device = torch.device("cuda", torch.cuda.current_device())
    (model, optimizer), (twin, plain) = trained("cuda"), trained("cuda")
    before = copy.deepcopy(optimizer.state_dict()["state"])
    room = Room([model], [optimizer], CudaMemory(device), offloads=True)
    allocated = torch.cuda.memory_allocated()
    for _ in range(2):
        room.give()
        states = [state for s in optimizer.state.values() for state in s.values() if state.ndim > 0]
        assert states and all(state.device.type == "cpu" for state in states)
        assert allocated - torch.cuda.memory_allocated() >= sum(state.nbytes for state in states)
        room.reclaim()
        room.finish_reclaim()
        torch.cuda.synchronize()
        assert room.reclaim_seconds() > 0 == room.reclaim_seconds()
        for index, found in optimizer.state_dict()["state"].items():
            assert all(torch.equal(found[name], value) for name, value in before[index].items())
    for one, of_one in ((model, optimizer), (twin, plain)):
        of_one.zero_grad()
        take_step(one, of_one)
    assert torch.equal(model.weight, twin.weight)  # pyright: ignore[reportArgumentType]
