# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests the sampler, the request parser and the parameter table of the embedded server."""

from typing import Any

import pytest
import torch

from torchtitan.grpo.inference.client import MAX_TOP_TOKENS
from torchtitan.grpo.inference.embedded.generate_json import ModelFacts, parse_generate
from torchtitan.grpo.inference.embedded.sampling import SamplingBatch, SamplingParams, sample
from torchtitan.grpo.inference.embedded.weights import WeightTable, tensor_sha256
from torchtitan.grpo.weight_wire.buckets import split_bucket
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

CPU = torch.device("cpu")
FACTS = ModelFacts(vocab_size=10, max_model_len=20, eos_ids=frozenset({9}), tokenizer=None)


def draw(logits: torch.Tensor, params: list[SamplingParams], seed: int = 0) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    batch = SamplingBatch.build(params, [None] * len(params), CPU)
    return sample(logits, batch, generator)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 3},
        {"top_p": 0.2},
        {"min_p": 0.9},
        {"top_p": 0.9, "top_k": 2, "min_p": 0.1, "temperature": 2.0},
    ],
)
def test_an_excluded_token_is_never_sampled_and_logprobs_stay_those_of_the_trainer(settings):
    logits = torch.tensor([9.0, 0.0, 9.0, 1.0, 2.0, 8.0])
    excluded = torch.tensor([True, False, True, False, False, True])
    params = [SamplingParams(**settings)] * 500
    batch = SamplingBatch.build(params, [None] * 500, CPU)
    generator = torch.Generator().manual_seed(0)
    ids, logprobs = sample(logits.expand(500, -1), batch, generator, excluded)
    assert set(ids.tolist()) <= {1, 3, 4}
    temperature = settings.get("temperature", 1.0) or 1.0
    expected = torch.log_softmax(logits / temperature, -1)[ids]
    torch.testing.assert_close(logprobs, expected)


def test_samples_follow_the_softmax_and_its_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    for temperature in (0.5, 1.0, 2.0):
        ids, logprobs = draw(
            logits.expand(40_000, 3), [SamplingParams(temperature=temperature)] * 40_000
        )
        expected = torch.softmax(logits / temperature, 0)
        frequencies = torch.bincount(ids, minlength=3) / len(ids)
        torch.testing.assert_close(frequencies, expected, atol=0.01, rtol=0)
        torch.testing.assert_close(logprobs, expected.log()[ids])


@pytest.mark.parametrize(
    ("filters", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_p": 0.95, "top_k": 3}, {0, 1, 2}),
    ],
)
def test_filters_leave_out_tokens_but_do_not_renormalize_logprobs(
    filters: dict[str, Any], allowed: set[int]
) -> None:
    probs = torch.tensor([0.5, 0.3, 0.12, 0.08])
    params = [SamplingParams(**filters) if i % 2 else SamplingParams() for i in range(4000)]
    ids, logprobs = draw(probs.log().expand(4000, 4), params)
    assert set(ids[1::2].tolist()) == allowed
    assert set(ids[::2].tolist()) == {0, 1, 2, 3}
    torch.testing.assert_close(logprobs, probs.log()[ids])


def test_a_greedy_row_is_untouched_by_filters_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    ids, logprobs = draw(logits, [SamplingParams(temperature=1e-9, top_p=0.5)])
    assert ids.tolist() == [1]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[:, 1])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input_ids must be a list"),
        ({"input_ids": []}, "non-empty"),
        ({"input_ids": [[1], []]}, "non-empty"),
        ({"input_ids": [1, 10]}, r"integers in \[0, 10\), got 10"),
        ({"input_ids": [-1]}, "got -1"),
        ({"input_ids": [True]}, "got True"),
        ({"input_ids": [1] * 20}, "shorter than 20"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 20}}, r"got 1 \+ 20"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature must be"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature must be"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p must be"),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k must be"),
        ({"input_ids": [1], "sampling_params": {"temperature": 10**400}}, "temperature must be"),
        ({"input_ids": [1], "sampling_params": {"top_k": 2**70}}, "top_k must be"),
        ({"input_ids": [1], "sampling_params": {"sampling_seed": 2**63}}, "sampling_seed must be"),
        ({"input_ids": [1], "sampling_params": {"tempratur": 1}}, "tempratur is not supported"),
        ({"input_ids": [1], "sampling_params": {"stop": "x"}}, "stop is not supported"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"input_ids": [1], "rid": 5}, "rid must be"),
        ({"input_ids": [1], "stream": "yes"}, "stream must be"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 2}, r"in \[-1, 1\]"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": -2}, r"in \[-1, 1\]"),
    ],
)
def test_a_request_that_cannot_be_served_names_the_field(body: Any, message: str) -> None:
    body.setdefault("sampling_params", {"max_new_tokens": 4})
    with pytest.raises(ValueError, match=message):
        parse_generate(body, FACTS)


