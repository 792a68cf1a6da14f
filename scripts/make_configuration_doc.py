# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes docs/configuration.md from the docstrings in `torchtitan/grpo/config/`.

usage: python scripts/make_configuration_doc.py [--check]
With --check nothing is written; the exit status is 1 where the page is out of date.
"""

import ast
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "torchtitan/grpo/config"
TABLES = (
    "grpo", "prompts", "rollout", "inference", "weight_sync", "reward", "evaluation", "observe",
)  # fmt: skip
TARGET = REPOSITORY / "docs/configuration.md"

HEAD = """# Configuration

A run is configured by a TOML file, `--job.config_file X.toml`; every key can be overridden on the
command line as `--table.key value`. Command line over TOML over defaults. Besides the tables below
there are [torchtitan's own](https://github.com/pytorch/torchtitan): `[job]`, `[model]`,
`[training]`, `[optimizer]`, `[lr_scheduler]`, `[parallelism]`, `[checkpoint]`, `[metrics]`,
`[activation_checkpoint]`, `[compile]`, `[comm]`, `[profiling]`, `[debug]`.

`--dry-run` prints the resolved configuration and the planned layout and exits;
`torchtitan-grpo check-config X.toml` does the same without torchrun. A misspelt key names the
nearest valid one, and contradictions are refused before any process group exists.

`model.hf_assets_path` names a Hugging Face directory (config.json, tokenizer.json, safetensors);
the architecture and all sizes are read from it. Upstream's `[model]` name and flavor are not used.

This page is made by `python scripts/make_configuration_doc.py` from `torchtitan/grpo/config/`.
"""


def text_of(node: ast.stmt) -> str | None:
    """The docstring that stands as a statement of its own under a field."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        value = node.value.value
        return " ".join(value.split()) if isinstance(value, str) else None
    return None


def table_of(cls: ast.ClassDef) -> str:
    """One TOML table as a section."""
    docstring = ast.get_docstring(cls) or ""
    lines = [f"## {docstring.splitlines()[0].replace('``', '`')}", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field, below in zip(cls.body, [*cls.body[1:], ast.Pass()], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        meaning = (text_of(below) or "").replace("``", "`").replace("|", "\\|")
        default = ast.unparse(field.value) if field.value is not None else ""
        default = default.replace("field(default_factory=list)", "[]")
        default = default.replace("field(default_factory=dict)", "{}")
        kind = ast.unparse(field.annotation).replace("|", "\\|")
        lines.append(f"| `{ast.unparse(field.target)}` | `{kind}` | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    trees = [ast.parse((SOURCE / f"{name}.py").read_text()) for name in TABLES]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return "\n".join([HEAD, *map(table_of, classes)])


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(TARGET.read_text() != page())
    TARGET.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
