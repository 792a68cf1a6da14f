# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Parts of the embedded server: sampler, parser, requests, parameter table, and monitor."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan.grpo.inference.client import MAX_TOP_TOKENS
from torchtitan.grpo.inference.embedded.bodies import MAX_PROMPTS, GenerateBody, ModelFacts, parse
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.sampling import (
    SamplingBatch,
    SamplingParams,
    _draw,
    sample,
)
from torchtitan.grpo.inference.embedded.server import EngineMonitor
from torchtitan.grpo.inference.embedded.step_layout import upload
from torchtitan.grpo.inference.embedded.weights import Residence, WeightTable
from torchtitan.grpo.weight_wire.buckets import split_bucket
from torchtitan.grpo.weight_wire.checksum import tensor_checksum
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

CPU = torch.device("cpu")
FACTS = ModelFacts(vocab_size=10, max_model_len=20, eos_ids=frozenset({9}))


def draw(
    logits: torch.Tensor, params: list[SamplingParams], excluded: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = upload(SamplingBatch.columns(params), CPU, torch.float64)
    batch = SamplingBatch.from_columns(columns, params, [None] * len(params))
    return sample(logits, batch, torch.Generator().manual_seed(0), excluded)


def test_tokens_of_all_blocks_are_drawn_as_often_as_their_probabilities_say():
    """The vocabulary has two whole blocks and a part; a block begins at 256 and at 512."""
    weights = torch.zeros(600)
    weights[[3, 255, 256, 300, 511, 512, 599]] = torch.tensor([4.0, 1, 2, 3, 1, 5, 4])
    num_draws = 20_000
    excluded = torch.zeros(600, dtype=torch.bool)
    for mask in (None, excluded):
        excluded[250:300] = True
        ids, logprobs = draw(
            weights.log().expand(num_draws, -1), [SamplingParams()] * num_draws, mask
        )
        allowed = weights if mask is None else weights.masked_fill(mask, 0)
        expected = allowed / allowed.sum()
        shares = ids.bincount(minlength=600) / num_draws
        assert (shares - expected).abs().max() < 4 * (0.25 / num_draws) ** 0.5
        assert not shares[allowed == 0].any()
        torch.testing.assert_close(logprobs, (weights / weights.sum()).log()[ids])


@pytest.mark.parametrize(
    ("first", "last", "uniform", "token"),
    [
        (0, 599, 0.0, 0), (0, 599, 255.5 / 600, 255), (0, 599, 256.5 / 600, 256), (0, 599, 512.5 / 600, 512),
        (0, 599, 1 - 2**-53, 599), (0, 255, 1 - 2**-53, 255), (0, 511, 1 - 2**-53, 511), (256, 599, 0.0, 256),
        (512, 599, 0.0, 512), (270, 300, 0.0, 270), (270, 300, 1 - 2**-53, 300),
    ],
)  # fmt: skip
def test_a_random_number_leads_to_the_token_at_which_the_sum_passes_it(first, last, uniform, token):
    weights = torch.zeros(1, 600)
    weights[:, first : last + 1] = 0.25
    assert _draw(weights, torch.tensor([[uniform]], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"temperature": 0.01},
        {"top_k": 1},
        {"top_k": 3},
        {"top_p": 0.2},
        {"top_p": 0.9, "top_k": 2, "temperature": 2.0},
    ],
)
def test_an_excluded_token_is_never_sampled_and_logprobs_stay_those_of_the_trainer(settings):
    logits = torch.tensor([9.0, 0.0, 9.0, 1.0, 2.0, 8.0])
    excluded = torch.tensor([True, False, True, False, False, True])
    params = [SamplingParams(**settings)] * 500
    ids, logprobs = draw(logits.expand(500, -1), params, excluded)
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
        ({}, "missing required field `input_ids`"),
        ({"input_ids": []}, "non-empty"),
        ({"input_ids": [[1], []]}, "non-empty"),
        ({"input_ids": [[1], 2]}, "non-empty list, got 2"),
        ({"input_ids": [1, [2]]}, r"integers in \[0, 10\), got \[2\]"),
        ({"input_ids": [1, 10]}, r"integers in \[0, 10\), got 10"),
        ({"input_ids": [-1]}, "got -1"),
        ({"input_ids": [True]}, "got `bool`"),
        ({"input_ids": [1] * 20}, "shorter than 20"),
        ({"input_ids": [1], "rid": 5}, "rid"),
        ({"input_ids": [1], "stream": True}, "stream must be false"),
        ({"input_ids": [1], "logprob_start_len": [1]}, "a position in each prompt"),
        ({"input_ids": [1], "logprob_start_len": [0, 0]}, "a position in each prompt"),
        ({"input_ids": [1], "logprob_start_len": -2}, "logprob_start_len"),
        ({"input_ids": [1], "top_logprobs_num": 11}, "at most 10, the size of the vocabulary"),
        ({"input_ids": [1], "top_logprobs_num": MAX_TOP_TOKENS + 1}, "top_logprobs_num"),
        ({"input_ids": [[1]] * (MAX_PROMPTS + 1)}, f"at most {MAX_PROMPTS} prompts"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 20}}, r"got 1 \+ 20"),
        *(
            ({"input_ids": [1], "sampling_params": {name: value}}, name)
            for name, value in {
                "max_new_tokens": -1,
                "temperature": "hot",
                "top_p": 0,
                "top_k": 2**70,
                "sampling_seed": 2**63,
                "tempratur": 1,
                "n": 2,
            }.items()
        ),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"temperature": 10**400}}, "temperature"),
    ],
)
def test_a_request_that_cannot_be_served_names_the_field(body: Any, message: str) -> None:
    body.setdefault("sampling_params", {"max_new_tokens": 4})
    with pytest.raises(ValueError, match=message):
        parse(json.dumps(body).encode(), GenerateBody).requests(FACTS)


