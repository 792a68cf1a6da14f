# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``--json``: one JSON object on standard output, all else on standard error, and the same exit status."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_kinds import held_port

from torchtitan.grpo.commands.json_result import problems
from torchtitan.grpo.inference.kinds import ServerSpec
from torchtitan.grpo.system import strict_json

QUICKSTART = "train_configs/quickstart.toml"
MODEL = "assets/reverse_digits/model"


def result_of(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """The exit status of a command, its object, and what it wrote to standard error."""
    command = [sys.executable, "-c", "import torchtitan_grpo; torchtitan_grpo.main()", *arguments]
    ran = subprocess.run(
        [*command, "--json"], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert ran.stdout.count("\n") == 1, ran.stdout[-2000:] + ran.stderr[-2000:]
    found = strict_json.loads(ran.stdout)
    assert (found["command"], found["ok"]) == (arguments[0], ran.returncode == 0)
    assert bool(found.get("error")) is not found["ok"] and "Traceback" not in ran.stderr
    return ran.returncode, found, ran.stderr


def test_check_config_tells_what_differs_the_layout_and_the_memory(repository, tmp_path) -> None:
    short = [
        "--training.seq_len=24",
        "--rollout.max_new_tokens=18",
        f"--job.dump_folder={tmp_path}",
    ]
    status, found, text = result_of(repository, "check-config", QUICKSTART, "--nproc=2", *short)
    assert (status, found["problems"]) == (0, [])
    assert found["settings"]["training.seq_len"] == {"value": 24, "default": 2048}
    assert "grpo.group_size" not in found["settings"]
    assert found["layout"] == {
        "ranks": 2, "stages": 1, "replicas": 1, "shards": 2, "context_parts": 1, "tensor_parts": 1,
    }  # fmt: skip
    (warning,) = [warning for warning in found["warnings"] if warning.startswith("prompts.path")]
    assert "at most 6 tokens" in warning and f"\nwarning: {warning}\n" in text
    assert found["inputs"][0].startswith("model: Qwen3") and "  ranks: 2 = 2 shards\n" in text
    step = found["memory"]["step"]
    assert 0 < step["parameters_bytes"] < step["needed_bytes"] < step["available_bytes"]
    assert step["fits"] is True and found["memory"]["push"]["version_bytes"] > 0


def test_check_config_names_each_problem_with_its_settings(repository) -> None:
    words = ["--grpo.groupsize=3", "--rollout.foo=1"]
    status, found, text = result_of(repository, "check-config", QUICKSTART, *words)
    assert status == 2 and text == f"error: {found['error']}\n"
    assert [problem["keys"] for problem in found["problems"]] == [
        ["grpo.groupsize", "grpo.group_size"],
        ["rollout.foo"],
    ]
    assert "\n".join(problem["text"] for problem in found["problems"]) == found["error"]


def test_a_problem_keeps_its_output_and_names_no_files() -> None:
    text = "reward.functions failed in grpo.py. Its output ends with:\n  model.safetensors"
    first, second = problems(f"{text}\nenvironments.a.prompts.path needs reward.functions")
    assert first == {"keys": ["reward.functions"], "text": text}
    assert second["keys"] == ["environments.a.prompts.path", "reward.functions"]
    assert problems("--grpo.group_size must be 2, in x/prompts.path") == [
        {"keys": ["grpo.group_size"], "text": "--grpo.group_size must be 2, in x/prompts.path"}
    ]
    assert problems("") == []


def test_a_plan_has_the_figures_of_its_text(repository) -> None:
    _, found, text = result_of(repository, "plan", QUICKSTART, "--seeds=2", "--devices=4")
    run, best = found["run"], found["best_split"]
    assert f"samples a second  {run['samples_per_second']:.4g} +- " in text
    parts = ("trained", "waited", "pushed", "lent")
    assert sum(run[f"{part}_fraction"] for part in parts) == pytest.approx(1, abs=0.02)
    assert f": {best['samples_per_second']:.4g} samples a second" in text
    assert best["devices"] == 4 and best["num_ranks"] + best["num_servers"] <= 4
    gains = [change["gain_fraction"] for change in found["changes"]]
    assert gains == sorted(gains, reverse=True)
    assert found["recommended"] == found["changes"][0]
    assert found["recommended"]["settings"] == {"rollout.max_head_offpolicyness": 2}
    assert f"Recommended: {found['recommended']['text']} ({100 * gains[0]:+.0f} %" in text
    assert found["costs"]["train_seconds"] == 0.1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--seeds=1", "argument --seeds: must be a whole number from 2 to 1000, got '1'"),
        ("--grpo.group_size=0", "grpo.group_size must be at least 1, got 0"),
    ],
)
def test_a_plan_that_is_refused_says_why(repository, word: str, said: str) -> None:
    status, found, text = result_of(repository, "plan", QUICKSTART, word)
    assert status == 2 and found["error"].startswith(said) and said in text


@pytest.mark.long  # the checks themselves have other tests
def test_verify_has_each_check(repository, tmp_path, fork_server) -> None:
    model = str(repository / MODEL)
    spec = ServerSpec("embedded", model, held_port(), "cpu", "float32", 256, 8)
    server = fork_server.start_server(spec, tmp_path / "server.log")
    words = [
        *("verify", "--kind=embedded", f"--url={server.url}", "--synchronous", "--num-prompts=2"),
        *(f"--prompts={repository / 'assets/reverse_digits/heldout.jsonl'}", f"--run={tmp_path}"),
    ]
    # A server has version -1 until a run pushes weights.
    summary = dict.fromkeys(("steps", "policy_version", "server_version"), -1)
    summary |= {"weight_sync_failures": 0, "hf_checkpoint": model}
    (tmp_path / "metrics.jsonl").write_text("")
    try:
        for failures in (0, 1):
            summary["weight_sync_failures"] = failures
            (tmp_path / "summary.json").write_text(json.dumps(summary))
            status, found, text = result_of(tmp_path, *words)
            checks = found["checks"]
            assert status == failures and len(checks) == 5
            assert [c["check"] for c in checks if not c["ok"]] == ["no push failed"] * failures
            for check in checks:
                assert f"  {check['check']}: {check['detail']}\n" in text
            assert checks[-1]["seconds"] > 0
    finally:
        server.stop()
    assert found["error"] == "1 of 5 checks failed: no push failed"


def test_an_evaluation_that_is_refused_says_why(repository) -> None:
    status, found, _ = result_of(repository, "evaluate", QUICKSTART, "--evaluation.path=none")
    assert status == 2 and "got nothing to evaluate" in found["error"]
    assert found["problems"][0]["keys"] == ["evaluation.path", "evaluation.sets"]
