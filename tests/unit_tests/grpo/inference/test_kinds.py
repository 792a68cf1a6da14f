# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The table of server kinds is complete and light; their settings of NCCL, and their GPUs."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from light import LIGHT

from torchtitan.grpo.config.cluster import ServerGroup
from torchtitan.grpo.inference import kinds
from torchtitan.grpo.inference.gpu_shares import GpuShare, gpus_of, share_gpus
from torchtitan.grpo.inference.kinds import (
    KEY_OPTIONS,
    KINDS,
    kind_row,
    refuse_keys,
    take_nccl_setting_of,
)
from torchtitan.grpo.system.light_start import LIGHT_PYTHON

FOLDER = Path(kinds.__file__).parent


def test_no_argument_of_a_server_may_hold_a_key() -> None:
    for option in KEY_OPTIONS:
        for arguments in ([option, "secret"], [f"{option}=secret"]):
            with pytest.raises(
                ValueError, match=f"(?s)got {option}.*TORCHTITAN_GRPO_API_KEY"
            ) as caught:
                refuse_keys(arguments, "inference.extra_args")
            assert "secret" not in str(caught.value)
    refuse_keys(["--seed", "7"], "inference.extra_args")


def test_every_folder_of_a_kind_has_a_row_whose_script_exists_and_no_other_kind_has() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/client.py")} == set(KINDS)
    scripts = [row.install_script for row in KINDS.values() if row.install_script is not None]
    assert scripts and all((FOLDER.parents[2] / script).is_file() for script in scripts)
    with pytest.raises(ValueError, match=r"inference\.kind must be one of .*embedded, .*got 'tgi'"):
        kind_row("tgi")


def test_the_table_is_read_without_torch_or_an_http_client() -> None:
    # `import torchtitan` would import torch; the launcher puts a bare package in its place.
    code = (
        f"{LIGHT}import sys, torchtitan.grpo.inference.kinds;"
        "print({'torch', 'aiohttp', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [LIGHT_PYTHON[0], "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "set()"


CUMEM = "NCCL_CUMEM_ENABLE"


@pytest.mark.parametrize(
    ("kind", "transport", "given", "taken"),
    [
        ("sglang", "nccl", {}, {CUMEM: "0"}),
        ("sglang", "nccl", {CUMEM: "1"}, {CUMEM: "1"}),
        ("sglang", "auto", {}, {}),
        ("vllm", "nccl", {}, {}),
    ],
)
def test_the_trainer_takes_sglangs_setting_where_nccl_is_demanded(
    kind, transport, given, taken, monkeypatch
):
    environment = {"PATH": "/bin", **given}
    monkeypatch.setattr(kinds, "os", SimpleNamespace(environ=environment))
    take_nccl_setting_of(kind, transport)
    assert environment == {"PATH": "/bin", **taken}


def shares(num_servers: int, gpus: list[str], **settings: Any) -> list[GpuShare]:
    group = ServerGroup("inference", num_servers, is_lent="lent_part" in settings)
    defaults = {"num_training": 0, "tensor_parallel_size": 0, "memory": 0.0, "num_heads": 8}
    return share_gpus([group], gpus, **(defaults | settings))


def test_servers_share_the_gpus_evenly():
    for gpus, expected in (
        ([2, 3], [(2, 3)]),
        ([2, 3], [(2,), (3,)]),
        ([0], [(0,), (0,), (0,)]),
    ):
        assert [gpus_of(i, len(expected), gpus) for i in range(len(expected))] == expected


def test_servers_to_which_a_gpu_is_lent_divide_what_the_trainer_leaves():
    lent = {"num_training": 1, "lent_part": 0.6}
    assert [share.memory for share in shares(2, ["0"], **lent)] == [0.3, 0.3]
    assert [share.memory for share in shares(2, ["0"], memory=0.2, **lent)] == [0.2, 0.2]


def test_a_server_with_gpus_of_its_own_uses_as_many_as_divide_the_heads():
    assert shares(1, ["4", "5", "6"]) == [GpuShare(("4", "5"), 2, None)]
    assert shares(1, ["4", "5", "6"], num_heads=12) == [GpuShare(("4", "5", "6"), 3, None)]
    assert shares(1, ["4", "5"], num_heads=None) == [GpuShare(("4",), 1, None)]
    assert shares(1, ["4", "5"], tensor_parallel_size=1) == [GpuShare(("4",), 1, None)]


@pytest.mark.parametrize(
    ("num_servers", "num_training", "expected"),
    [(1, 0, None), (2, 0, 0.45), (1, 1, 0.4), (2, 1, 0.2)],
)
def test_the_memory_of_a_shared_gpu_is_divided(num_servers, num_training, expected):
    found = shares(num_servers, ["0"], num_training=num_training)
    assert [share.memory for share in found] == [expected] * num_servers
    (own, *_) = shares(num_servers, ["0"], num_training=num_training, memory=0.7)
    assert own.memory == 0.7


def test_too_few_gpus_for_the_tensor_parallel_size_are_refused():
    with pytest.raises(ValueError, match=r"which is 1 with 2 GPUs for .* = 2, got 2\. Lower it"):
        shares(2, ["0", "1"], tensor_parallel_size=2)
    assert shares(2, [], tensor_parallel_size=2)[0].tensor_parallel_size == 2, "on CPU it is free"
