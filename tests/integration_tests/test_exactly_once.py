# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""`benchmarks/exactly_once.py` with few kills, and its findings in ledgers that are wrong."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/exactly_once.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "further"),
    [
        (3, ["--no-comparison"]),
        pytest.param(50, [], marks=[pytest.mark.long, pytest.mark.timeout(5400)]),
    ],
)
def test_no_prompt_is_lost_or_trained_twice_across_kills(kills: int, further: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", str(kills), "--json", *further],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr[-6000:]
    result = json.loads(done.stdout.splitlines()[-1])
    # The exit status says also whether completions are as long as without kills, by a test that
    # is wrong in one of a hundred runs.
    figures = result["figures"]
    assert figures["violations"] == figures.get("unkilled/violations", 0) == 0
    assert figures["issued"] == figures["trained"] + figures["closed"] + figures["open"]
    assert figures["kills/rollout process"] and figures["kills/server"]


DEADLY_REWARD = """
import os, signal

def reward(prompts, completions, **columns):
    file = os.open({calls!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b".")
    if os.fstat(file).st_size == {deadly}:
        os.kill(os.getppid(), signal.SIGKILL)
    os.close(file)
    return [float(sum(map(ord, completion)) % 7) for completion in completions]
"""


def test_a_rollout_process_that_is_killed_between_two_parts_of_a_batch(make_run, tmp_path) -> None:
    """Gradients that the trainer accumulated before the kill do not enter the step twice."""
    # One call tries the function, four groups make a batch: this is the third of batch 2.
    text = DEADLY_REWARD.format(calls=str(tmp_path / "calls"), deadly=1 + 2 * 4 + 3)
    (tmp_path / "mine.py").write_text(text)
    settings = (
        "--training.steps=4", "--grpo.prompts_per_step=4", "--grpo.group_size=4",
        "--evaluation.num_prompts=8", f"--reward.functions={tmp_path / 'mine.py'}:reward",
    )  # fmt: skip
    run = make_run(
        *settings, "--rollout.stream", "--rollout.stream_parts=4", "--reward.num_workers=1",
        "--rollout.max_head_offpolicyness=0", "--rollout.max_concurrent_rollouts=4",
        f"--rollout.record={tmp_path / 'run/rollouts.jsonl'}",
    ).succeed()  # fmt: skip
    assert "restarted, from batch 2 on" in run.console
    assert _benchmark().check_ledger(run.folder)["violations"] == 0
    whole = make_run(
        *settings, f"--rollout.replay={tmp_path / 'run/rollouts.jsonl'}", name="whole"
    ).succeed()
    for mine, theirs in zip(whole.metrics, run.metrics, strict=True):
        # Far closer than a part that was counted twice would leave them.
        for name in ("loss/total", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


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
def test_a_ledger_that_is_wrong_is_found(tmp_path: Path, change, violations) -> None:
    ledger = [
        {"step": 1, "trained": [0, 1], "closed": {}, "position": 3, "open": [2]},
        {"step": 2, "trained": [2, 3], "closed": {}, "position": 5, "open": [4]} | change,
    ]
    record = [{}] + [{"groups": [{"group_id": i} for i in ids]} for ids in ([0, 1], [2, 3])]
    for name, lines in (("ledger", ledger), ("rollouts", record)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    assert _benchmark().check_ledger(tmp_path)["violations"] == violations


def _benchmark() -> ModuleType:
    sys.path.append(str(SCRIPT.parent))  # it imports others of its folder
    spec = importlib.util.spec_from_file_location("exactly_once", SCRIPT)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    return benchmark
