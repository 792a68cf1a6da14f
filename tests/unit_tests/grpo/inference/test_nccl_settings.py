# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The trainer takes over its servers' setting of NCCL only where groups over NCCL need it."""

from types import SimpleNamespace

import pytest

from torchtitan.grpo.inference import nccl_settings
from torchtitan.grpo.inference.nccl_settings import take_nccl_setting_of

CUMEM = "NCCL_CUMEM_ENABLE"


@pytest.fixture
def environment(monkeypatch) -> dict[str, str]:
    environment = {"PATH": "/bin"}
    monkeypatch.setattr(nccl_settings, "os", SimpleNamespace(environ=environment))
    return environment


@pytest.mark.parametrize(
    ("kind", "transport", "taken"),
    [
        ("sglang", "nccl", {CUMEM: "0"}),
        ("sglang", "auto", {}),
        ("sglang", "host", {}),
        ("sglang", "disk", {}),
        ("vllm", "nccl", {}),
        ("embedded", "nccl", {}),
    ],
)
def test_it_is_that_of_sglang_where_nccl_is_demanded(kind, transport, taken, environment):
    take_nccl_setting_of(kind, transport)
    assert environment == {"PATH": "/bin", **taken}


def test_a_value_of_the_user_stays(environment):
    environment[CUMEM] = "1"
    take_nccl_setting_of("sglang", "nccl")
    assert environment == {"PATH": "/bin", CUMEM: "1"}
