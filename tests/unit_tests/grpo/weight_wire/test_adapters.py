# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A server adds adapters that arrive alone to the weights of its directory."""

import json

import pytest
import torch
from safetensors.torch import save_file

from torchtitan.grpo.models.lora import AdapterMerge, with_adapters
from torchtitan.grpo.weight_sync.gather import _warn_of_rounding
from torchtitan.grpo.weight_wire.adapters import BaseWeights, base_digest, is_of_adapters
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

STEM = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{STEM}.lora_A.weight", f"{STEM}.lora_B.weight"
W, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


@pytest.fixture
def base(tmp_path) -> BaseWeights:
    torch.manual_seed(0)
    save_file(
        {W: torch.randn(6, 4).bfloat16(), NORM: torch.ones(4)}, tmp_path / "model.safetensors"
    )
    return BaseWeights(str(tmp_path))


def factors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {A: torch.randn(2, 4).to(dtype), B: torch.randn(6, 2).to(dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_server_computes_the_bits_that_the_trainer_computes(base, tmp_path, dtype):
    both = factors(dtype)
    ((name, found),) = base.adapted(both, 0.5)
    native = [
        ("layers.0.attention.wq.weight", base._read(W).to(dtype)),
        ("layers.0.attention.wq.lora_A.weight", both[A]),
        ("layers.0.attention.wq.lora_B.weight", both[B]),
    ]
    ((_, expected),) = with_adapters(iter(native), 0.5)
    assert name == W and torch.equal(found, expected)
    by_hand = base._read(W).double() + 0.5 * both[B].double() @ both[A].double()
    torch.testing.assert_close(found.double(), by_hand, atol=0.05, rtol=0.02)
    assert torch.equal(native[0][1], base._read(W).to(dtype)), "what is trained must not change"


@pytest.mark.parametrize(
    ("size", "dtype", "low", "high"),
    [
        (1e-6, torch.bfloat16, 0.0, 0.2),
        (1.0, torch.bfloat16, 0.9, 1.1),
        (1e-3, torch.float32, 0.99, 1.01),
        (0.0, torch.bfloat16, None, None),
    ],
)
def test_what_rounding_leaves_of_a_change_is_measured(size, dtype, low, high, base):
    both, merge = factors(dtype), AdapterMerge(0.5)
    merge.target("layers.0.attention.wq.weight", base._read(W).to(dtype), (6, 4))
    merge.add("layers.0.attention.wq.lora_A.weight", both[A])
    merge.add("layers.0.attention.wq.lora_B.weight", both[B] * size)
    if low is None:
        assert merge.arrived == merge.meant == 0
    else:
        assert low <= merge.arrived / merge.meant <= high


@pytest.mark.parametrize(("arrived", "is_told"), [(0.08, True), (-0.1, True), (0.25, False)])
def test_adapters_that_rounding_loses_are_told_with_the_settings(arrived, is_told, caplog):
    merges = [AdapterMerge(1.0) for _ in range(2)]
    merges[1].arrived, merges[1].meant = arrived, 1.0
    _warn_of_rounding(merges, 20)
    _warn_of_rounding([AdapterMerge(1.0)], 20)
    assert caplog.messages == [] or is_told
    if is_told:
        (message,) = caplog.messages
        assert f"Servers get {max(arrived, 0):.0%} of what the adapters of version 20" in message
        assert "weight_sync.dtype and inference.dtype to 'float32'" in message


@pytest.mark.parametrize(
    "name", ["model.fp16.safetensors", "zz.safetensors", "adapter_model.safetensors"]
)
@pytest.mark.parametrize("has_index", [True, False])
def test_adapters_are_added_to_the_weights_of_the_files_that_count(base, tmp_path, name, has_index):
    digest, weight = base_digest(str(tmp_path)), base._read(W)
    if has_index:
        (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
        index = {"weight_map": dict.fromkeys([W, NORM], "part.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({W: torch.zeros(7, 4)}, tmp_path / name)
    again = BaseWeights(str(tmp_path))
    assert torch.equal(again._read(W), weight)
    assert base_digest(str(tmp_path)) == digest


def test_an_adapter_without_one_of_its_factors_is_refused(base):
    with pytest.raises(ValueError, match="both of its factors"):
        list(base.adapted({A: factors()[A]}, 1.0))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (A, (2, 5), r"must fit .*\[6, 4\], got \[2, 5\]"),
        (B, (4, 2), r"must fit .*\[6, 4\], got \[4, 2\]"),
        (A.replace("layers.0", "layers.7"), (2, 4), "must belong to a weight"),
    ],
)
def test_factors_that_do_not_fit_are_refused(base, tmp_path, name, shape, message):
    digest = base_digest(str(tmp_path))
    base.check(BucketSpec((A,), ("float32",), ((2, 4),), lora_scale=1.0, lora_base=digest))
    bucket = BucketSpec((name,), ("float32",), (shape,), lora_scale=1.0, lora_base=digest)
    with pytest.raises(ValueError, match=message):
        base.check(bucket)


def test_adapters_of_another_base_are_refused_and_of_the_same_in_other_files_are_not(
    base, tmp_path
):
    other, same = tmp_path / "other", tmp_path / "same"
    for folder in (other, same):
        folder.mkdir()
    weights = {W: base._read(W), NORM: base._read(NORM)}
    save_file({W: weights[W]}, same / "one.safetensors")
    save_file({NORM: weights[NORM]}, same / "two.safetensors")
    weights[W][0, 0] += 1
    save_file(weights, other / "model.safetensors")
    for folder in (same, other):
        digest = base_digest(str(folder))
        bucket = BucketSpec((A,), ("float32",), ((2, 4),), lora_scale=1.0, lora_base=digest)
        if folder == same:
            base.check(bucket)
        else:
            with pytest.raises(ValueError, match=r"those in .* are others"):
                base.check(bucket)


def test_buckets_of_adapters_are_told_from_others():
    whole = BucketSpec((W,), ("float32",), ((6, 4),))
    assert not is_of_adapters(whole)
    assert is_of_adapters(BucketSpec((A,), ("float32",), ((2, 4),), lora_scale=2.0))
    with pytest.raises(ValueError, match=r"must be PEFT's"):
        is_of_adapters(BucketSpec((W,), ("float32",), ((6, 4),), lora_scale=2.0))
    with pytest.raises(ValueError, match="got a delta"):
        is_of_adapters(BucketSpec((A,), ("float32",), ((2, 4),), None, (3,), 1, 2.0))
