"""Fixtures that start whole runs and find the processes that a run leaves behind."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from forked import ForkedProcess, ForkServer
from metric_page import undescribed
from processes import has_words
from server_kinds import REAL, held_port, python_of

from torchtitan.grpo import config as tables
from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.data.record import RecordReader
from torchtitan.grpo.inference.kinds import ServerSpec
from torchtitan.grpo.inference.local_servers import (
    HeldPorts,
    LaunchedServer,
    start_server,
)
from torchtitan.grpo.inference.waiting import wait_until_up
from torchtitan.grpo.rollout.link import RolloutLink
from torchtitan.grpo.types import PromptProgress, ServerKind

if TYPE_CHECKING:
    from bare_trainer import RunningServer

REPOSITORY = Path(__file__).resolve().parents[2]
# A name that the rollout process and the servers inherit (system/environment.py).
MARK = "TORCH_GRPO_TEST_MARK"
PROGRAM = "import torchtitan_grpo; torchtitan_grpo.main()"
# Against hanging alone: a busy machine is several times slower.
PATIENCE_SECONDS = 600.0
# Arguments of runs that launch no embedded server.
_OTHER_SERVERS = ("--inference.kind", "--inference.no-launch", "--inference.python")


# The slowest modules come first, so that no worker is left with one of them at the end.
_SLOWEST = (
    *("test_real_servers", "test_faults", "test_lora", "test_multinode", "test_scripts"),
    *("test_agents", "test_benchmarks", "test_transports", "test_recovery", "test_hostile"),
)
# Their tests share servers: one worker of pytest-xdist runs a whole module, or, where its tests run
# with each kind of server, all its tests with one kind.
_SHARING = ("test_real_servers", "test_faults", "test_transports", "test_handshake")
_KINDS = (*REAL, "embedded")
# Modules that share servers with another one.
_PLACED_WITH = dict.fromkeys(("test_server_access", "test_real_ratings"), "test_real_servers")


def _place(nodeid: str) -> tuple[str, int]:
    """Returns the module that a test goes with, and the position of its kind of server above."""
    file, _, name = nodeid.partition("::")
    parameters = name.partition("[")[2].rstrip("]").split("-")
    kind = next((i for i, kind in enumerate(_KINDS) if kind in parameters), len(_KINDS))
    return _PLACED_WITH.get(Path(file).stem, Path(file).stem), kind


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives tests that share servers to one worker; other tests are distributed one by one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByPlace(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            place = _place(nodeid)
            return str(place) if place[0] in _SHARING else nodeid

    return ByPlace(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> tuple[int, int]:
        module, kind = _place(item.nodeid)
        rank = _SLOWEST.index(module) if module in _SLOWEST else len(_SLOWEST)
        return rank, kind

    items.sort(key=order)


@dataclass(eq=False)
class Run:
    """A training run, and everything that descends from it.

    ``fork_server`` starts the ranks, and the embedded servers that the run launches. Signals that
    tests send to such a server reach what stands for it; see `forked.py`. With ``torchrun`` the
    ranks are started as a user starts them. ``program`` is what forked ranks run.
    """

    fork_server: ForkServer
    folder: Path
    config: str | Path = "quickstart"
    num_ranks: int = 2
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    torchrun: bool = False
    program: str | Path = "torchtitan.grpo_train"
    process: subprocess.Popen | ForkedProcess | None = None

    def start(self) -> None:
        config = self.config
        if not isinstance(config, Path):
            config = REPOSITORY / "train_configs" / f"{config}.toml"
        arguments = [
            *("--job.config_file", str(config)),
            *("--job.dump_folder", str(self.folder), *self.arguments),
            # By it the tests find what a run has left behind.
            f"--workers.pass_variables={MARK}",
        ]
        if self.torchrun:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc_per_node", str(self.num_ranks), "-m", "torchtitan.grpo_train"]
            self.start_command(*command, *arguments)
            return
        if not any(a.startswith(_OTHER_SERVERS) for a in arguments):
            arguments.append(f"--inference.python={self.fork_server.launcher()}")
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "console.log").open("wb") as console:
            self.process = self.fork_server.start(
                self.program, arguments, num_ranks=self.num_ranks,
                environment=self._variables, folder=REPOSITORY, output=console,
            )  # fmt: skip

    def train(self, *arguments: str, before: tuple[str, ...] = (), **options: Any) -> None:
        config = str(REPOSITORY / "train_configs/quickstart.toml")
        command = (*before, sys.executable, "-c", PROGRAM, "train", config, *arguments)
        self.start_command(*command, f"--workers.pass_variables={MARK}", **options)

    def start_command(self, *command: str, cwd: str | Path = REPOSITORY, **environ: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "console.log").open("ab") as console:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=self._variables | environ, start_new_session=True,
                stdout=console, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def _variables(self) -> dict[str, str]:
        fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        return os.environ | fixed | {MARK: self.mark} | self.environment

    def finish(self, timeout_seconds: float = PATIENCE_SECONDS) -> int:
        assert self.process is not None
        return self.process.wait(timeout_seconds)

    def succeed(self) -> "Run":
        self.start()
        assert self.finish() == 0, self.console[-6000:]
        self.check_metrics()
        return self

    def check_metrics(self) -> None:
        rewards = {n for s in self.records("samples.jsonl") for n in s["reward_components"]}
        keys = {k for r in (*self.metrics, *self.records("evaluations.jsonl")) for k in r}
        unknown = undescribed(sorted(keys), rewards)
        assert not unknown, f"describe in docs/metrics.md: {unknown}"

    def fates(self) -> Counter[str]:
        """Checks that each prompt was trained once, closed or is open; counts the closed by reason."""
        lines = self.records("ledger.jsonl")
        closed = {int(i): reason for line in lines for i, reason in line["closed"].items()}
        fates = [i for line in lines for i in (*line["trained"], *map(int, line["closed"]))]
        assert fates == [int(i) for line in lines for i in line["rows"]]
        assert all(row.rpartition(":")[2].isdecimal() for r in lines for row in r["rows"].values())
        assert sorted([*fates, *lines[-1]["open"]]) == list(range(lines[-1]["position"]))
        record = self.folder / "rollouts.jsonl"
        if record.exists():
            recorded = RecordReader(str(record), None, None, "rollout.record")
            groups = [[group.group_id for group in batch.groups] for _, batch in recorded]
            assert groups == [line["trained"] for line in lines]
        return Counter(closed.values())

    def rank(self, number: int) -> psutil.Process:
        ranks = [p for p in self.processes("torchtitan.grpo_train") if "RANK" in p.environ()]
        (found,) = [p for p in ranks if p.environ()["RANK"] == str(number)]
        return found

    def fail(self, timeout_seconds: float = PATIENCE_SECONDS) -> str:
        if self.process is None:
            self.start()
        assert self.finish(timeout_seconds) != 0, self.console[-6000:]
        messages = self.errors()
        # Ranks that find the same mistake may both say so, where one is far behind.
        assert len({message.strip() for message in messages}) == 1, self.console[-6000:]
        assert not self.has_traceback(), self.console[-6000:]
        self.wait_until_processes_end()
        return messages[0]

    def errors(self) -> list[str]:
        """Returns the error messages without torchrun's report of the failure behind them."""
        parts = re.split(r"^error: ", self.console, flags=re.MULTILINE)[1:]
        return [re.split(r"^[EW]\d{4} ", part, maxsplit=1, flags=re.MULTILINE)[0] for part in parts]

    def has_traceback(self) -> bool:
        frames = [line for line in self.console.splitlines() if line.startswith('  File "')]
        return any("torchtitan" in frame for frame in frames)

    @property
    def console(self) -> str:
        return (self.folder / "console.log").read_text(errors="replace")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.records("metrics.jsonl")

    def records(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def wait_for(
        self, holds: Callable[[], bool], timeout_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Returns as soon as ``holds`` returns true; fails if the run ends before."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_seconds
        while not holds():
            assert self.process.poll() is None, self.console[-6000:]
            assert time.monotonic() < deadline, self.console[-6000:]
            time.sleep(0.02)

    def wait_for_step(self, step: int, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        self.wait_for(lambda: len(self.metrics) >= step, timeout_seconds)

    def processes(self, *words: str) -> list[psutil.Process]:
        return [p for p in self.left_behind() if has_words(p, words)]

    def left_behind(self) -> list[psutil.Process]:
        """Returns the living processes that descend from this run.

        They are found by a mark in their environment; forked ones, of which /proc shows no
        environment of their own, by their session.
        """
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and (self._is_rank(process) or process.environ().get(MARK) == self.mark):
                    found.append(process)
        return found

    def _is_rank(self, process: psutil.Process) -> bool:
        return self.process is not None and os.getsid(process.pid) == self.process.pid

    def wait_until_processes_end(self, timeout_seconds: float = 30) -> None:
        deadline = time.monotonic() + timeout_seconds
        while left := self.left_behind():
            assert time.monotonic() < deadline, [p.cmdline() for p in left]
            time.sleep(0.1)

    def kill(self) -> None:
        for process in self.left_behind():
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture(
    scope="session",
    params=[
        "embedded",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def server_kind(request: pytest.FixtureRequest) -> tuple[ServerKind, str | None]:
    """Each kind of real server and the interpreter that runs it; ``None`` is this interpreter."""
    kind = request.param
    return kind, None if kind == "embedded" else python_of(kind)


@pytest.fixture(scope="session")
def server(
    server_kind: tuple[ServerKind, str | None], tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[RunningServer]":
    from bare_trainer import KEYS, RunningServer, make_model
    from tagged import save_model

    kind, python = server_kind
    folder = tmp_path_factory.mktemp(kind)
    save_model(folder / "model", make_model(seed=0))
    # Held, because a server takes long to load, and then must find its port free.
    with contextlib.closing(HeldPorts(1)) as held:
        model = str(folder / "model")
        spec = ServerSpec(kind, model, held.ports[0], "cpu", "float32", 1024, 16, python, **KEYS)
        launched = start_server(spec, folder / "server.log")
        running = RunningServer(kind, launched)

        async def wait() -> None:
            client = running.client()
            try:
                await wait_until_up([client], [launched], timeout_seconds=480)
            finally:
                await client.close()

        try:
            asyncio.run(wait())
            yield running
            assert launched.process.poll() is None, launched.describe_log()
        finally:
            launched.stop()


@pytest.fixture(scope="session")
def calculator_task(made_once: Callable[..., Path]) -> Path:
    """Folder of a model that half-knows the calculator and reversals, with ``train.jsonl`` and
    ``heldout.jsonl`` of the calculator."""

    def make(folder: Path) -> None:
        script = REPOSITORY / "scripts/make_calculator_task.py"
        reversals = REPOSITORY / "assets/reverse_digits/train.jsonl"
        command = [sys.executable, script, "--output", folder, "--reversals", reversals]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS)

    return made_once("calculator_task", make)


@pytest.fixture(scope="module")
def only_rank() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def make_run(tmp_path: Path, fork_server: ForkServer) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*arguments: str, name: str = "run", **kwargs: Any) -> Run:
        run = Run(fork_server, tmp_path / name, arguments=list(arguments), **kwargs)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.kill()


@pytest.fixture
def config(
    repository: Path, tmp_path: Path, monkeypatch, fork_server: ForkServer
) -> RolloutProcessConfig:
    """Settings with one launched embedded server and the shipped task: 3 groups of 4 per step."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    task = repository / "assets/reverse_digits"
    return RolloutProcessConfig(
        grpo=tables.GRPO(group_size=4, prompts_per_step=3),
        prompts=tables.Prompts(path=str(task / "train.jsonl")),
        rollout=tables.Rollout(
            max_head_offpolicyness=1, max_new_tokens=12, max_concurrent_rollouts=32
        ),
        inference=tables.Inference(
            launch=True,
            python=fork_server.launcher(),
            device="cpu",
            startup_timeout_seconds=240.0,
        ),
        reward=tables.Reward(functions=["partial_match"], timeout_seconds=10.0),
        evaluation=tables.Evaluation(path=str(task / "heldout.jsonl"), num_prompts=16),
        hf_assets_path=str(task / "model"),
        vocab_size=128,
        eos_token_ids=[1],
        seq_len=64,
        seed=0,
        dump_folder=str(tmp_path / "dump"),
        start_version=0,
        progress=PromptProgress(),
        gpus=[],
    )


@pytest.fixture
def open_link() -> Iterator[Callable[..., RolloutLink]]:
    links: list[RolloutLink] = []
    processes: list[psutil.Process] = []
    # Servers that tests of the whole session share.
    others = set(psutil.Process().children(recursive=True))

    def open_(config: RolloutProcessConfig, announce: Callable[[str], None] = print) -> RolloutLink:
        link = RolloutLink(config, announce)
        links.append(link)
        link.start()
        return link

    try:
        yield open_
    finally:
        processes = [p for p in psutil.Process().children(recursive=True) if p not in others]
        for link in links:
            started = time.monotonic()
            link.close()
            assert time.monotonic() - started < 30
        assert not psutil.wait_procs(processes, timeout=30)[1]


@pytest.fixture
def serve_version() -> Callable[[RolloutLink, str, int], None]:
    """Reports a version as served, as the weight push does at its end, without changing weights."""

    def serve(link: RolloutLink, url: str, version: int) -> None:
        body = json.dumps({"new_version": str(version), "abort_all_requests": False}).encode()
        request = urllib.request.Request(
            f"{url}/update_weight_version", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200
        link.notify_version(url, version)

    return serve


@pytest.fixture
def serve(repository, tmp_path, fork_server):
    servers: list[LaunchedServer] = []

    def start(port: int | None = None, max_model_len: int = 256) -> LaunchedServer:
        model = str(repository / "assets/reverse_digits/model")
        port = port or held_port()
        spec = ServerSpec("embedded", model, port, "cpu", "float32", max_model_len, 64)
        log = tmp_path / f"server-{len(servers)}.log"
        servers.append(fork_server.start_server(spec, log))
        return servers[-1]

    yield start
    for server in servers:
        os.killpg(server.process.pid, signal.SIGCONT) if server.process.poll() is None else None
        server.stop()
