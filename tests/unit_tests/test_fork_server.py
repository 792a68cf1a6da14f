# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The processes that tests fork behave as if they had been started by an exec or by torchrun."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from forked import ForkedProcess, ForkServer

PATIENCE = 300.0


@pytest.fixture
def start(fork_server: ForkServer, tmp_path: Path) -> Callable[..., ForkedProcess]:
    """Starts a program with its output in ``out`` and ``err``."""

    def run(program: str, *arguments: str, num_ranks: int = 0) -> ForkedProcess:
        script = tmp_path / "program.py"
        script.write_text("import os, signal, sys, threading, time\n" + program)
        with (tmp_path / "out").open("w") as output, (tmp_path / "err").open("w") as errors:
            return fork_server.start(
                script,
                arguments,
                num_ranks=num_ranks,
                environment={"WORD": "said", "HOME": str(tmp_path)},
                folder=tmp_path,
                output=output,
                errors=errors,
            )

    return run


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_program_has_its_own_arguments_environment_folder_and_session(start, tmp_path):
    process = start(
        "print(sys.argv[1:], os.environ['WORD'], 'PATH' in os.environ, os.getcwd(), __name__)\n"
        "print(os.getsid(0) == os.getpid(), threading.active_count(), file=sys.stderr)\n"
        "sys.exit(7)\n",
        "one",
        "two",
    )
    assert process.wait(PATIENCE) == process.poll() == 7
    assert (tmp_path / "out").read_text() == f"['one', 'two'] said False {tmp_path} __main__\n"
    assert (tmp_path / "err").read_text() == "True 1\n"


def test_an_error_is_shown_and_a_signal_is_a_negative_status(start, tmp_path):
    assert start("raise KeyError('a mistake')").wait(PATIENCE) == 1
    assert "KeyError: 'a mistake'" in (tmp_path / "err").read_text()
    process = start("print('up', flush=True); time.sleep(600)")
    while "up" not in (tmp_path / "out").read_text():
        time.sleep(0.01)
    assert process.poll() is None
    process.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL


GATHER = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
line = f"rank {os.environ['RANK']} of {os.environ['LOCAL_WORLD_SIZE']}: {total.item()}\\n"
os.write(1, line.encode())  # at once: print may write the end of the line by itself
dist.destroy_process_group()
os._exit(0)
"""


def test_ranks_find_each_other(start, tmp_path):
    assert start(GATHER, num_ranks=3).wait(PATIENCE) == 0
    lines = sorted((tmp_path / "out").read_text().splitlines())
    assert lines == [f"rank {rank} of 3: 6" for rank in range(3)]


def test_a_rank_that_fails_ends_the_others(start, tmp_path):
    program = "sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
    assert start(program, num_ranks=2).wait(PATIENCE) == 1
    assert "rank 1 (pid " in (tmp_path / "err").read_text()


def test_a_signal_reaches_all_ranks_and_is_in_the_exit_status(start, tmp_path):
    process = start("os.write(1, f'{os.getpid()}\\n'.encode()); time.sleep(600)", num_ranks=2)
    while len(pids := (tmp_path / "out").read_text().split()) < 2:
        time.sleep(0.01)
    assert {os.getsid(int(pid)) for pid in pids} == {process.pid}
    process.terminate()
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert not any(is_alive(int(pid)) for pid in pids)


def test_the_end_of_the_server_is_the_end_of_its_processes(tmp_path):
    server = ForkServer()
    script = tmp_path / "program.py"
    script.write_text("import time; time.sleep(600)")
    pid = server.start(script).pid
    assert is_alive(pid)
    server.close()
    deadline = time.monotonic() + PATIENCE
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
