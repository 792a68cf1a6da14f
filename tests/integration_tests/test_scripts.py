"""The shell scripts, started as a user starts them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "programs"))

from listening import check_sockets, run_watched

from torchtitan.grpo.inference.local_servers import free_ports
from torchtitan.grpo.inference.server_spec import ServerSpec


@pytest.mark.parametrize(
    "server",
    [
        "embedded",
        # In the short suite test_families.py runs the script with these, on other models.
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.long]),
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.long]),
    ],
)
def test_what_a_server_serves_is_what_the_trainer_has(server, repository, tmp_path):
    script = repository / "scripts/verify_grpo_cpu.sh"
    result, found = run_watched(["bash", str(script), "--server", server])
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert result.stdout.count("\nok ") == 6
    assert f"verified: {server} serves the trainer's weights" in result.stdout
    check_sockets(found)
    log = repository / f"outputs/verify-cpu-{server}-model/server.log"
    assert log.stat().st_mode & 0o777 == 0o600


def test_verification_fails_where_the_server_has_other_weights(make_run, repository, fork_server):
    """The server has the original weights, because the run's own server has ended."""
    run = make_run("--training.steps=2", "--grpo.prompts_per_step=2", "--optimizer.lr=3e-3")
    run.succeed()
    model = str(repository / "assets/reverse_digits/model")
    (port,) = free_ports(1)
    spec = ServerSpec("embedded", model, port, "cpu", "float32", 256, 8)
    server = fork_server.start_server(spec, run.folder / "other.log")
    try:
        command = [
            *(sys.executable, "-m", "torchtitan.grpo.verify", "--kind", "embedded"),
            *("--url", server.url, "--run", str(run.folder), "--synchronous", "--wait", "60"),
            *("--prompts", str(repository / "assets/reverse_digits/heldout.jsonl")),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    finally:
        server.stop()
    assert result.returncode == 1, result.stderr[-3000:]
    assert "FAIL  completions carry the last version" in result.stdout
    assert "FAIL  logprobs equal transformers'" in result.stdout


@pytest.mark.slow
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
