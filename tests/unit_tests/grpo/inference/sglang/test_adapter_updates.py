# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What SGLang is given to load when adapters arrive; `test_lora.py` pushes them to a real server."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from torchtitan.grpo.inference.sglang.adapter_updates import ReceivedAdapters, load
from torchtitan.grpo.weight_wire.adapters import BaseWeights, base_digest
from torchtitan.grpo.weight_wire.transfer_messages import PROBE, READY, AdapterNote

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj")
NORM = "model.norm.weight"


def factors_of(module: str, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    stem = f"base_model.model.{module}"
    return {f"{stem}.lora_A.weight": torch.randn(2, 4), f"{stem}.lora_B.weight": torch.randn(6, 2)}


class Server:
    """A scheduler of SGLang's, as far as the hook sees it: it hands out what was broadcast."""

    def __init__(self, folder: str) -> None:
        self.model_config = SimpleNamespace(model_path=folder)
        self.formats: list[str | None] = []
        self._received = ReceivedAdapters()

    def receive(self, tensors: dict[str, torch.Tensor], load_format: str | None) -> Any:
        def original(updater: Any, *, load_format: str | None, **_: Any) -> Any:
            assert updater is self
            self.formats.append(load_format)
            return list(tensors.items())

        return self._received.receive(
            original,
            self,
            load_format=load_format,
            names=list(tensors),
            dtypes=["float32"] * len(tensors),
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            group_name="group",
        )


@pytest.fixture
def folder(tmp_path) -> str:
    torch.manual_seed(0)
    weights = {f"{module}.weight": torch.randn(6, 4) for module in MODULES}
    save_file({**weights, NORM: torch.ones(4)}, tmp_path / "model.safetensors")
    return str(tmp_path)


def note(folder: str, index: int, *, is_last: bool = False) -> str:
    return AdapterNote(index, is_last, 0.5, base_digest(folder)).as_load_format()


def test_the_last_bucket_brings_all_weights_with_the_adapters_of_all_buckets(folder):
    server, everything = Server(folder), {}
    for version in range(2):  # the second version does not depend on the first
        buckets = [factors_of(module, 10 * version + i) for i, module in enumerate(MODULES)]
        assert list(server.receive(buckets[0], note(folder, 0))) == []
        found = server.receive(buckets[1], note(folder, 1, is_last=True))
        expected = dict(BaseWeights(folder).all_with(buckets[0] | buckets[1], 0.5))
        for _ in range(2):  # a server with a draft model reads them twice
            assert (
                dict(found).keys() == expected.keys() == {*(f"{m}.weight" for m in MODULES), NORM}
            )
            assert all(torch.equal(weight, expected[name]) for name, weight in found)
        assert not everything or not torch.equal(
            everything[f"{MODULES[0]}.weight"], expected[f"{MODULES[0]}.weight"]
        )
        everything = expected
    assert set(server.formats) == {"flattened_bucket"}


def test_whole_weights_are_received_as_sglang_receives_them(folder):
    server, tensors = Server(folder), {NORM: torch.zeros(4)}
    assert server.receive(tensors, "flattened_bucket") == list(tensors.items())
    assert server.receive(tensors, None) == list(tensors.items())
    assert server.formats == ["flattened_bucket", None]


def test_a_probe_is_answered_and_nothing_is_received_or_loaded(folder):
    server = Server(folder)
    nothing = server.receive({}, PROBE)
    assert load(lambda *_: pytest.fail("loaded"), server, nothing) == (True, READY)
    assert not server.formats
    weights = [(NORM, torch.zeros(4))]
    assert load(lambda *given: given, server, weights) == (server, weights)
    assert load(lambda *given: given, server, []) == (server, [])


def test_an_update_that_was_broken_off_leaves_nothing_behind(folder):
    server = Server(folder)
    server.receive(factors_of(MODULES[1], 1), note(folder, 0))
    found = server.receive(factors_of(MODULES[0], 2), note(folder, 0, is_last=True))
    untouched = BaseWeights(folder)._read(f"{MODULES[1]}.weight")
    assert torch.equal(dict(found)[f"{MODULES[1]}.weight"], untouched)


def test_adapters_that_cannot_be_added_are_refused_before_anything_is_loaded(folder, tmp_path):
    server, bucket = Server(folder), factors_of(MODULES[0], 1)
    foreign = AdapterNote(0, True, 0.5, "of another base").as_load_format()
    with pytest.raises(ValueError, match=r"Start the server with the directory of"):
        server.receive(bucket, foreign)
    with pytest.raises(ValueError, match=r"Bucket 0 of the adapters must come next, got bucket 1"):
        server.receive(bucket, note(folder, 1, is_last=True))
    assert not server.formats, "no broadcast was waited for"
    name = next(iter(bucket))
    with pytest.raises(ValueError, match="both of its factors"):
        server.receive({name: bucket[name]}, note(folder, 0, is_last=True))
    with pytest.raises(ValueError, match=r"must be PEFT's"):
        server.receive({NORM: torch.ones(4)}, note(folder, 0, is_last=True))


def test_a_server_that_has_read_another_directory_since_compares_with_that_one(folder, tmp_path):
    server, bucket = Server(folder), factors_of(MODULES[0], 1)
    sent = note(folder, 0, is_last=True)
    server.receive(bucket, sent)
    other = tmp_path / "other"
    other.mkdir()
    weights = {name: tensor + 1 for name, tensor in server.receive(bucket, sent)}
    save_file(weights, other / "model.safetensors")
    server.model_config.model_path = str(other)
    with pytest.raises(ValueError, match=r"those in .*other are others"):
        server.receive(bucket, sent)


def test_a_note_of_another_release_is_refused(folder):
    with pytest.raises(ValueError, match="Install the same release"):
        Server(folder).receive({}, PROBE + "?")
    fields = asdict(AdapterNote(0, True, 0.5, "base")) | {"more": 1}
    with pytest.raises(ValueError, match="Install the same release"):
        Server(folder).receive({}, f"torchtitan_grpo.adapters:{fields}".replace("'", '"'))
