# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests how the reported load of a server is read.

The answers below have the form of those of vLLM 0.32 and SGLang 0.5.23.
"""

import copy
from typing import Any

import pytest

from torchtitan.grpo.inference.client import ServerError, ServerLoad
from torchtitan.grpo.inference.sglang.answers import parse_loads
from torchtitan.grpo.inference.vllm.answers import parse_metrics

METRICS = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="models/tiny"} 16.0
vllm:num_requests_waiting{engine="0",model_name="models/tiny"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="models/tiny",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="models/tiny"} 0.25
"""
SECOND_ENGINE = METRICS.replace('"0"', '"1"').replace("0.25", "1.5e-01")

RANKS: dict[str, Any] = {
    "loads": [
        {
            "dp_rank": 0,
            "num_running_reqs": 16,
            "num_waiting_reqs": 5,
            "token_usage": 0.25,
        }
    ],
}


def test_vllms_metrics_hold_the_load() -> None:
    assert parse_metrics("url", METRICS) == ServerLoad(16, 5, 0.25)
    assert parse_metrics("url", METRICS + SECOND_ENGINE) == ServerLoad(32, 10, 0.25)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (METRICS.replace("vllm:num_requests_running", "other"), "must hold vllm:num_requests_run"),
        ("", "--disable-log-stats"),
        (None, "must hold vllm:num_requests_running, vllm:num_requests_waiting, vllm:kv_cache"),
        (METRICS.replace("0.25", "NaN"), r"must answer numbers in \[0, 1e"),
        (METRICS.replace(" 5.0", " -1.0"), r"must answer numbers in \[0, 1e"),
        (METRICS.replace(" 5.0", " many"), r"must answer numbers in \[0, 1e"),
    ],
)
def test_metrics_without_a_load_are_refused(body: Any, message: str) -> None:
    with pytest.raises(ServerError, match=f"^url.*{message}"):
        parse_metrics("url", body)


def test_sglangs_ranks_hold_the_load() -> None:
    assert parse_loads("url", RANKS) == ServerLoad(16, 5, 0.25)
    second = {**RANKS["loads"][0], "dp_rank": 1, "token_usage": 0.5}
    two = {**RANKS, "loads": [*RANKS["loads"], second]}
    assert parse_loads("url", two) == ServerLoad(32, 10, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loads": []}, r"must answer numbers in \[0, 1e"),
        ({"loads": [{"num_running_reqs": 1}]}, "must answer loads with .*num_waiting_reqs"),
        ({"loads": ["busy"]}, "must answer loads with"),
        ({"loads": [{**RANKS["loads"][0], "token_usage": None}]}, r"numbers in \[0, 1e"),
    ],
)
def test_ranks_without_a_load_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerError, match=f"^url.*{message}"):
        parse_loads("url", {**copy.deepcopy(RANKS), **change})
    with pytest.raises(ServerError, match="must answer loads with"):
        parse_loads("url", "busy")
