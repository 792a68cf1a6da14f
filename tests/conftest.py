"""Fixtures that several test modules share."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# An example takes as long as the machine lets it: bounds of time belong to benchmarks.
settings.register_profile("grpo", deadline=None)
settings.load_profile("grpo")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root."""
    return REPOSITORY


@pytest.fixture
def rank_environment() -> dict[str, str]:
    """Environment of processes that a test starts: one thread each, nothing from a hub."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def run_ranks(rank_environment: dict[str, str], tmp_path: Path) -> Callable[..., list[dict]]:
    """Runs `tests/programs/<name>.py` under torchrun; returns what each rank wrote.

    A program is called as ``main(arguments: dict) -> dict`` on every rank.
    """

    def run(name: str, num_ranks: int, **arguments) -> list[dict]:
        output = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        output.mkdir()
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", str(num_ranks), str(REPOSITORY / "tests/programs/run.py")),
            *(name, str(output), json.dumps(arguments)),
        ]
        result = subprocess.run(
            command, env=rank_environment, capture_output=True, text=True, timeout=600
        )
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]
        return [json.loads((output / f"{rank}.json").read_text()) for rank in range(num_ranks)]

    return run
