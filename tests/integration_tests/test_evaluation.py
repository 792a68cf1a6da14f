# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Evaluations beside training in a whole run, and the same evaluations without one."""

import json
import subprocess
import sys

import pytest
import torch
from metric_page import undescribed
from safetensors.torch import load_file
from server_kinds import LONG, python_of

from torchtitan.grpo.commands import cli
from torchtitan.grpo.inference.access import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE

HELDOUT = "assets/reverse_digits/heldout.jsonl"
SETS = (
    f"--evaluation.sets.greedy.path={HELDOUT}",
    f"--evaluation.sets.sampled.path={HELDOUT}",
    *("--evaluation.sets.sampled.num_samples=4", "--evaluation.sets.sampled.temperature=1"),
    *("--evaluation.sets.sampled.pass_at=[1,4]", "--evaluation.num_prompts=8"),
    "--evaluation.path=none",
)
STEPS = 8
# Beside step 1, it waits until the run has taken step 4, which a run that waited for it never does.
WAITING = """
import time
from pathlib import Path

metrics = Path({folder!r}) / "metrics.jsonl"

def num_steps():
    return metrics.read_bytes().count(b"\\n") if metrics.exists() else 0

def scorer(completions, answer, **kwargs):
    until = time.monotonic() + 100
    while 0 < num_steps() < 4 and time.monotonic() < until:
        time.sleep(0.02)
    assert num_steps() == 0 or num_steps() >= 4
    return [float(c == a) for c, a in zip(completions, answer)]
"""


@pytest.fixture
def here(repository, monkeypatch):
    monkeypatch.chdir(repository)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for variable in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE):
        monkeypatch.setenv(variable, "key")


def test_no_step_waits_for_an_evaluation_which_one_server_keeps_its_weights_for(
    make_run, tmp_path, here
):
    run = make_run(
        *SETS, "--grpo.prompts_per_step=4", f"--training.steps={STEPS}", "--evaluation.interval=1",
        f"--evaluation.function={tmp_path / 'waiting.py'}:scorer", "--reward.timeout_seconds=120",
        *("--inference.num_servers=2", "--rollout.max_head_offpolicyness=2"),
        *("--checkpoint.enable", "--checkpoint.interval=4"),
    )  # fmt: skip
    (tmp_path / "waiting.py").write_text(WAITING.format(folder=str(run.folder)))
    run.succeed()
    first, *beside, last = run.records("evaluations.jsonl")
    assert (first["step"], last["step"]) == (0, STEPS)
    # Steps 2 and 3 were taken while the evaluation of step 1 was waiting for step 4.
    assert beside and beside[0]["evaluation/left_out"] >= 2
    for record in (first, *beside, last):
        assert record["evaluation/mixed_fraction"] == 0, "one server keeps the evaluated weights"
        assert record["evaluation/newest_version"] == record["step"]
        assert record["evaluation/sampled/num_completions"] == 32
        passed = [record[f"evaluation/sampled/pass_at_{k}"] for k in (1, 4)]
        assert passed[0] == pytest.approx(record["evaluation/sampled/score"])
        assert passed[0] <= passed[1]
    samples = run.records("evaluation_samples.jsonl")
    of_last = [sample for sample in samples if sample["step"] == STEPS]
    assert [len(s["completions"]) for s in of_last if s["set"] == "sampled"][:8] == [4] * 8
    # All servers have the last weights in the end, the one that was pinned as well.
    assert run.summary["server_version"] == STEPS

    found = evaluated(run, tmp_path, "--checkpoint", "newest")
    assert found["evaluation/greedy/score"] == last["evaluation/greedy/score"]
    exported = load_file(f"{run.summary['hf_checkpoint']}/model-00001-of-00001.safetensors")
    model = run.folder / f"evaluate/step-{STEPS}/model/model-00001-of-00001.safetensors"
    again = load_file(model)
    assert exported.keys() == again.keys()
    assert all(torch.equal(exported[name], again[name]) for name in exported)


def evaluated(run, tmp_path, *arguments: str) -> dict:
    output = tmp_path / "result.json"
    command = [
        *(
            sys.executable,
            "-c",
            "import torchtitan_grpo; torchtitan_grpo.main()",
            "evaluate",
            "--json",
        ),
        *("train_configs/quickstart.toml", *arguments, "--output", str(output), *SETS),
        *(f"--job.dump_folder={run.folder}", "--inference.device=cpu"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(output.read_text())
    assert undescribed(k for k in result if "/" in k) == []
    samples = run.folder / f"evaluate/step-{STEPS}/evaluation_samples.jsonl"
    told = {"ok": True, "command": "evaluate", "problems": []}
    told |= {"result_file": str(output), "samples_file": str(samples)}
    assert json.loads(ran.stdout) == result | told
    assert "pass@4" in ran.stderr and f"The result is in {output}" in ran.stderr
    return result


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", LONG)
def test_other_servers_give_the_figures_of_the_embedded_one(tmp_path, here, kind):
    servers = {"embedded": ["--inference.device=cpu"]}
    servers[kind] = [f"--inference.kind={kind}", f"--inference.python={python_of(kind)}"]
    found = {}
    for name, more in servers.items():
        output = tmp_path / f"{name}.json"
        command = ["evaluate", "train_configs/quickstart.toml", "--output", str(output), *SETS]
        command += [f"--job.dump_folder={tmp_path / name}", *more]
        assert cli.run([*command, "--inference.startup_timeout_seconds=900"]) == 0
        found[name] = json.loads(output.read_text())
    own, other = found["embedded"], found[kind]
    assert other["evaluation/greedy/score"] == own["evaluation/greedy/score"]
    assert other["evaluation/greedy/length_mean"] == own["evaluation/greedy/length_mean"]
    # Of 32 completions, whose probability of being right is about a half.
    assert abs(other["evaluation/sampled/score"] - own["evaluation/sampled/score"]) < 0.4
    assert other["evaluation/sampled/num_completions"] == 32


def test_what_cannot_be_evaluated_is_refused_at_once(here, capsys, tmp_path):
    command = ["evaluate", "train_configs/quickstart.toml", f"--job.dump_folder={tmp_path}"]
    for arguments, message in (
        (["--evaluation.path=none"], "evaluation.path must name held-out prompts"),
        (["--checkpoint", "12"], "holds whole checkpoints of the steps: none"),
        (["--model", "x", "--checkpoint", "12"], "name different weights"),
        (["--model", "no/such/folder"], "no/such/folder"),
        (
            ["--checkpoint=3", "--inference.no-launch", "--inference.urls=http://127.0.0.1:9"],
            "needs inference.launch = true",
        ),
    ):
        assert cli.run([*command, *arguments]) == 2
        assert message in capsys.readouterr().err
