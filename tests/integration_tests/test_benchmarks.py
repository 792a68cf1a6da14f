# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Benchmarks that check promises, in a short form, and what they find where a promise is broken."""

import asyncio
import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from server_kinds import REAL

from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.inference.local_servers import LaunchedServer
from torchtitan.grpo.types import GenerateRequest, PromptProgress, RolloutGroup

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SOAK_SECONDS = float(os.environ.get("TORCHTITAN_GRPO_SOAK_SECONDS", "3600"))

pytestmark = pytest.mark.slow


def run(name: str, *arguments: str, status: int | None = 0) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", *arguments]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    said = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout and status in (None, done.returncode), said
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"] == (done.returncode == 0), said
    return report["figures"]


@pytest.mark.parametrize("choice", ["--quick", pytest.param("--seed=0", marks=pytest.mark.long)])
def test_a_value_closes_the_exit_of_what_cannot_be_scored(choice: str) -> None:
    figures = run("unscored_exit", choice)
    for case in ("often", "rarely"):
        assert figures[f"{case}/value_0/share"] < 0.02
        assert figures[f"{case}/left_out/share"] > 0.05
        assert figures[f"{case}/left_out/warnings"] > 0 == figures[f"{case}/value_0/warnings"]


def long(*values: Any, seconds: int = 5400) -> Any:
    return pytest.param(*values, marks=[pytest.mark.long, pytest.mark.timeout(seconds)])


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    def module(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(FOLDER))
        return importlib.import_module(name)

    return module


def test_the_time_of_a_run_is_accounted_for_and_a_planted_wait_is_named() -> None:
    figures = run("who_waits", "--only", "asynchronous", "checkpoints", "rewards")
    for name in ("asynchronous", "checkpoints"):
        assert abs(figures[name]["gap"]) < 0.01 > figures[name]["server_gap"]
    assert figures["rewards"]["named"] == "rewards"
    assert figures["rewards"]["share_changed"] < figures["rewards"]["share"]


@pytest.mark.parametrize(("choice", "num_layouts"), [("--quick", 6), long("--all", 215)])
def test_servers_hold_what_an_export_holds(choice: str, num_layouts: int) -> None:
    figures = run("push_exactness", choice)
    assert len(figures) == num_layouts
    for row in figures.values():
        assert row["pushes"] == 4
        if choice == "--quick":
            assert row["sources"] == [0, 1, 2, 3]
            assert sum(row["source_bytes"]) > 0


@pytest.mark.long  # it tests what only benchmarks use
def test_a_stub_server_samples_without_computing(tmp_path: Path, load) -> None:
    async def lengths(server: LaunchedServer) -> list[int]:
        client = make_client(server.kind, server.url)
        try:
            requests = [GenerateRequest(str(i), [5, 6, 7], 40) for i in range(8)]
            answers = await asyncio.gather(*map(client.generate, requests))
        finally:
            await client.close()
        return [len(answer.token_ids) for answer in answers]

    model, _ = load("random_models").make_model(tmp_path, "0.1M")
    times = {"decode_seconds": 0.0, "mean_tokens": 8.0}
    limits = {"max_model_len": 64, "max_running_requests": 2}
    with load("stub_servers").running_stubs(1, model, tmp_path, **times, **limits) as (server,):
        found = asyncio.run(lengths(server))
    assert 1 <= min(found) < 40, "the model itself would hardly end"


@pytest.mark.parametrize("choice", [long("--quick"), long("--all", seconds=9000)])
def test_layouts_give_the_same_numbers(choice: str) -> None:
    assert "llama3/FSDP2 x2, PP x2, ZBVZeroBubble/gradients" in run("layout_parity", choice)


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_layouts_give_the_same_numbers_with_a_real_model(smollm2: Path) -> None:
    figures = run("layout_parity", "--model", str(smollm2))
    assert {"real/TP x3, critic/gradients", "real/PP x2, ZBVZeroBubble/gradients"} <= figures.keys()


@pytest.mark.parametrize("publishes", [150, long(2000)])
def test_no_mixture_is_served_while_servers_are_killed_and_stopped(publishes: int) -> None:
    result = run("torn_free", "--publishes", str(publishes))
    assert result["found"] == [] and result["publishes"] >= publishes, result
    assert min(result["kills"], result["stops"], result["superseded"], result["losses"]) > 0
    assert min(result["pushes"], result["parameter_checks"], result["completions_checked"]) > 10


