# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What an SGLang server tells about its end of weight groups.

It runs no code of this project, and no route tells its versions of torch and NCCL or its
environment. A release requires one version of torch, but other versions can be installed beside it,
and images often hold a newer NCCL. Nor is it known whether SGLang has set NCCL's variables, because
it leaves those that its environment names. All of this is therefore named in messages, and nothing
is concluded from it.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan.grpo.inference.kinds import kind_row
from torchtitan.grpo.weight_wire.group_facts import GroupFacts

_REQUIRED_TORCH = {"0.5.20": "2.13.0", "0.5.21": "2.13.0", "0.5.22": "2.14.1", "0.5.23": "2.14.1"}
"""The version of torch that a release's package requires."""


def facts_of_server(info: Mapping[str, Any]) -> GroupFacts:
    """Returns the facts in an answer of ``/server_info``."""
    device, release = info.get("device"), str(info.get("version"))
    required = _REQUIRED_TORCH.get(".".join(release.split(".")[:3]))
    torch = "" if required is None else f" requires torch {required} and"
    values = " and ".join(
        f"{name}={value}" for name, value in kind_row("sglang").nccl_settings.items()
    )
    return GroupFacts(
        device=device if device in ("cpu", "cuda") else None,
        hint=f"SGLang {release}{torch} sets {values} unless its environment names other values.",
    )