def test_prompts_are_requests_with_ids_of_their_own_and_the_models_stop_tokens() -> None:
    sampling = {"max_new_tokens": 3, "stop_token_ids": [4]}
    body = {"input_ids": [[1], [2, 3]], "rid": "a", "sampling_params": sampling, "unknown": 1}
    body |= {"logprob_start_len": [0, 1], "top_logprobs_num": 2}
    found = parse(json.dumps(body).encode(), GenerateBody)
    requests = found.requests(FACTS)
    assert found.is_list
    assert [request.request_id for request in requests] == ["a_0", "a_1"]
    assert [request.prompt_ids for request in requests] == [[1], [2, 3]]
    assert [(request.logprob_start, request.num_top) for request in requests] == [(0, 2), (1, 2)]
    assert {request.stop_ids for request in requests} == {frozenset({4, 9})}


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
    assert table.checksums() == {n: tensor_checksum(new.float()) for n in ("a.weight", "b.weight")}


def test_the_base_of_a_delta_is_a_copy_of_what_is_served() -> None:
    module = torch.nn.Linear(3, 2, bias=False)
    table, served = WeightTable(module), module.weight.detach().clone()
    base = table.in_wire_dtype("weight", torch.float32)  # the model's own dtype: no cast
    base.fill_(7.0)
    torch.testing.assert_close(module.weight.detach(), served, rtol=0, atol=0)


def test_a_bucket_of_mixed_dtypes_is_cut_where_it_was_joined_and_aligned() -> None:
    tensors = [torch.arange(3, dtype=torch.bfloat16), torch.arange(5.0), torch.arange(4.0)]
    flat = torch.cat([t.view(torch.uint8) for t in tensors])
    shapes = tuple(tuple(t.shape) for t in tensors)
    bucket = BucketSpec(("a", "b", "c"), ("bfloat16", "float32", "float32"), shapes)
    for original, received in zip(tensors, split_bucket(flat, bucket), strict=True):
        assert received.data_ptr() % 64 == 0
        torch.testing.assert_close(received, original, rtol=0, atol=0)


STOP = 9


def make_request(max_new_tokens: int) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    request = Request("r", [1, 2], params, frozenset({STOP}))
    request.start_segment("1")
    return request


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([3, STOP], {"type": "stop", "matched": STOP}),
        ([3, 4, STOP], {"type": "stop", "matched": STOP}),  # the last token that is allowed
        ([3, 4, 5], {"type": "length", "length": 3}),
    ],
)
def test_a_stop_token_ends_a_request_even_as_the_last_that_is_allowed(
    tokens: list[int], reason: dict[str, Any]
) -> None:
    request = make_request(3)
    assert [request.append(token, -1.0) for token in tokens] == [False] * (len(tokens) - 1) + [True]
    assert request.finish_reason == reason


def test_a_version_that_wrote_no_token_has_no_segment() -> None:
    request = make_request(9)
    request.append(3, -1.0)
    request.start_segment("2")
    request.start_segment("3")
    request.append(4, -1.0)
    assert request.segments == [("1", 0), ("3", 1)]


def test_an_engine_is_stuck_if_it_takes_no_step_between_two_questions():
    engine: Any = SimpleNamespace(
        num_running=1, num_waiting=0, num_steps=5, is_paused=False, is_alive=True, version="3",
        failure=None, residence=Residence.SERVED,
    )  # fmt: skip
    now = 0.0
    monitor = EngineMonitor(engine, lambda: now)
    assert monitor.health().facts["phase"] == "generating"
    now = 119.0
    assert monitor.health().problem is None
    now = 121.0
    problem = monitor.health().problem
    assert problem is not None and "no step was taken for 121 s" in problem
    engine.num_steps += 1
    assert monitor.health().problem is None

    engine.is_paused = True
    now = 500.0
    assert monitor.health().facts["phase"] == "paused"
    assert monitor.health().problem is None
    engine.is_alive, engine.failure = False, MemoryError("no room")
    problem = monitor.health().problem
    assert problem is not None and "MemoryError('no room')" in problem
