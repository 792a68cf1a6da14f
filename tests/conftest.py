"""Fixtures that several test modules share."""

# ruff: noqa: E402  (the programs' folder must be importable first)

import asyncio
import inspect
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "tests" / "programs"))

import forked
from forked import ForkServer

# Each rank would start a process that imports torch to compile with it, and compile headers first
# that few kernels use.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
# An example takes as long as the machine lets it: bounds of time belong to benchmarks.
# The same examples in every run; `pytest --hypothesis-profile search` looks for others.
settings.register_profile("grpo", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("grpo")


def pytest_configure(config: pytest.Config) -> None:
    """Begins the fork server that all workers of pytest-xdist, and benchmarks that tests run, share."""
    if config.getoption("numprocesses", None) and forked.SHARED not in os.environ:
        server = ForkServer()
        server.begin()
        os.environ[forked.SHARED] = str(server.folder)
        config.add_cleanup(server.close)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs an ``async`` test in an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**arguments), 300))
    return True


@pytest.fixture(autouse=True)
def _logs_are_read() -> Iterator[None]:
    """The next test has the logs that a command of the last one turned off in this process."""
    level = logging.root.level
    yield
    logging.disable(logging.NOTSET)
    logging.root.setLevel(level)


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns a function of a name and ``make``, which returns a folder of this name.

    The first worker of pytest-xdist that asks for the folder calls ``make(folder)`` to fill it.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def find(name: str, make: Callable[[Path], object]) -> Path:
        folder = base / name
        with FileLock(f"{folder}.lock", timeout=600):
            if not (folder / "made").exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                (folder / "made").touch()
        return folder

    return find


@pytest.fixture(scope="session")
def smollm2(made_once: Callable[..., Path]) -> Path:
    """Directory of SmolLM2-135M-Instruct in float32, in a folder of the checkout that later runs find again."""

    def get(_: Path) -> None:
        command = ["bash", REPOSITORY / "scripts/get_smollm2.sh"]
        # With a GPU, the script would replace an environment for CPUs while its tests run.
        environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr

    made_once("smollm2", get)
    return REPOSITORY / "assets/smollm2/model"


@pytest.fixture
def rank_environment() -> dict[str, str]:
    """Environment of processes that a test starts: one thread each, nothing from a hub."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Starts ranks, programs and embedded servers that need not import torch first."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def run_ranks(
    rank_environment: dict[str, str], fork_server: ForkServer, tmp_path: Path
) -> Callable[..., list[dict]]:
    """Runs `tests/programs/<name>.py` on several ranks; returns what each rank wrote.

    A program is called as ``main(arguments: dict) -> dict`` on every rank.
    """

    def run(name: str, num_ranks: int, **arguments) -> list[dict]:
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        console = folder / "console.log"
        with console.open("w") as output:
            process = fork_server.start(
                REPOSITORY / "tests/programs/run.py",
                [name, str(folder), json.dumps(arguments)],
                num_ranks=num_ranks,
                environment=rank_environment,
                output=output,
            )
        assert process.wait(600) == 0, console.read_text()[-8000:]
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]

    return run
