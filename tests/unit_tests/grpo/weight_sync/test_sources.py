# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests which ranks send which parameters, and whose blocks they are put together from."""

import pytest

from torchtitan.grpo.models.shards import Assembly, Block, Held, plan_assembly
from torchtitan.grpo.weight_sync.plan import SourceLimits, choose_sources, families_of


def sharded(name: str, numel: int, groups: list[list[int]]) -> dict[int, dict[str, Held]]:
    """A vector that is cut into as many parts as there are groups; each rank of one holds it."""
    part, held = -(-numel // len(groups)), {}
    for index, ranks in enumerate(groups):
        begin = min(index * part, numel)
        block = Block((begin,), (min(part, numel - begin),))
        held |= {rank: {name: Held((numel,), block)} for rank in ranks}
    return held


def model(sizes: list[int], groups: list[list[int]], prefix: str = "w") -> list[Assembly]:
    num_ranks = 1 + max(rank for ranks in groups for rank in ranks)
    by_rank: list[dict[str, Held]] = [{} for _ in range(num_ranks)]
    for index, size in enumerate(sizes):
        for rank, held in sharded(f"layers.{index}.{prefix}", size, groups).items():
            by_rank[rank] |= held
    return plan_assembly(by_rank)


def num_elements(by_source: dict[int, list[Assembly]]) -> dict[int, int]:
    return {rank: sum(a.numel for a in members) for rank, members in by_source.items()}


LAYER = [64 * 64] * 4 + [64 * 192] * 3 + [64, 64]
SIZES = [1000 * 64, *LAYER * 6, 64]

LAYOUTS = {
    "replicated": [[0, 1, 2, 3]],
    "sharded over 2": [[0], [1]],
    "sharded over 8": [[rank] for rank in range(8)],
    "2 replicas of 2 shards": [[0, 2], [1, 3]],
    "4 replicas of 2 shards": [[0, 2, 4, 6], [1, 3, 5, 7]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_send_equally_much_and_everything_is_sent_once(layout):
    groups = LAYOUTS[layout]
    assemblies = model(SIZES, groups)
    by_source = choose_sources(assemblies, SourceLimits())
    num_ranks = sum(map(len, groups))
    assert sorted(by_source) == list(range(num_ranks))
    sent = num_elements(by_source)
    even = sum(SIZES) / num_ranks
    assert max(sent.values()) <= max(1.05 * even, max(SIZES))
    names = sorted(a.name for members in by_source.values() for a in members)
    assert names == sorted(a.name for a in assemblies)


def test_blocks_come_from_the_source_itself_or_from_its_own_host():
    # Two hosts with a replica each; each replica is sharded over the two ranks of its host.
    assemblies = model(SIZES, [[0, 2], [1, 3]])
    limits = SourceLimits(hosts=(0, 0, 1, 1))
    for source, members in choose_sources(assemblies, limits).items():
        for assembly in members:
            for piece in assembly.pieces:
                assert piece.rank == source or source not in piece.holders
                assert limits.host(piece.rank) == limits.host(source)


def test_ranks_copy_equally_much():
    assemblies = model(SIZES, [[0, 2, 4, 6], [1, 3, 5, 7]])
    copied = dict.fromkeys(range(8), 0)
    for members in choose_sources(assemblies, SourceLimits()).values():
        for piece in (p for a in members for p in a.pieces):
            copied[piece.rank] += piece.block.numel
    assert max(copied.values()) <= 1.2 * sum(copied.values()) / 8


def test_the_first_sources_are_on_different_hosts():
    assemblies = model(SIZES, [[rank] for rank in range(8)])
    limits = SourceLimits(max_sources=2, hosts=(0, 0, 0, 0, 1, 1, 1, 1))
    assert sorted(choose_sources(assemblies, limits)) == [0, 4]
    alone = SourceLimits(max_sources=1, hosts=limits.hosts)
    assert sorted(choose_sources(assemblies, alone)) == [0]


def test_a_parameter_that_only_some_ranks_hold_belongs_to_their_family():
    halves = [Held((8,), Block((begin,), (4,))) for begin in (0, 4)]
    held = [{"layers.0.w": part} for part in halves]
    held[1]["norm.weight"] = Held((1,), Block((0,), (1,)))
    assemblies = plan_assembly(held)
    assert families_of(assemblies) == [{0, 1}]
    by_source = choose_sources(assemblies, SourceLimits())
    names = {rank: [a.name for a in members] for rank, members in by_source.items()}
    assert names == {0: ["layers.0.w"], 1: ["norm.weight"]}


def test_adapters_are_sent_by_the_rank_that_sends_their_target():
    by_rank: list[dict[str, Held]] = [{}, {}]
    for layer in range(6):
        for part, size in (("weight", 64 - layer), ("lora_A.weight", 8), ("lora_B.weight", 24)):
            for rank, held in sharded(f"layers.{layer}.wq.{part}", size, [[0], [1]]).items():
                by_rank[rank] |= held
    by_source = choose_sources(plan_assembly(by_rank), SourceLimits())
    assert sorted(by_source) == [0, 1]
    for members in by_source.values():
        names = [a.name for a in members]
        for name in names:
            stem = name.partition("wq.")[0] + "wq."
            assert {stem + p for p in ("weight", "lora_A.weight", "lora_B.weight")} <= set(names)
