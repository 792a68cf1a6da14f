# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The producer at work, for the tests of this folder."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from producer_world import Settings, World, run_in_world


@pytest.fixture
def run_world(repository: Path, tmp_path: Path):
    """Runs a test's body while a producer is at work on the given prompts.

    Further arguments are those of ``producer_world.Settings``.
    """

    def run(
        body: Callable[[World], Awaitable[None]], *, prompts: list[str], **settings: Any
    ) -> None:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": p, "answer": "7"}) + "\n" for p in prompts))
        model = repository / "assets/reverse_digits/model"
        asyncio.run(run_in_world(body, file, model, Settings(**settings)))

    return run
