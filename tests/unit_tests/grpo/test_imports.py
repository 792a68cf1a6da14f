# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Imports between the files of the package: without circles, and from upper floors to lower ones."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from light import LIGHT

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGE = "torchtitan.grpo"

FLOORS: tuple[set[str], ...] = (
    {"types", "upstream"},
    {"system"},
    {"config", "weight_wire"},
    {"inference", "losses", "run_folder", "workers"},
    {"models", "rewards"},
    {"pipeline", "rollout"},
    {"config_checks", "observe", "weight_sync"},
    {"data"},
    {"training"},
    {"controller", "resume"},
    {"start"},
    {"commands"},
    {"grpo_train", ""},
)
"""Rooms (a folder, or a file beside the folders) from the ground floor to the top. A room may
import rooms of lower floors, and of its own floor as long as no circle of rooms arises. The
package itself, "", stands at the top: what it exports, it imports when that is asked for."""

Graph = dict[str, set[str]]


def read_graph() -> Graph:
    """Imports of each module, also those inside functions, by names without the package's own.

    `inference/kinds.py` names modules of each kind as text, which points from the table to the kinds.
    """
    root = REPOSITORY / "torchtitan"
    paths = {module_name(p.relative_to(root)): p for p in (root / "grpo").rglob("*.py")}
    paths["grpo_train"] = root / "grpo_train.py"
    return {
        name: set(imported(ast.parse(path.read_text()), set(paths))) - {name}
        for name, path in paths.items()
    }


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (local_name(alias.name) for alias in node.names if is_local(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and is_local(node.module):
            module = local_name(node.module)
            for alias in node.names:
                submodule = f"{module}.{alias.name}".removeprefix(".")
                yield submodule if submodule in modules else module


def is_local(module: str) -> bool:
    return f"{module}.".startswith(f"{PACKAGE}.")


def local_name(module: str) -> str:
    return module.removeprefix(PACKAGE).removeprefix(".")


def room_of(module: str) -> str:
    return module.partition(".")[0]


def targets_from(graph: Graph, room: str) -> set[str]:
    return {t for module, found in graph.items() if room_of(module) == room for t in found}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return read_graph()


def test_the_whole_package_is_read(graph: Graph) -> None:
    assert "inference.kinds" in graph["commands.verify"]
    assert "weight_wire.checksum" in graph["weight_wire.staging"]
    assert any(room_of(target) == "training" for target in graph["grpo_train"])


def test_no_files_import_each_other_in_a_circle(graph: Graph) -> None:
    graphlib.TopologicalSorter(graph).prepare()


def test_every_room_has_a_floor(graph: Graph) -> None:
    rooms = {room_of(module) for module in graph}
    assert rooms == set().union(*FLOORS)
    assert sum(map(len, FLOORS)) == len(rooms)


def test_the_table_of_contents_has_every_room_on_its_floor() -> None:
    table = (REPOSITORY / "torchtitan/grpo/README.md").read_text()
    floor, told = 0, set[tuple[str, int]]()
    for number, room in re.findall(r"^\| (\d*) *\| `([a-z_]+)(?:/|\.py)` \| [A-Z]", table, re.M):
        floor = int(number or floor)
        told.add((room, floor))
    rooms = {(room, i) for i, names in enumerate(FLOORS, 1) for room in names}
    assert told == rooms - {("grpo_train", len(FLOORS)), ("", len(FLOORS))}


def test_imports_point_to_lower_floors(graph: Graph) -> None:
    floor_of = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    upwards = {
        (module, target)
        for module, targets in graph.items()
        for target in targets
        if floor_of[room_of(target)] > floor_of[room_of(module)]
    }
    assert not upwards


def test_rooms_of_one_floor_do_not_import_each_other_in_a_circle(graph: Graph) -> None:
    rooms: Graph = {}
    for module, targets in graph.items():
        rooms.setdefault(room_of(module), set()).update(map(room_of, targets))
    for room, targets in rooms.items():
        targets -= {room, ""}
    graphlib.TopologicalSorter(rooms).prepare()


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("system", "upstream"),
        ("upstream", ""),
        ("types", ""),
        ("weight_wire", "system"),
        ("inference", "config system types weight_wire"),
        ("losses", "config system"),
    ],
)
def test_a_room_on_which_others_build_imports_few(graph: Graph, room: str, allowed: str) -> None:
    assert set(map(room_of, targets_from(graph, room))) <= {room, *allowed.split()}


def test_only_the_seam_imports_torchtitan() -> None:
    seam = REPOSITORY / "torchtitan" / "grpo" / "upstream"
    folders = ("torchtitan", "tests", "benchmarks", "scripts")
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    importing = {path for path in paths if imports_torchtitan(ast.parse(path.read_text()))}
    # Its own model is counted beside ours.
    importing.discard(REPOSITORY / "benchmarks/step_work_parts/titan_model.py")
    assert importing and all(path.parent == seam for path in importing)


def test_a_rank_starts_without_the_compiler_and_upstreams_models() -> None:
    program = f"{LIGHT}import sys\nimport torchtitan.grpo_train\nprint(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, timeout=300
    )
    left_out = {
        "torch._inductor.compile_fx", "torchao", "torchtitan.components.quantization", "datasets",
        "torchtitan.models.qwen3", "torchtitan.models.llama3",
    }  # fmt: skip
    assert not left_out & set(ran.stdout.split())


def imports_torchtitan(tree: ast.AST) -> bool:
    ours = ("torchtitan.grpo", "torchtitan.grpo_train")
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            is_ours = any(name == own or name.startswith(f"{own}.") for own in ours)
            if name.partition(".")[0] == "torchtitan" and not is_ours:
                return True
    return False


def test_weight_synchronization_knows_the_interface_of_servers_and_no_kind(graph: Graph) -> None:
    found = {
        target for target in targets_from(graph, "weight_sync") if room_of(target) == "inference"
    }
    assert found <= {"inference.client", "inference.kinds"}
