# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from producer_world import Settings, World, at_work


@pytest.fixture
def world_of(repository: Path, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[World]]:
    """Opens a world whose producer is at work; takes ``Settings`` by name.

    ``reward`` and ``acceptor`` are names of functions in ``code``.
    """

    def open_(
        prompts: Iterable[Any] = "123456789", *, max_staleness: int, code: str = "", **settings: Any
    ) -> AbstractAsyncContextManager[World]:
        (file := tmp_path / "prompts.jsonl").write_text(
            "".join(json.dumps({"prompt": p, "answer": "7"}) + "\n" for p in prompts)
        )
        (mine := tmp_path / "mine.py").write_text(code)
        for key in {"reward", "acceptor"} & settings.keys():
            settings[key] = f"{mine}:{settings[key]}"
        model = repository / "assets/reverse_digits/model"
        return at_work(file, model, Settings(max_staleness, **settings))

    return open_
