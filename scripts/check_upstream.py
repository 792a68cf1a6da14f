# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lists the names of the seam to torchtitan that another release lacks.

    pip download --no-deps torchtitan==0.3.0
    python scripts/check_upstream.py torchtitan-0.3.0-py3-none-any.whl

Nothing is imported: the seam (`torchtitan/grpo/upstream/`) and the wheel are read as source.
"""

import ast
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

SEAM = Path(__file__).resolve().parents[1] / "torchtitan" / "grpo" / "upstream"


def taken(file: Path) -> Iterator[tuple[str, str]]:
    """Yields the (module, name) pairs that a file of the seam imports from torchtitan."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan"):
            yield from ((node.module, alias.name) for alias in node.names)


class Release:
    """The modules of a wheel, and the names that each defines or imports."""

    def __init__(self, wheel: Path) -> None:
        self._names: dict[str, set[str]] = {}
        with zipfile.ZipFile(wheel) as files:
            for path in files.namelist():
                if path.startswith("torchtitan/") and path.endswith(".py"):
                    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                    self._names[module] = set(bound_names(ast.parse(files.read(path))))

    def has(self, module: str, name: str) -> bool:
        return name in self._names.get(module, ()) or f"{module}.{name}" in self._names

    def places(self, name: str) -> list[str]:
        """Returns the modules outside of experiments that have a name of that kind."""
        found = (m for m, names in self._names.items() if name in names)
        return sorted(m for m in found if ".experiments." not in m)


def bound_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((a.asname or a.name).split(".")[0] for a in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def main() -> None:
    release = Release(Path(sys.argv[1]))
    for file in sorted(SEAM.glob("*.py")):
        pairs = sorted(taken(file))
        missing = [pair for pair in pairs if not release.has(*pair)]
        if pairs:
            print(f"{file.name}: {len(pairs) - len(missing)} of {len(pairs)} names are there")
        for module, name in missing:
            elsewhere = ", ".join(release.places(name)[:3]) or "nowhere"
            print(f"  {module}.{name}: {elsewhere}")


if __name__ == "__main__":
    main()
