# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The shell scripts, started as a user starts them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from listening import check_sockets, run_watched
from server_kinds import held_port
from transformers import AutoConfig, AutoModelForCausalLM

from torchtitan.grpo.inference.kinds import ServerSpec

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 200, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "eos_token_id": 1, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "tie_word_embeddings": True,
        "rope_parameters": ROPE | {"rope_type": "yarn", "factor": 2.0},
    },
    "llama": {"tie_word_embeddings": True, "rope_parameters": ROPE | LLAMA3},
    "mistral": {"tie_word_embeddings": False, "head_dim": 32, "sliding_window": None},
}


def make_family(family: str, folder: Path, tokenizer: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # transformers begins with zeros
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def _cases() -> list:
    cases = []
    for server in ("embedded", "vllm", "sglang"):
        for family in ("shipped", *FAMILIES):
            marks = [] if server == "embedded" else [getattr(pytest.mark, server)]
            cases.append(pytest.param(server, family, marks=marks, id=f"{server}-{family}"))
    return cases


# In the short suite this script verifies adapters in vLLM (`test_lora.py`), and other tests load a Qwen3
# into every kind of server.
@pytest.mark.long
@pytest.mark.parametrize(("server", "family"), _cases())
def test_after_ten_pushes_a_server_serves_what_the_trainer_has(
    server, family, repository, tmp_path
):
    model = repository / "assets/reverse_digits/model"
    if family != "shipped":
        model = make_family(family, tmp_path / family, model)
    script = str(repository / "scripts/verify_grpo_cpu.sh")
    result, found = run_watched(["bash", script, "--server", server, "--model", str(model)])
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert result.stdout.count("\nok ") == 6
    assert f"verified: {server} serves the trainer's weights" in result.stdout
    check_sockets(found)
    log = repository / f"outputs/verify-cpu-{server}-{model.name}/server.log"
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.long
def test_verification_fails_where_the_server_has_other_weights(make_run, repository, fork_server):
    run = make_run("--training.steps=2", "--grpo.prompts_per_step=2", "--optimizer.lr=3e-3")
    run.succeed()
    model = str(repository / "assets/reverse_digits/model")
    spec = ServerSpec("embedded", model, held_port(), "cpu", "float32", 256, 8)
    server = fork_server.start_server(spec, run.folder / "other.log")
    try:
        command = [
            *(sys.executable, "-m", "torchtitan.grpo.commands.verify", "--kind", "embedded"),
            *("--url", server.url, "--run", str(run.folder), "--synchronous", "--wait", "60"),
            *("--prompts", str(repository / "assets/reverse_digits/heldout.jsonl")),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    finally:
        server.stop()
    assert result.returncode == 1, result.stderr[-3000:]
    assert "FAIL  completions carry the last version" in result.stdout
    assert "FAIL  logprobs equal transformers'" in result.stdout


def test_the_quickstart_learns(repository, tmp_path):
    """Checks that the README's run learns, with the script itself.

    How much it has learned at the end depends on the order in which rollouts come, and thereby on the
    load of the machine. The bound on held-out prompts leaves room for that.
    """
    folder = tmp_path / "quickstart"
    script = str(repository / "scripts/quickstart.sh")
    result, found = run_watched(["bash", script, f"--job.dump_folder={folder}"])
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    check_sockets(found)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["reward_last10"] >= 0.8
    assert summary["reward_last10"] >= summary["reward_first10"] + 0.25
    assert summary["heldout_before"] <= 0.7
    assert summary["heldout_after"] >= summary["heldout_before"] + 0.2
    assert summary["policy_version"] == summary["server_version"] == summary["steps"]
    assert summary["max_staleness_steps"] <= 1
