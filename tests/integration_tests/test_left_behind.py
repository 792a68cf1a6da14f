# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What stays of a run whose processes are killed with SIGKILL: nothing, or what the next start removes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lone_trainer import wait_until
from server_kinds import python_of

from torchtitan.grpo.system.private_folders import sees_all_processes

# Between the kill and the end of the last process. A run of its own needs some seconds.
LONGEST_SECONDS = 90.0
SMALL = (
    "--grpo.prompts_per_step=2", "--evaluation.interval=0", "--evaluation.num_prompts=2", "--training.steps=1000",
    "--inference.max_restarts=0", "--rollout.max_process_restarts=0", "--inference.startup_timeout_seconds=480",
)  # fmt: skip
# Shared memory of all processes of a run goes to a folder that the test sees, and no other program uses.
OWN_SHARED_MEMORY = 'mount --bind "$1" /dev/shm && shift && exec "$@"'
NEXT_START = (
    "from torchtitan.grpo.system.private_folders import make_private_folder as make;"
    "make('next').rmdir()"
)
# A word in the command line of each process of a run, and for a rank its number. Each victim is killed in a run of its own.
VICTIMS = {
    "launcher": ("torchtitan_grpo.main()",),
    "rank 0": ("torchtitan.grpo_train", "0"),
    "rank 1": ("torchtitan.grpo_train", "1"),
    "rollout process": ("torchtitan.grpo.rollout.process",),
    "reward worker": ("torchtitan.grpo.rewards.scoring_worker",),
    "embedded server": ("torchtitan.grpo.inference.embedded",),
    "vllm server": ("vllm.entrypoints.openai.api_server",),
    "sglang server": ("sglang/server_main.py",),
}
# Processes that a server has started, in the order of their start.
WORKERS = {"vllm engine": 0, "sglang scheduler": 0, "sglang detokenizer": 1}
COMMON = ("launcher", "rank 0", "rank 1", "rollout process", "reward worker")


def _waits_for_a_writer(process: psutil.Process) -> bool:
    with contextlib.suppress(OSError):
        return "partner" in Path(f"/proc/{process.pid}/wchan").read_text()
    return False


def test_a_rank_that_hangs_in_opening_a_file_ends_with_torchrun(tmp_path: Path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "hanging.py").write_text(f"open({str(fifo)!r})")
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "torchtitan_grpo"]
    command += ["--nproc_per_node=1", "-m", "torchtitan.grpo_train"]
    command += ["--model.hf_assets_path=m", "--prompts.path=p", "--inference.launch"]
    command += ["--reward.functions=exact_match", "--grpo.policy_loss=hanging:loss"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    agent = psutil.Popen(command, env=environment, stderr=subprocess.PIPE)
    ranks: list[psutil.Process] = []
    try:
        wait_until(
            lambda: agent.children() or agent.poll() is not None, "torchrun must start its rank"
        )
        ranks = agent.children()
        assert ranks, agent.stderr.read()
        wait_until(lambda: _waits_for_a_writer(ranks[0]), "the rank must open the file")
        agent.kill()
        assert psutil.wait_procs(ranks, timeout=30)[1] == [], "the rank must end with torchrun"
    finally:
        for process in (agent, *ranks):
            with contextlib.suppress(psutil.Error):
                process.kill()
        agent.wait(30)
        agent.stderr.close()


@pytest.fixture
def temporary() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="left-"))
    yield folder
    shutil.rmtree(folder)


def _apart(shared: Path) -> tuple[str, ...]:
    return ("unshare", "--mount", "bash", "-c", OWN_SHARED_MEMORY, "bash", str(shared))


def _start(run, shared: Path, temporary: Path, kind: str) -> None:
    if subprocess.run([*_apart(shared), "true"], capture_output=True).returncode:
        pytest.skip("NOT TESTED: what kill -9 leaves, because /dev/shm may not be mounted here")
    arguments = [*SMALL, "--nproc", "2", f"--job.dump_folder={run.folder}"]
    if kind != "embedded":
        arguments += [f"--inference.kind={kind}", f"--inference.python={python_of(kind)}"]
    run.train(*arguments, before=_apart(shared), TMPDIR=str(temporary))


def _victim(run, name: str) -> psutil.Process:
    if name in WORKERS:
        server = _victim(run, f"{name.partition(' ')[0]} server")
        started = [p for p in server.children() if "resource_tracker" not in " ".join(p.cmdline())]
        return sorted(started, key=lambda process: process.create_time())[WORKERS[name]]
    word, *variables = VICTIMS[name]
    found = [
        process
        for process in run.processes(word)
        if all(process.environ().get("RANK") == rank for rank in variables)
    ]
    assert found, [p.cmdline()[:4] for p in run.left_behind()]
    return found[0]


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def _next_start(shared: Path, temporary: Path, repository: Path) -> None:
    command = [*_apart(shared), sys.executable, "-c", NEXT_START]
    environ = os.environ | {"TMPDIR": str(temporary)}
    subprocess.run(command, check=True, env=environ, cwd=repository)


def _cases() -> list:
    cases = []
    for kind in ("embedded", "vllm", "sglang"):
        own = [name for name in (*VICTIMS, *WORKERS) if name.startswith(kind)]
        both = f"{kind} server and rollout process"  # neither is left to end its workers
        for name in (*own, *COMMON, both):
            marks = [] if (kind, name) == ("embedded", "launcher") else [pytest.mark.long]
            if kind != "embedded":
                marks.append(getattr(pytest.mark, kind))
            cases.append(pytest.param(kind, name, marks=marks, id=f"{kind}-{name}"))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", _cases())
def test_nothing_stays_of_a_run_of_which_a_process_was_killed(
    make_run, tmp_path, temporary, repository, kind, name
):
    run, shared = make_run(name="run"), tmp_path / "shm"
    shared.mkdir()
    _start(run, shared, temporary, kind)
    run.wait_for_step(1)
    victims = [_victim(run, one) for one in name.split(" and ")]
    for victim in victims:
        victim.kill()
    if name == "reward worker":  # another one takes its place, and the run goes on
        run.wait_for_step(len(run.metrics) + 2)
        run.process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    assert run.finish(LONGEST_SECONDS) != 0
    run.wait_until_processes_end(LONGEST_SECONDS - (time.monotonic() - begin))
    print(f"no process is left after {time.monotonic() - begin:.1f} s")
    print("left at first:", _files(temporary), _files(shared))
    _next_start(shared, temporary, repository)
    left = _files(shared)
    if not sees_all_processes():
        # In a container they are left, since another container's process might hold them.
        left = [name for name in left if not name.startswith("sem.mp-")]
    assert left == [], "shared memory must be gone"
    assert list(temporary.iterdir()) == [], "temporary files must be gone"
