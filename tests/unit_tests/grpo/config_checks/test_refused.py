# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Each configuration of refused.txt is refused with its message, in one line."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.grpo.config_checks import ConfigError


def _rows() -> Iterator[tuple[str, str, list[str]]]:
    num_ranks = common = ""
    for line in Path(__file__).with_name("refused.txt").read_text().splitlines():
        if heading := re.match(r"\[[^]]*?(?:on (\d+) ranks)?\](.*)", line):
            num_ranks, common = heading[1] or "1", heading[2].strip()
        elif line and not line.startswith("#"):
            arguments, _, message = line.partition("  =>  ")
            yield num_ranks, f"{common} {arguments}".strip(), message.split(" ... ")


ROWS = list(_rows())


@pytest.mark.parametrize(("num_ranks", "arguments", "parts"), ROWS, ids=[row[1] for row in ROWS])
def test_it_is_refused_with_its_message(load, monkeypatch, num_ranks, arguments, parts):
    monkeypatch.setenv("WORLD_SIZE", num_ranks)
    monkeypatch.setenv("TORCHTITAN_GRPO_ADMIN_KEY", "x")
    with pytest.raises(ConfigError) as refused:
        load(arguments)
    message = str(refused.value)
    assert re.search(".*".join(map(re.escape, parts)), message), message
    assert "\n" not in message
