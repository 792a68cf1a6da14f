# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the backend of a weight group, from facts that must be the same at both of its ends.

NCCL does not adapt one rank to another:

- A communicator refuses ranks with different versions of NCCL, and torch makes it only with the
  first broadcast, in the middle of a push. Ranks wait for each other if their versions set up a
  communicator with different data.
- A communicator refuses two ranks on one GPU.
- ``NCCL_CUMEM_ENABLE`` decides how a rank shares its buffers on a host. Each rank opens the others'
  buffers by its own setting, which fails if the settings differ.
- ``NCCL_ALGO`` and ``NCCL_PROTO`` restrict what a rank may choose for a broadcast. Ranks that
  choose differently wait for each other. According to the sources of 2.18 to 2.30, ranks agree on
  the lesser ``NCCL_NVLS_ENABLE``; this was not tried here.

NCCL reads these variables once in a process, so no group can have its own. (From 2.29.7 on
``NCCL_NO_CACHE`` makes it read them again, but they must not change while a process has
communicators.) HTTP clients import this module, so it does not need torch.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SHARING_SETTING = "NCCL_CUMEM_ENABLE"
NCCL_SETTINGS = (SHARING_SETTING, "NCCL_NVLS_ENABLE", "NCCL_ALGO", "NCCL_PROTO")
"""Environment variables of NCCL that are compared."""

GroupTransportName = Literal["auto", "nccl", "host"]
"""The values of ``weight_sync.transport`` that use process groups."""


@dataclass(frozen=True)
class GroupFacts:
    """Facts about one process that joins weight groups; ``None`` for what is not known.

    ``gpu`` is its UUID. ``settings`` are the environment's :data:`NCCL_SETTINGS`, empty if not set.
    ``hint`` is a sentence on facts that are not known, for messages.
    """

    device: str | None = None
    torch: str | None = None
    nccl: str | None = None
    gpu: str | None = None
    settings: dict[str, str] | None = None
    hint: str = ""


@dataclass(frozen=True)
class BackendChoice:
    """The backend of a server's groups; ``backend`` is ``None`` if NCCL is demanded and cannot work.

    ``obstacles`` say why NCCL cannot work and what to change, and ``doubts`` what is not known.
    """

    backend: Literal["nccl", "gloo"] | None
    obstacles: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def choose_backend(
    transport: GroupTransportName, ours: Sequence[GroupFacts], theirs: Sequence[GroupFacts]
) -> BackendChoice:
    """Decides how weights travel from the source ranks (``ours``) to one server's workers.

    ``auto`` takes NCCL only if nothing prevents it and nothing is unknown; ``nccl`` is refused only
    for what is known to prevent it.
    """
    if transport == "host":
        return BackendChoice("gloo")
    if transport == "auto" and any(one.device == "cpu" for one in (*ours, *theirs)):
        return BackendChoice("gloo")
    pairs = list(itertools.product(ours, theirs))
    # A dict keeps the order, and each sentence once.
    obstacles = tuple({line: None for pair in pairs for line in _obstacles(*pair)})
    doubts = tuple({line: None for pair in pairs for line in _doubts(*pair)})
    if obstacles:
        return BackendChoice("gloo" if transport == "auto" else None, obstacles)
    return BackendChoice("gloo" if doubts and transport == "auto" else "nccl", doubts=doubts)


def facts_from_json(body: Any) -> GroupFacts:
    """Reads a server's answer. A fact that is missing or malformed counts as not known."""
    if not isinstance(body, Mapping):
        return GroupFacts()
    settings = body.get("settings")
    values = settings if isinstance(settings, Mapping) else {}
    is_known = all(isinstance(values.get(name), str) for name in NCCL_SETTINGS)
    texts = {n: body[n] for n in ("device", "torch", "nccl", "gpu") if isinstance(body.get(n), str)}
    known = {name: values[name] for name in NCCL_SETTINGS} if is_known else None
    return GroupFacts(**texts, settings=known)


def _obstacles(ours: GroupFacts, theirs: GroupFacts) -> Iterator[str]:
    for side, facts in (("the trainer", ours), ("the server", theirs)):
        if facts.device == "cpu":
            yield f"NCCL needs a GPU on both sides, but {side} runs on a CPU."
    if ours.nccl and theirs.nccl and ours.nccl != theirs.nccl:
        yield (
            f"NCCL must have the same version on both sides, but the trainer has NCCL {ours.nccl} "
            f"(torch {ours.torch or 'unknown'}) and the server has NCCL {theirs.nccl} (torch "
            f"{theirs.torch or 'unknown'}). Install the same release of torch in both environments."
        )
    if ours.gpu and ours.gpu == theirs.gpu:
        yield (
            f"NCCL refuses two ranks on one GPU, but trainer and server both use {ours.gpu}. Give "
            "them GPUs of their own with CUDA_VISIBLE_DEVICES."
        )
    if difference := _difference(SHARING_SETTING, ours, theirs):
        yield f"{SHARING_SETTING} must agree on both sides, but {difference}"


def _doubts(ours: GroupFacts, theirs: GroupFacts) -> Iterator[str]:
    """Yields what is not known about a source rank and a worker, or was never tried."""
    for side, facts in (("The trainer", ours), ("The server", theirs)):
        unknown = [
            what
            for what, value in (
                ("its device", facts.device),
                ("the version of its NCCL", facts.nccl),
                ("its GPU", facts.gpu),
                (f"its settings of NCCL ({', '.join(NCCL_SETTINGS)})", facts.settings),
            )
            if value is None
        ]
        if unknown:
            yield f"{side} does not tell {', '.join(unknown)}. {facts.hint}".strip()
    for name in NCCL_SETTINGS:
        if name != SHARING_SETTING and (difference := _difference(name, ours, theirs)):
            yield f"{name} should agree on both sides, but {difference}"
    if ours.torch and theirs.torch and _release(ours.torch) != _release(theirs.torch):
        yield (
            f"Process groups over NCCL were never tried between torch {ours.torch}, which the "
            f"trainer has, and torch {theirs.torch}, which the server has."
        )


def _difference(name: str, ours: GroupFacts, theirs: GroupFacts) -> str:
    """Says how a setting differs between the two sides and what to do; empty if equal or not known."""
    if ours.settings is None or theirs.settings is None:
        return ""
    own, other = ours.settings[name], theirs.settings[name]
    if _meaning(name, own) == _meaning(name, other):
        return ""
    return (
        f"it is {own or 'not set'} in the trainer's environment and {other or 'not set'} in the "
        "server's. Start both with the same value."
    )


def _meaning(name: str, value: str) -> str:
    value = value.strip().lower()
    if name.endswith("_ENABLE"):
        # Whatever is not 0 leaves the feature on where the device has it.
        return "off" if value == "0" else "on"
    return value


def _release(version: str) -> tuple[str, ...]:
    """Returns ``("2", "13")`` for ``"2.13.0+cu130"``."""
    return tuple(version.split("+")[0].split(".")[:2])
