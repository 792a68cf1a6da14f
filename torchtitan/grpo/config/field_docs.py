# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The docstring that stands under each field of a table, as text.

Python does not keep these strings, so they are read from the source of the class.
"""

import ast
import contextlib
import inspect
import textwrap


def field_docs(table: type) -> dict[str, str]:
    """Returns the docstring of each field that has one, as a single line.

    A class whose source cannot be read adds none of its own: torchtitan makes such a class when it merges
    ``job.custom_config_module`` into a table, and the base classes of that class hold the docstrings.
    """
    docs: dict[str, str] = {}
    for cls in reversed(table.__mro__):
        with contextlib.suppress(OSError, TypeError):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
            assert isinstance(tree, ast.ClassDef)
            docs |= _docs_in(tree)
    return docs


def _docs_in(tree: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[ast.unparse(field.target)] = " ".join(value.value.split())
    return docs


def first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".") + "."
