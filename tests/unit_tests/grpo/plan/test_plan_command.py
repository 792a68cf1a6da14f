# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo plan``: what it prints and what it refuses."""

import json
import re
import subprocess

import pytest
from light import LIGHT

from torchtitan.grpo import cli
from torchtitan.grpo.plan.hardware import DEVICES, cache_places, computed_costs
from torchtitan.grpo.plan.search import Plan, Split, best_split, simulate
from torchtitan.grpo.system.light_start import LIGHT_PYTHON

QWEN3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936,
}  # fmt: skip


def shown(capsys, *words: str) -> str:
    assert cli.run(["plan", *words]) == 0
    return capsys.readouterr().out


def test_the_quickstart_is_planned(repository, monkeypatch, capsys) -> None:
    monkeypatch.chdir(repository)
    out = shown(capsys, "train_configs/quickstart.toml", "--seeds", "2", "--devices", "16")
    titles = [
        "Costs, calculated",
        "The run, with 1 training rank and 1 server",
        "What to change first",
    ]
    places = [out.index(title) for title in (*titles, "The best split of 16", "Memory, on H100")]
    assert places == sorted(places)
    (parts,) = re.findall(r"training devices  (.*)", out)
    shares = [int(word) for word in parts.split() if word.isdecimal()]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert "rollout.max_head_offpolicyness = 2" in out and "inference.lend = true" in out
    assert "which fit" in out and "NOT" not in out


