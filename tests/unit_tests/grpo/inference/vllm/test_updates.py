# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The updates of one vLLM worker: real staging and files, a model that loads in plain torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from torchtitan.grpo.inference.vllm.answers import NO_ROOM
from torchtitan.grpo.inference.vllm.updates import (
    UpdateRequest,
    WorkerUpdates,
    must_stage_on_host,
    staging_needs,
)
from torchtitan.grpo.weight_wire import sparse
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.staging import UpdateError

CPU = torch.device("cpu")
Tensors = Mapping[str, torch.Tensor]
OLD = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.arange(4.0)}
NEW = {"a.weight": OLD["a.weight"] + 10, "b.weight": OLD["b.weight"] - 10}


class TorchModel:
    """A model whose load replaces the weights of its names, and takes them off before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.served = {name: tensor.clone() for name, tensor in OLD.items()}
        self.former: dict[str, torch.Tensor] = {}
        self.fail_at: str | None = None
        self.calls: list[str] = []

    def tensors(self) -> list[torch.Tensor]:
        return list(self.served.values())

    def checkpoint_folder(self) -> str:
        return str(self.folder)

    def begin_load(self) -> None:
        self.calls.append("begin_load")
        self.former, self.served = self.served, {}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self.fail_at:
                raise RuntimeError(f"{name} cannot be loaded")
            self.served[name] = tensor.clone()

    def finish_load(self) -> None:
        self.calls.append("finish_load")
        assert self.served.keys() == self.former.keys()

    def restore(self) -> None:
        self.calls.append("restore")
        self.served = {**self.former, **self.served}


class SentBytes:
    """A weight group whose broadcasts are the payloads that the test has queued."""

    name = "group"
    is_nccl = False

    def __init__(self) -> None:
        self.payloads: list[torch.Tensor] = []
        self.was_left = False

    def receive(self, tensor: torch.Tensor, *_: object) -> None:
        tensor.copy_(self.payloads.pop(0))

    def begin_leave(self) -> None:
        self.was_left = True


class Worker:
    """One worker that has joined a group and keeps versions for deltas."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(OLD, folder / "model.safetensors")
        self.model = TorchModel(folder)
        self.group = SentBytes()
        self.updates = WorkerUpdates(self.model, CPU)
        self.updates.session._groups["group"] = self.group  # type: ignore[assignment]
        self.updates._timeout_seconds = 30.0
        self.updates._keeps = True

    def request(self, action: Any, **options: Any) -> None:
        self.updates.update(UpdateRequest(action, **options))

    def stage(self, payload: torch.Tensor, weights: Tensors, **delta: Any):
        self.group.payloads.append(payload)
        self.request("stage", group_name="group", sequence=0, **describe(weights), **delta)

    def verify(
        self, weights: Tensors, version: str, base: tuple[Tensors, int] | None = None
    ) -> None:
        """Stages weights, or what has changed since a base, and verifies them."""
        self.updates.begin()
        if base is None:
            self.stage(flat(weights), weights)
        else:
            numels = [tensor.numel() for tensor in weights.values()]
            payload, num_changed = sparse.encode(flat(base[0]), flat(weights), numels, 4)
            self.stage(payload, weights, num_changed=list(num_changed), base_version=base[1])
        self.request("verify", version=version)

    def push(self, weights: Tensors, version: str, base: tuple[Tensors, int] | None = None) -> None:
        self.verify(weights, version, base)
        self.updates.finish()


def flat(weights: Tensors) -> torch.Tensor:
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in weights.values()])


def describe(weights: Tensors) -> dict[str, Any]:
    return {
        "names": list(weights),
        "dtypes": ["float32"] * len(weights),
        "shapes": [list(t.shape) for t in weights.values()],
        "checksums": [tensor_checksum(t) for t in weights.values()],
    }


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path / "model")


def assert_serves(worker: Worker, weights: Tensors) -> None:
    torch.testing.assert_close(worker.model.served, dict(weights), rtol=0, atol=0)


def changed(weights: Tensors, name: str, value: float) -> dict[str, Any]:
    """The weights with one element changed."""
    new = {n: t.clone() for n, t in weights.items()}
    new[name].view(-1)[1] = value
    return new


def test_the_model_is_not_touched_before_the_update_is_finished(worker: Worker) -> None:
    worker.verify(NEW, "1")
    assert worker.model.calls == []
    assert_serves(worker, OLD)
    worker.updates.finish()
    assert worker.model.calls == ["begin_load", "finish_load"]
    assert_serves(worker, NEW)


def test_what_was_not_verified_in_this_update_cannot_be_loaded(worker: Worker) -> None:
    worker.verify(NEW, "1")
    worker.updates.begin()
    worker.stage(flat(NEW), NEW)
    with pytest.raises(RuntimeError, match="Nothing was received and verified"):
        worker.updates.finish()
    assert_serves(worker, OLD)


def test_damaged_bytes_are_found_by_verify_and_the_old_weights_stay(worker: Worker) -> None:
    worker.updates.begin()
    worker.stage(flat(changed(NEW, "b.weight", 0.5)), NEW)
    with pytest.raises(UpdateError, match=r"b\.weight must have checksum"):
        worker.request("verify", version="1")
    assert worker.model.calls == []
    assert_serves(worker, OLD)