@pytest.mark.long
@pytest.mark.parametrize("inject", ["fence", "slot"])
def test_a_torn_write_is_found(inject: str) -> None:
    result = run("torn_free", "--publishes", "100", "--inject", inject, status=1)
    assert result["slot_or_bucket_errors"] > 0
    assert result["mixtures"] > 0, "and it is seen from outside, too"


@pytest.mark.parametrize(("kills", "further"), [(3, ["--no-comparison"]), long(50, [])])
def test_no_prompt_is_lost_or_trained_twice_across_kills(kills: int, further: list[str]) -> None:
    # The exit status says also whether completions are as long as without kills, by a test that
    # is wrong in one of a hundred runs.
    figures = run("exactly_once", "--kills", str(kills), *further, status=None)
    assert figures["violations"] == figures.get("unkilled/violations", 0) == 0
    assert figures["issued"] == figures["trained"] + figures["closed"] + figures["open"]
    assert figures["kills/rollout process"] and figures["kills/server"]


@pytest.mark.parametrize(
    ("change", "violations"),
    [
        ({}, 0),
        ({"trained": [2, 0]}, 3),  # one is lost, one there twice, and the record disagrees
        ({"closed": {"1": "failed"}}, 1),
        ({"open": []}, 1),
        ({"step": 3}, 1),
        ({"position": 4}, 1),
    ],
)
def test_a_ledger_that_is_wrong_is_found(tmp_path: Path, load, change, violations: int) -> None:
    ledger = [
        {"step": 1, "trained": [0, 1], "closed": {}, "position": 3, "open": [2]},
        {"step": 2, "trained": [2, 3], "closed": {}, "position": 5, "open": [4]} | change,
    ]
    text = "".join(json.dumps(line) + "\n" for line in ledger)
    (tmp_path / "ledger.jsonl").write_text(text)
    recorder = RolloutRecorder(str(tmp_path / "rollouts.jsonl"), 64, 1.0, 0)
    for version, ids in enumerate(([0, 1], [2, 3])):
        groups = [RolloutGroup(i, "", (), "http://host:1") for i in ids]
        recorder.write(version, PromptProgress(), groups)
    recorder.close()
    assert load("exactly_once").check_ledger(tmp_path)["violations"] == violations


@pytest.mark.long
@pytest.mark.timeout(int(SOAK_SECONDS) + 1800)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=getattr(pytest.mark, k)) for k in REAL])
def test_nothing_grows_and_nothing_is_lost_in_a_long_run_among_faults(kind: str) -> None:
    figures = run("soak", "--kind", kind, "--seconds", str(SOAK_SECONDS))
    assert figures["faults/ranks killed"] == 2
    assert figures["faults/servers killed"] and figures["faults/servers stopped"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"mib": 1.5}, None),
        ({"mib": 2.5}, "memory of a server grew by 2.6 %"),
        ({"fds": 1}, "of a server changed by +1 and +0"),
        ({"threads": 2}, "of a server changed by +0 and +2"),
        ({"mib": -30.0, "fds": -3}, None),
    ],
)
def test_what_grows_in_a_long_run_is_found(load, change: dict[str, float], problem: str | None):
    soak = load("soak")
    made = soak.Soak(None, 100.0, random.Random(0), None)
    made.measured_from = 50.0
    shapes = {"rank": {}, "rank 2": {}, "rollout process": {}, "server": change}
    for pid, (name, grows) in enumerate(shapes.items()):
        life = made.lives[pid, 0.0]
        life.name = name.removesuffix(" 2")
        for index in range(50):
            # Noise comes and goes: what counts is the value to which a number falls back.
            noise = (100.0 + (index % 5) / 10, 40 + index % 3, 20 + index % 2)
            growth = (grows.get(name, 0) * (index >= 25) for name in ("mib", "fds", "threads"))
            values = (n + g for n, g in zip(noise, growth, strict=True))
            life.samples.append((50.0 + index, *values))
    problems = soak.judge(made, 100.0)[1]
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]