def test_lent_servers_are_planned_on_the_devices_of_training(
    repository, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(repository)
    out = shown(capsys, "train_configs/quickstart.toml", "--seeds", "2", "--inference.lend=true")
    assert "with 1 training rank and 1 server on lent devices" in out
    assert "0 % waiting for rollouts" in out and "lent servers      100 % of the tokens" in out
    assert "each sleeping server is assumed to keep 2.00 GiB" in out


def test_servers_of_rows_are_planned_as_lent_or_not(repository, monkeypatch, capsys) -> None:
    monkeypatch.chdir(repository)
    rows = ["--cluster.both.tags=train,rollout", "--cluster.other.tags=rollout"]
    out = shown(capsys, "train_configs/quickstart.toml", "--seeds", "2", *rows)
    assert "with 1 training rank and 2 servers, 1 of them on lent devices" in out
    assert "servers that are never lent = 2" in out


def test_memory_that_does_not_suffice_is_told(repository, monkeypatch, capsys) -> None:
    monkeypatch.chdir(repository)
    much = ["--training.local_batch_size", "4000", "--training.seq_len", "8000"]
    out = shown(capsys, "train_configs/quickstart.toml", "--seeds", "2", *much)
    (line,) = [line for line in out.splitlines() if "a training rank:" in line]
    assert "do NOT fit. Lower training.local_batch_size." in line


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["no.toml"], "--job.config_file must name a file that exists"),
        (["train_configs/quickstart.toml", "--from", "nowhere"], "metrics of at least 5 steps"),
        (["train_configs/quickstart.toml", "--rollout.replay=x"], "simulates rollouts"),
        (["train_configs/quickstart_tensor_parallel.toml", "--devices", "2"], "at least 3"),
        (["train_configs/quickstart.toml", "--grpo.group_sise=4"], "group_sise"),
    ],
)
def test_mistakes_have_a_message(repository, monkeypatch, capsys, words, error) -> None:
    monkeypatch.chdir(repository)
    assert cli.run(["plan", *words, "--seeds=2"]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--devices=1", "--devices=10001", "--seeds=1", "--mean-length=2"])
def test_options_have_bounds(capsys, word) -> None:
    with pytest.raises(SystemExit):
        cli.run(["plan", "train_configs/quickstart.toml", word])
    assert f"argument {word.partition('=')[0]}: must be" in capsys.readouterr().err


def test_the_simulation_needs_no_torch() -> None:
    code = (
        f"{LIGHT}import sys, torchtitan.grpo.command_line as c\n"
        "with c.without_torch(): import torchtitan.grpo.plan.command\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [LIGHT_PYTHON[0], "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "False"


def test_decoding_is_as_fast_as_memory_allows() -> None:
    """Qwen3-8B has 16 GB of weights and 144 KiB of KV cache for each token."""
    from torchtitan.grpo.job_config import JobConfig

    costs = computed_costs(
        JobConfig(), QWEN3_8B, DEVICES["h100"],
        num_ranks=8, num_servers=8, server_devices=1, context_tokens=1000,
    )  # fmt: skip
    assert costs.token == pytest.approx(0.003 + 15.1e9 / (0.6 * 3.35e12), rel=0.02)
    cache = 147456 * 1000 / (0.6 * 3.35e12)
    assert costs.beside == pytest.approx(cache + 15.1e9 / (0.5 * 989e12), rel=0.02)
    assert costs.train_token == pytest.approx(6 * 7.6e9 / (8 * 0.35 * 989e12), rel=0.05)
    assert cache_places(QWEN3_8B, 70e9, 1000) == pytest.approx(55e9 / 147e6, rel=0.02)
    assert cache_places(QWEN3_8B, 10e9, 1000) == 0


@pytest.mark.parametrize("num_devices", [4, 9, 14])
def test_the_best_of_few_splits_is_found(changed, num_devices: int) -> None:
    plan = Plan(changed(train_token=2e-3, num_servers=1), Split(1, 1))
    split, rate = best_split(plan, num_devices)
    assert split.num_ranks + split.num_servers == num_devices
    rates = [
        simulate(plan.on(Split(n, num_devices - n)), 0, 8).samples_per_second
        for n in range(1, num_devices)
    ]
    assert rate == pytest.approx(max(rates), rel=0.03)


def test_a_measured_run_gives_its_costs(tmp_path, repository, monkeypatch, capsys) -> None:
    monkeypatch.chdir(repository)
    start = tmp_path / "starts" / "1"
    start.mkdir(parents=True)
    text = (repository / "train_configs" / "quickstart.toml").read_text()
    (start / "config.toml").write_text(text)
    (start / "environment.json").write_text('{"num_ranks": 1}')
    records = [record_of(step) for step in range(1, 21)]
    lines = [json.dumps(record, allow_nan=False) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 21, "da']))
    out = shown(capsys, "train_configs/quickstart.toml", "--seeds=2", "--from", str(tmp_path))
    assert "Costs, measured in 16 steps" in out
    assert "a server: 2 ms for a token, and 0.1 ms for each running completion; 5 ms for a" in out
    training = re.search(
        r"training: (\S+) us for a token, and (\S+) s for a step; a push takes 0.06 s", out
    )
    assert training is not None
    assert [float(text) for text in training.groups()] == pytest.approx([100, 0.2], rel=0.03)
    assert "14 tokens of a prompt and 6 of a completion" in out
    assert "Memory" not in out, "the device of the run is not known"


def record_of(step: int) -> dict[str, float]:
    """A step of 128 samples of 20 tokens, and of some tokens more or fewer."""
    tokens = 128 * 20 * (1 + 0.3 * (-1) ** step)
    train = 0.2 + 1e-4 * tokens
    return {
        "step": step,
        "time/step_seconds": train + 0.1,
        "time/wait_data_seconds": 0.1,
        "time/tokens_per_second": tokens / (train + 0.1),
        "rollout/completion_tokens_mean": 6.0,
        "rollout/completion_tokens_max": 9.0,
        "weight_sync/gather_seconds": 0.02,
        "weight_sync/push_seconds": 0.04,
        "servers/127.0.0.1:1/request_seconds": 0.005,
        "servers/127.0.0.1:1/token_seconds": 0.002,
        "servers/127.0.0.1:1/beside_seconds": 0.0001,
    }