def test_a_request_cannot_ask_for_a_whole_large_vocabulary_at_each_token() -> None:
    facts = ModelFacts(vocab_size=150_000, max_model_len=20, eos_ids=frozenset(), tokenizer=None)
    body = {"input_ids": [1], "return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
    assert parse_generate(body | {"top_logprobs_num": MAX_TOP_TOKENS}, facts).num_top == 256
    with pytest.raises(ValueError, match=r"top_logprobs_num must be in \[0, 256\], got 257"):
        parse_generate(body | {"top_logprobs_num": 257}, facts)


def test_each_of_n_samples_has_an_id_and_a_seed_of_its_own() -> None:
    body = parse_generate(
        {
            "input_ids": [[1], [2]],
            "rid": ["a", "b"],
            "sampling_params": {"n": 2, "max_new_tokens": 3, "sampling_seed": 5},
        },
        FACTS,
    )
    assert body.is_list
    assert body.request_ids == ["a_0", "a_1", "b_0", "b_1"]
    assert body.prompts == [[1], [1], [2], [2]]
    assert [p.sampling_seed for p in body.sampling] == [5, 6, 5, 6]


def test_a_bucket_of_mixed_dtypes_is_cut_where_it_was_joined() -> None:
    tensors = [torch.randn(3).bfloat16(), torch.randn(2, 2), torch.randn(1, 5)]
    flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])
    shapes = tuple(tuple(t.shape) for t in tensors)
    bucket = BucketSpec(("a", "b", "c"), ("bfloat16", "float32", "float32"), shapes)
    cut = split_bucket(flat, bucket)
    for original, received in zip(tensors, cut, strict=True):
        torch.testing.assert_close(received, original, rtol=0, atol=0)


def test_the_table_casts_to_the_model_and_knows_tied_names() -> None:
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2, bias=False)})
    module["b"] = torch.nn.Linear(3, 2, bias=False)
    module["b"].weight = module["a"].weight
    table = WeightTable(module)
    assert not table.missing(["a.weight"])
    new = torch.randn(2, 3).bfloat16()
    table.adopt({"b.weight": table.prepared("b.weight", new)})
    torch.testing.assert_close(module["a"].weight.data, new.float(), rtol=0, atol=0)
    torch.testing.assert_close(module["b"](torch.ones(3)), new.float().sum(1))
    assert table.checksums() == {n: tensor_sha256(new.float()) for n in ("a.weight", "b.weight")}


def test_the_base_of_a_delta_is_a_copy_of_what_is_served() -> None:
    module = torch.nn.Linear(3, 2, bias=False)
    table, served = WeightTable(module), module.weight.detach().clone()
    base = table.in_wire_dtype("weight", torch.float32)  # the model's own dtype: no cast
    base.fill_(7.0)
    torch.testing.assert_close(module.weight.detach(), served, rtol=0, atol=0)


def test_tensors_at_odd_places_of_a_bucket_are_aligned_and_exact() -> None:
    tensors = [torch.arange(3, dtype=torch.bfloat16), torch.arange(5.0), torch.arange(4.0)]
    flat = torch.cat([t.view(torch.uint8) for t in tensors])
    shapes = tuple(tuple(t.shape) for t in tensors)
    bucket = BucketSpec(("a", "b", "c"), ("bfloat16", "float32", "float32"), shapes)
    for original, received in zip(tensors, split_bucket(flat, bucket), strict=True):
        assert received.data_ptr() % 64 == 0
        torch.testing.assert_close(received, original, rtol=0, atol=0)
