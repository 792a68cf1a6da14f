# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Each configuration of refused.txt is refused with its message, in one line."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.grpo.config_checks import ConfigError


def _rows() -> Iterator[tuple[str, list[str]]]:
    common = ""
    for line in Path(__file__).with_name("refused.txt").read_text().splitlines():
        if line.startswith("["):
            common = line.partition("]")[2].strip()
        elif line and not line.startswith("#"):
            arguments, _, message = line.partition("  =>  ")
            yield f"{common} {arguments}".strip(), message.split(" ... ")


ROWS = list(_rows())


@pytest.mark.parametrize(("arguments", "parts"), ROWS, ids=[arguments for arguments, _ in ROWS])
def test_it_is_refused_with_its_message(load, arguments, parts):
    with pytest.raises(ConfigError) as refused:
        load(arguments)
    message = str(refused.value)
    assert re.search(".*".join(map(re.escape, parts)), message), message
    assert "\n" not in message