def test_a_dropped_delta_leaves_its_base_as_it_was_and_the_next_is_applied_to_it(
    worker: Worker,
) -> None:
    worker.push(NEW, "1")
    worker.verify(changed(NEW, "b.weight", 7.0), "2", (NEW, 1))
    worker.request("abandon")
    assert_serves(worker, NEW)
    # Against the same base, and with another change: its checksums hold for a clean base alone.
    other = changed(NEW, "a.weight", -7.0)
    worker.push(other, "3", (NEW, 1))
    assert_serves(worker, other)


@pytest.mark.parametrize("base", [0, 2])
def test_a_delta_against_another_version_than_the_kept_one_is_refused(worker, base: int) -> None:
    worker.push(NEW, "1")
    with pytest.raises(ValueError, match=rf"base_version {base}; .* version 1"):
        worker.verify(changed(NEW, "b.weight", 7.0), "2", (NEW, base))


def test_a_load_that_fails_gives_layers_their_old_weights_and_keeps_no_base(worker) -> None:
    worker.push(NEW, "1")
    worker.model.fail_at = "b.weight"
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        worker.push(OLD, "2")
    worker.request("abandon")
    assert worker.model.calls[-1] == "restore"
    assert_serves(worker, {"a.weight": OLD["a.weight"], "b.weight": NEW["b.weight"]})
    # What is served is a mixture, so no delta may build on the version that was kept.
    with pytest.raises(ValueError, match=r"base_version 1; .* version None"):
        worker.verify(changed(NEW, "b.weight", 7.0), "3", (NEW, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ["a.weight", "c.weight"]}, r"no parameter named c\.weight"),
        ({"shapes": [[3, 2], [4]]}, r"a\.weight must have shape \(2, 3\), got \(3, 2\)"),
        ({"dtypes": ["float32", "int8"]}, r"dtypes must be among .* got \['int8'\]"),
        ({"dtypes": ["float32"]}, "of one length"),
        ({"group_name": "other"}, "Weight group 'other' does not exist"),
    ],
)
def test_wrong_weights_are_refused_before_they_are_received(
    worker: Worker, change: dict[str, Any], message: str
) -> None:
    worker.updates.begin()
    with pytest.raises((ValueError, RuntimeError), match=message):
        worker.request("stage", **{"group_name": "group", "sequence": 0, **describe(NEW), **change})
    # The refusal has ended the update: what else arrives for it is not loaded.
    with pytest.raises(RuntimeError, match="No weight update is open"):
        worker.request("verify", version="1")


def test_a_direct_update_loads_each_bucket_as_it_comes(worker: Worker) -> None:
    halves = [{name: tensor} for name, tensor in NEW.items()]
    worker.updates.begin()
    for half in halves:
        options = {"group_name": "group", **describe(half)}
        worker.request("check", **options)
        worker.group.payloads.append(flat(half))
        worker.request("receive", **options)
    worker.updates.finish()
    assert worker.model.calls == ["begin_load", "finish_load"]
    assert_serves(worker, NEW)


def test_a_direct_update_that_breaks_off_leaves_no_layer_without_weights(worker: Worker) -> None:
    half = {"a.weight": NEW["a.weight"]}
    worker.updates.begin()
    worker.group.payloads.append(flat(half))
    worker.request("receive", group_name="group", **describe(half))
    worker.request("abandon")
    assert_serves(worker, {**OLD, **half})


def test_a_directory_is_staged_and_served_as_a_version_that_deltas_build_on(
    worker: Worker, tmp_path: Path
) -> None:
    save_file(NEW, tmp_path / "pushed.safetensors")
    worker.updates.begin()
    worker.request("disk", path=str(tmp_path))
    worker.request("verify", version="5")
    worker.updates.finish()
    assert_serves(worker, NEW)
    newer = changed(NEW, "a.weight", 3.0)
    worker.push(newer, "6", (NEW, 5))
    assert_serves(worker, newer)


def test_leaving_drops_the_update_and_every_action_needs_an_open_one(worker: Worker) -> None:
    worker.updates.begin()
    worker.stage(flat(NEW), NEW)
    worker.updates.leave()
    assert worker.group.was_left
    staged = {"group_name": "group", "sequence": 0, **describe(NEW)}
    disk = {"path": str(worker.model.folder)}
    for action, options in (("stage", staged), ("verify", {"version": "1"}), ("disk", disk)):
        with pytest.raises(RuntimeError, match="No weight update is open"):
            worker.request(action, **options)


def test_a_worker_of_a_divided_model_needs_room_for_all_of_it():
    """It stages the whole model, although it serves a quarter."""
    on_device, on_host = staging_needs(400, 1, deltas=False)
    assert on_device >= 400
    assert staging_needs(400, 4, deltas=False) == (on_device, 4 * on_host), "they share the host's"
    assert staging_needs(400, 1, deltas=True)[1] == 2 * on_host


def test_a_worker_stages_on_the_host_only_if_its_gpu_has_no_room():
    needs, gpu = (10, 20), torch.device("cuda", 0)
    assert not must_stage_on_host(needs, gpu, 10, 0)
    assert must_stage_on_host(needs, gpu, 9, 20)
    with pytest.raises(RuntimeError, match=NO_ROOM):
        must_stage_on_host(needs, gpu, 9, 19)
