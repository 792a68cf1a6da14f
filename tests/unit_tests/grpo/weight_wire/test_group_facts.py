# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which backend two ends get, for each way in which they can differ."""

import ctypes
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from torchtitan.grpo.weight_wire import process_group
from torchtitan.grpo.weight_wire.group_facts import (
    NCCL_SETTINGS,
    GroupFacts,
    choose_backend,
    facts_from_json,
)
from torchtitan.grpo.weight_wire.process_group import own_group_facts, version_text

UNSET = dict.fromkeys(NCCL_SETTINGS, "")
TRAINER = GroupFacts("cuda", "2.13.0+cu130", "2.29.7", "GPU-a", UNSET)
SERVER = replace(TRAINER, gpu="GPU-b")
CPU = GroupFacts("cpu", "2.13.0+cpu", None, None, UNSET)

SAME = [
    SERVER,
    replace(SERVER, torch="2.13.1"),
    # NCCL turns these on by itself where the device has them.
    replace(SERVER, settings=UNSET | {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "2"}),
]
OBSTACLES = [
    (replace(SERVER, nccl="2.30.7"), "the trainer has NCCL 2.29.7 (torch 2.13.0+cu130)"),
    (replace(SERVER, nccl="2.30.7", torch="2.14.1"), "the server has NCCL 2.30.7 (torch 2.14.1)"),
    (replace(SERVER, nccl="2.30.7"), "Install the same release of torch"),
    (replace(SERVER, gpu="GPU-a"), "trainer and server both use GPU-a"),
    (
        replace(SERVER, settings=UNSET | {"NCCL_CUMEM_ENABLE": "0"}),
        "NCCL_CUMEM_ENABLE must agree on both sides, but it is not set in the trainer's "
        "environment and 0 in the server's",
    ),
    # What is known to be different decides, whatever else is unknown.
    (replace(SERVER, nccl="2.28.3", settings=None, gpu=None), "the server has NCCL 2.28.3"),
]
DOUBTS = [
    (
        GroupFacts(),
        "The server does not tell its device, the version of its NCCL, its GPU, its set",
    ),
    (replace(SERVER, nccl=None, hint="It is old."), "does not tell the version of its NCCL. It is"),
    (replace(SERVER, settings=None), "its settings of NCCL (NCCL_CUMEM_ENABLE, NCCL_NVLS_ENABLE,"),
    (
        replace(SERVER, settings=UNSET | {"NCCL_NVLS_ENABLE": "0"}),
        "NCCL_NVLS_ENABLE should agree on both sides, but it is not set in the trainer's "
        "environment and 0 in the server's",
    ),
    (replace(SERVER, settings=UNSET | {"NCCL_PROTO": "Simple"}), "NCCL_PROTO should agree"),
    (replace(SERVER, torch="2.14.1"), "between torch 2.13.0+cu130, which the trainer has, and"),
]


@pytest.mark.parametrize("server", SAME)
def test_ends_that_agree_use_nccl(server):
    for transport in ("auto", "nccl"):
        choice = choose_backend(transport, [TRAINER], [server])
        assert (choice.backend, choice.obstacles, choice.doubts) == ("nccl", (), ())


@pytest.mark.parametrize(
    ("server", "reason", "demanded"),
    [*((*row, None) for row in OBSTACLES), *((*row, "nccl") for row in DOUBTS)],
)
def test_auto_takes_gloo_and_nccl_refuses_what_prevents_it_and_tries_what_is_not_known(
    server, reason, demanded
):
    for transport, backend in (("auto", "gloo"), ("nccl", demanded)):
        choice = choose_backend(transport, [TRAINER], [server])
        told, other = choice.obstacles, choice.doubts
        if demanded:
            told, other = other, told
        assert (choice.backend, other) == (backend, ()) and reason in " ".join(told)


@pytest.mark.parametrize(("ours", "theirs"), [(CPU, SERVER), (TRAINER, CPU), (CPU, CPU)])
def test_a_side_without_a_gpu_means_gloo_without_a_word_unless_nccl_is_demanded(ours, theirs):
    choice = choose_backend("auto", [ours], [theirs])
    assert (choice.backend, choice.obstacles, choice.doubts) == ("gloo", (), ())
    choice = choose_backend("nccl", [ours], [theirs])
    assert choice.backend is None
    assert "runs on a CPU" in choice.obstacles[0]


@pytest.mark.parametrize("server", [SERVER, replace(SERVER, nccl="1"), CPU, GroupFacts()])
def test_host_needs_nothing_of_the_server(server):
    choice = choose_backend("host", [TRAINER], [server])
    assert (choice.backend, choice.obstacles, choice.doubts) == ("gloo", (), ())


def test_one_worker_or_source_that_differs_decides_for_all_and_each_reason_comes_once():
    sources = [TRAINER, replace(TRAINER, gpu="GPU-c")]
    workers = [SERVER, replace(SERVER, gpu="GPU-d")]
    assert choose_backend("auto", sources, workers).backend == "nccl"
    differing = [workers[0], replace(workers[1], nccl="2.30.7")]
    choice = choose_backend("auto", sources, differing)
    assert (choice.backend, len(choice.obstacles)) == ("gloo", 1)
    choice = choose_backend("auto", sources, [SERVER, replace(SERVER, gpu="GPU-c")])
    assert "both use GPU-c" in choice.obstacles[0]


def test_facts_come_back_from_json_and_what_is_malformed_is_unknown():
    assert facts_from_json(json.loads(json.dumps(asdict(TRAINER)))) == TRAINER
    for body in (None, [], {"device": 1, "settings": {"NCCL_CUMEM_ENABLE": "0"}}):
        assert facts_from_json(body) == GroupFacts()


def test_a_process_on_a_cpu_knows_its_torch_and_its_environment(monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    for name in NCCL_SETTINGS[1:]:
        monkeypatch.delenv(name, raising=False)
    settings = UNSET | {"NCCL_CUMEM_ENABLE": "0"}
    assert own_group_facts(torch.device("cpu")) == GroupFacts(
        "cpu", torch.__version__, None, None, settings
    )
    # vLLM's workers cannot send a subclass of str, which torch.__version__ is.
    assert type(own_group_facts(torch.device("cpu")).torch) is str


def test_the_loaded_library_tells_its_version_and_torch_does_where_it_contains_nccl(monkeypatch):
    class Library:
        def ncclGetVersion(self, code: Any) -> int:
            code._obj.value = 22907
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert process_group.nccl_version() == "2.29.7"

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9, "suffix"))
    assert process_group.nccl_version() == "2.28.9"
    assert version_text(23007) == "2.30.7"
