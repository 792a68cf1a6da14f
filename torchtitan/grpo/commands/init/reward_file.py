# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes the file of a reward that the user has to write."""

import json
from pathlib import Path

from torchtitan.grpo.commands.init.columns import Columns, Source
from torchtitan.grpo.system.files import write_whole

REWARD_FILE = "reward.py"

_TEXT = '''\
"""The reward of @TOML@, to be written: docs/how-to/rewards.md leads through it."""


def reward(prompts, completions, **columns):
    """Returns one number for each completion, the higher the better; None where it cannot judge one.

    The lists have one entry for each completion. `columns` has those of the data: @COLUMNS@.
    Completions of one prompt are compared, so they must not all earn the same.
    """
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    # return [float(right in text) for right, text in zip(columns[@EXAMPLE@], texts)]
    raise NotImplementedError("Write the function `reward` in @FILE@; it must return numbers.")
'''


def write_reward(toml: Path, source: Source, columns: Columns) -> bool:
    """Writes the file beside ``toml``, unless there is one; returns whether it is yet to be filled in."""
    file = toml.with_name(REWARD_FILE)
    others = [name for name in source.columns if name != columns.prompt]
    text = _TEXT.replace("@TOML@", str(toml)).replace("@FILE@", str(file))
    text = text.replace("@EXAMPLE@", json.dumps(others[0] if others else "answer", allow_nan=False))
    content = text.replace("@COLUMNS@", ", ".join(others) or "there are none").encode()
    if file.exists():
        return file.read_bytes() == content
    write_whole(file, content)
    return True
