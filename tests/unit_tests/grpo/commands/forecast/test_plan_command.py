# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo plan``: what it prints and what it refuses."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from light import LIGHT

from torchtitan.grpo.commands import cli
from torchtitan.grpo.commands.forecast.changes import Change, moved, recommended
from torchtitan.grpo.commands.forecast.hardware import (
    DEVICES,
    ROOM_SECONDS,
    cache_places,
    computed_costs,
)
from torchtitan.grpo.commands.forecast.measured import read_run
from torchtitan.grpo.commands.forecast.search import (
    Plan,
    Split,
    best_split,
    simulate,
    smallest_split,
)
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.rollout.serving.server_state import SPEED_METRICS
from torchtitan.grpo.system.light_start import LIGHT_PYTHON

QWEN3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936,
}  # fmt: skip


QUICKSTART = ["train_configs/quickstart.toml"]
EXTERNAL = ["--inference.launch=false", "--inference.urls=http://127.0.0.1:1"]
LENDING = ["inference.lend = true", 'cluster.lent.tags = ["train", "rollout"]']
LEND = ["--inference.lend=true"]
SCORING = 9.2
FIXED = "--parallelism.data_parallel_shard_degree=1"


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
    places = [out.index(title) for title in (*titles, "The best split of 16")]
    assert places == sorted(places)
    (parts,) = re.findall(r"training devices  (.*)", out)
    shares = [int(word) for word in parts.split() if word.isdecimal()]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert "rollout.max_head_offpolicyness = 2" in out and "inference.lend = true" in out
    assert "the cache of a server: " in out


def test_lent_servers_are_planned_on_the_devices_of_training(
    repository, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(repository)
    out = shown(capsys, "train_configs/quickstart.toml", "--seeds", "2", "--inference.lend=true")
    assert "with 1 training rank and 1 server on lent devices" in out
    assert "0 % waiting for rollouts" in out and "lent servers      100 % of the tokens" in out


def test_servers_of_rows_are_planned_as_lent_or_not(repository, monkeypatch, capsys) -> None:
    monkeypatch.chdir(repository)
    rows = ["--cluster.both.tags=train,rollout", "--cluster.other.tags=rollout"]
    out = shown(capsys, "train_configs/quickstart.toml", "--seeds", "2", *rows)
    assert "with 1 training rank and 2 servers, 1 of them on lent devices" in out
    assert "cluster.other.num_servers = 2, rollout.max_concurrent_rollouts = 192  (needs" in out
    assert "with other tables in [cluster], rollout.max_concurrent_rollouts = 64: as many" in out


@pytest.mark.parametrize(
    ("words", "offered", "refused"),
    [
        ([], ["inference.num_servers = 2, rollout", "inference.lend = true"], ["one more"]),
        (EXTERNAL, ["one more server, rollout.max_concurrent_rollouts = 256  ("], LENDING),
        (["--rollout.stream=true"], ["inference.num_servers"], [*LENDING, "stream"]),
        (["--grpo.async_weight_update=false"], ["rollout.stream = true"], LENDING),
        (["--grpo.num_epochs=2"], LENDING, ["stream"]),
        (["--rollout.stream_parts=40"], LENDING, ["stream"]),
        (LEND, ["rollout.max_concurrent_rollouts"], ["stream", "num_servers", "cluster"]),
        (["--cluster.a.tags=rollout"], ["cluster.a.num_servers = 2", LENDING[1]], ["inference"]),
        ([f"--cluster.{name}.tags=rollout" for name in "ab"], LENDING[1:], ["needs more"]),
        (["--inference.max_batched_tokens=200"], ["stream"], ["  rollout.max_concurrent"]),
    ],
)
def test_changes_that_the_run_would_refuse_are_not_offered(
    repository, monkeypatch, capsys, words, offered, refused
) -> None:
    monkeypatch.chdir(repository)
    out = shown(capsys, *QUICKSTART, "--seeds=2", *words)
    out = out[out.index("What to change") : out.index("The best split")]
    assert [name for name in offered if name not in out] == []
    assert [name for name in refused if name in out] == []


@pytest.mark.parametrize("words", [[], EXTERNAL, ["--cluster.a.tags=rollout"]])
def test_the_named_settings_are_all_that_is_simulated(
    repository, monkeypatch, capsys, words
) -> None:
    """Planning with them gives what was told to gain."""
    monkeypatch.chdir(repository)
    words = [*QUICKSTART, "--seeds=2", "--rollout.max_new_tokens=200", *words]

    def rate(*settings: str) -> tuple[float, str]:
        out = shown(capsys, *words, *settings)
        (text,) = re.findall(r"samples a second +(\S+) ", out)
        return float(text), out[out.index("What to change") : out.index("The best split")]

    before, out = rate()
    changes = re.findall(r"^ +(\S+) % \+- \S+  (.*?)(?:  \(.*)?$", out, re.MULTILINE)
    assert len(changes) >= 3
    for gain, name in changes:
        if "one more server" in name:
            continue
        pairs = re.findall(r"([\w.]+) = (\[.*?\]|[^,]+)", name.replace("--nproc ", "nproc = "))
        lists = str.maketrans("", "", '[]" ')
        settings = [f"--{key}={value.translate(lists)}" for key, value in pairs]
        assert rate(*settings)[0] / before - 1 == pytest.approx(float(gain) / 100, abs=2e-3), name


@pytest.mark.parametrize(
    ("rows", "best"), [([(1.4, 0.2), (1.1, 0.01)], 1.1), ([(1.02, 0.01)], None), ([], None)]
)
def test_a_change_is_recommended_if_it_surely_gains(rows, best) -> None:
    row = recommended([(Change({}, Split(1, 1)), *row) for row in rows])
    assert (row and row[1]) == best


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["no.toml"], "--job.config_file must name a file that exists"),
        (["train_configs/quickstart.toml", "--from", "nowhere"], "must name the folder of a run"),
        (["train_configs/quickstart.toml", "--rollout.replay=x"], "simulates rollouts"),
        (["train_configs/quickstart_tensor_parallel.toml", "--devices", "2"], "at least 3"),
        (["train_configs/quickstart.toml", "--grpo.group_sise=4"], "group_sise"),
        (
            ["train_configs/quickstart.toml", "--cluster.a.num_servers=0"],
            "must be at least 1, got 0",
        ),
        (["train_configs/quickstart.toml", "--rollout.max_new_tokens=256"], "leave room"),
        (["train_configs/quickstart.toml", *LEND, "--rollout.stream=true"], "cannot be combined"),
        (["train_configs/quickstart.toml", "--cluster.a.tags=train"], "cluster.a.tags must be"),
        (["train_configs/quickstart_tensor_parallel.toml", "--nproc=3"], "a multiple of 2"),
        (["train_configs/quickstart.toml", FIXED, "--nproc=2"], "must be 1 for the degrees"),
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
        f"{LIGHT}import sys, torchtitan.grpo.config.command_line as c\n"
        "with c.without_torch(): import torchtitan.grpo.commands.forecast.command\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [LIGHT_PYTHON[0], "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "False"


def test_decoding_is_as_fast_as_memory_allows() -> None:
    """Qwen3-8B has 16 GB of weights and 144 KiB of KV cache for each token."""
    costs = computed_costs(
        JobConfig(), QWEN3_8B, DEVICES["h100"],
        num_ranks=8, server_devices=1, context_tokens=1000,
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


@pytest.mark.parametrize("num_devices", [8, 64])
def test_devices_that_bring_nothing_are_not_named(
    repository, monkeypatch, capsys, changed, num_devices: int
) -> None:
    """Training takes most of the time, and a batch has one row."""
    system = changed(train_token=0.1, num_servers=1)
    plan = Plan(system, Split(1, 1), row_tokens=1_000_000)
    split, rate = smallest_split(plan, num_devices)
    assert split == Split(1, 1)
    assert rate >= 0.99 * best_split(plan, num_devices)[1]
    generating = Plan(changed(train_token=1e-6, num_servers=1), Split(1, 1))
    assert smallest_split(generating, 4)[0] == Split(1, 3), "each server is needed"
    monkeypatch.chdir(repository)
    words = ["--seeds=2", f"--devices={num_devices}", "--grpo.prompts_per_step=1"]
    out = shown(capsys, "train_configs/quickstart.toml", *words)
    assert f"{num_devices} devices are no more than 1 % faster than " in out
    assert "samples is too small for more (raise grpo.prompts_per_step)" in out


@pytest.fixture
def run_of(tmp_path, repository) -> Callable[..., Path]:
    """Writes the folder of a run with these metrics, of which the last line is incomplete."""

    def write(
        records: list[dict[str, float]],
        *,
        num_ranks: int = 1,
        first_step: int = 1,
        is_async: bool = True,
        devices: Sequence[str] = ("H100",),
    ) -> Path:
        start = tmp_path / "starts" / "1"
        start.mkdir(parents=True)
        text = (repository / "train_configs" / "quickstart.toml").read_text()
        asks = "async_weight_update = "
        text = text.replace(f"{asks}true", f"{asks}{json.dumps(is_async)}")
        (start / "config.toml").write_text(text)
        known = {"num_ranks": num_ranks, "first_step": first_step, "devices": devices}
        (start / "environment.json").write_text(json.dumps(known, allow_nan=False))
        lines = [json.dumps(record, allow_nan=False) for record in records]
        (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 21, "da']))
        return tmp_path

    return write


def test_a_measured_run_gives_its_costs(run_of, repository, monkeypatch, capsys) -> None:
    monkeypatch.chdir(repository)
    run = run_of([record_of(step) for step in range(1, 21)])
    out = shown(capsys, "train_configs/quickstart.toml", "--seeds=2", "--from", str(run))
    assert "Costs, measured in 16 steps" in out
    assert "a server with N completions: 2 + 0.1 N ms for a token of each, and 5 ms for a" in out
    training = re.search(
        r"training: (\S+) us for a token, and (\S+) s for a step; a push takes 0.06 s", out
    )
    assert training is not None
    assert [float(text) for text in training.groups()] == pytest.approx([100, 0.2], rel=0.03)
    assert "14 tokens of a prompt and 6 of a completion" in out
    assert "1 s to make room (assumed), 3.06 s to wake servers (assumed)" in out
    assert "does not tell" not in out
    assert "cache" not in out, "the device of the run is not known"


def own_figures(out: str) -> tuple[float, float]:
    """The rate that the run had, and that of its simulation."""
    figures = r"^  (\S+) samples a second, and (\S+) when it is simulated$"
    (found,) = re.findall(figures, out, re.MULTILINE)
    return float(found[0]), float(found[1])


@pytest.mark.parametrize("stalls", [pytest.param(0.0, marks=pytest.mark.long), 0.2, 2.0])
def test_what_the_run_had_is_told_first_and_is_the_least_error(
    run_of, repository, monkeypatch, capsys, stalls: float
) -> None:
    """Nothing in the simulation explains the stalls."""
    records = [record_of(step) for step in range(1, 21)]
    for record in records:
        tokens = record["time/tokens_per_second"] * record["time/step_seconds"]
        record["time/step_seconds"] += stalls
        record["time/wait_data_seconds"] += stalls
        record["time/tokens_per_second"] = tokens / record["time/step_seconds"]
    seconds = np.mean([record["time/step_seconds"] for record in records[4:]])
    monkeypatch.chdir(repository)
    words = ["--seeds=2", "--from", str(run_of(records))]
    out = shown(capsys, *QUICKSTART, *words)
    assert out.startswith("What ") and "with 1 training rank and 1 server\n" in out[:300]
    assert f"{100 * (0.1 + stalls) / seconds:.0f} % of the time waiting for rollouts" in out[:400]
    had, simulated = own_figures(out)
    assert had == pytest.approx(128 / seconds, rel=0.01)
    off = 100 * abs(had / simulated - 1)
    (told,) = set(re.findall(r"the (\S+) % between the run and its own simulation", out))
    assert float(told) == pytest.approx(off, abs=0.3)
    figures = re.findall(r"^  samples a second  (\S+) \+- (\S+)$", out, re.MULTILINE)
    ((mean, error),) = [(float(a), float(b)) for a, b in figures]
    assert mean == simulated
    assert error >= 0.9 * abs(had - mean), "what the run had is within the bounds"
    errors = [float(text) for text in re.findall(r"^ +\S+ % \+- (\S+)  ", out, re.MULTILINE)]
    assert len(errors) >= 3 and min(errors) >= 0.9 * off
    assert off > 20 or not stalls
    assert ("do not trust its advice" in out) == (off > 25)
    other = own_figures(shown(capsys, *QUICKSTART, *words, "--grpo.prompts_per_step=64"))
    assert other == (had, simulated), "it is not that of other settings"


@pytest.mark.parametrize(
    ("rewards", "episodes", "scoring", "is_told"),
    [
        (0.96, 0.0, SCORING, False),
        (0.96, 0.0, 0.0, True),
        (0.0, 0.9, 0.01, True),
        (0.4, 0.5, 0.0, True),
    ],
)
def test_a_run_that_waited_for_rewards_is_simulated_with_them(
    run_of, repository, monkeypatch, capsys, rewards, episodes, scoring, is_told
) -> None:
    """The rewards of a group come 9.2 s later, or the simulation knows nothing of what took the time."""
    records = [record_of(step) for step in range(1, 21)]
    for record in records:
        record |= {"time/step_seconds": 4.8, "time/wait_data_seconds": 4.5}
        record["time/tokens_per_second"] = 2560 / 4.8
        record |= {
            "rollout/wait_rewards_fraction": rewards,
            "rollout/wait_episodes_fraction": episodes,
            "rollout/scoring_seconds": scoring,
        }
    monkeypatch.chdir(repository)
    run = run_of(records)
    out = shown(capsys, *QUICKSTART, "--seeds=2", "--from", str(run))
    had, simulated = own_figures(out)
    assert ("do not trust its advice" in out) is is_told
    assert (f"(rewards {100 * rewards:.0f} %, episodes {100 * episodes:.0f} % of" in out) is is_told
    if not is_told:
        assert simulated == pytest.approx(had, rel=0.1)
        quick = shown(capsys, *QUICKSTART, "--seeds=2", "--from", str(run), "--reward-seconds=0")
        assert "do not trust its advice" in quick, "the given time takes the place of the measured"


def test_a_change_within_the_error_is_not_recommended(
    run_of, repository, monkeypatch, capsys
) -> None:
    records = [record_of(step) for step in range(1, 21)]
    for record in records:
        record["time/step_seconds"] *= 3
        record["time/tokens_per_second"] /= 3
    monkeypatch.chdir(repository)
    out = shown(capsys, *QUICKSTART, "--seeds=2", "--from", str(run_of(records)))
    gains = re.findall(r"^ +(\S+) % \+- (\S+)  ", out, re.MULTILINE)
    sure = [float(gain) for gain, error in gains if float(gain) - 2 * float(error) > 1]
    assert ("Recommended" in out) == bool(sure)


def test_the_ranks_of_the_run_are_the_default(run_of, repository, monkeypatch, capsys) -> None:
    monkeypatch.chdir(repository)
    words = ["--seeds=2", "--from", str(run_of([record_of(n) for n in range(1, 21)], num_ranks=8))]
    assert "The run, with 8 training ranks and 1 server" in shown(capsys, *QUICKSTART, *words)
    assert "with 2 training ranks" in shown(capsys, *QUICKSTART, *words, "--nproc=2")
    assert "with 1 training rank " in shown(capsys, *QUICKSTART, *words, FIXED)


def test_costs_of_another_model_are_told(run_of, repository, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(repository)
    words = ["--seeds=2", "--from", str(run_of([record_of(n) for n in range(1, 21)]))]
    same = repository / "assets/reverse_digits/model"
    other = shutil.copytree(same, tmp_path / "other")
    for path, is_told in ((same, False), (other, True)):
        out = shown(capsys, *QUICKSTART, *words, f"--model.hf_assets_path={path}")
        assert ("these are costs of model.hf_assets_path" in out) is is_told


def test_a_layout_that_fixes_the_ranks_is_changed_with_them() -> None:
    config, plan = JobConfig(), Plan(None, Split(1, 1))
    assert moved(plan, config, Split(2, 1)).words == ["--nproc=2"]
    config.parallelism.data_parallel_shard_degree = 1
    words = ["--nproc=2", "--parallelism.data_parallel_shard_degree=-1"]
    assert moved(plan, config, Split(2, 1)).words == words


@pytest.mark.parametrize("value", ["1.0", [1.0], {"x": 1}])
def test_a_step_that_was_changed_is_told_and_left_out(run_of, caplog, value) -> None:
    records: list[dict] = [record_of(step) for step in range(1, 21)]
    records[9]["time/step_seconds"] = value
    assert read_run(run_of(records)).num_steps == 16  # of 19, without those of the warm-up
    assert "metrics.jsonl:10 is damaged" in caplog.text


def test_only_the_last_start_counts(run_of) -> None:
    records = [record_of(step) | {"time/wait_data_seconds": 0.0} for step in range(1, 11)]
    measured = read_run(run_of([*records, *map(record_of, range(11, 21))], first_step=11))
    assert measured.num_steps == 8
    assert measured.costs.train == pytest.approx(0.2, rel=0.01)


def test_a_push_that_training_waits_for_is_not_in_its_time(run_of) -> None:
    stall = {"time/boundary_stall_seconds": 0.1, "time/wait_data_seconds": 0.0}
    run = run_of([record_of(step) | stall for step in range(1, 21)], is_async=False)
    assert read_run(run).costs.train == pytest.approx(0.2, rel=0.01)


def test_tokens_of_filtered_groups_count(run_of) -> None:
    records = [record_of(step) | {"data/filtered_groups_fraction": 0.5} for step in range(1, 21)]
    for record in records:
        record["time/tokens_per_second"] /= 2
    measured = read_run(run_of(records))
    assert measured.prompt_tokens == pytest.approx(14, rel=0.1)
    assert measured.costs.train_token == pytest.approx(1e-4, rel=0.03)


def test_the_busiest_server_counts_most(run_of) -> None:
    records = [record_of(step) | server(2, 3, (0.305, 0.0, 0.0)) for step in range(1, 21)]
    measured = read_run(run_of(records))
    assert measured.num_servers == 2
    expected = (997 * 0.005, 997 * 0.002 + 3 * 0.305 / 6, 997 * 0.0001)
    costs = measured.costs
    assert [costs.request, costs.token, costs.beside] == pytest.approx([x / 1000 for x in expected])
    assert "how a completion's time depends on its tokens" in measured.doubts[0]


def test_only_steps_with_loans_tell_what_lending_costs(run_of) -> None:
    """Devices are lent in every fourth step, and twice in the last, when no server is awake in time."""
    records = []
    for step in range(1, 21):
        loans = 2 * (step == 20) or int(step % 4 == 0)
        wake = 0.0 if step == 20 else 0.5 * loans
        records.append(
            record_of(step)
            | {"lend/wakes": float(loans), "lend/wake_seconds": wake}
            | {"lend/sleep_seconds": 0.25 * loans, "lend/room_give_seconds": 0.0}
        )
    measured = read_run(run_of(records))
    assert (measured.costs.wake, measured.costs.sleep) == (0.5, 0.25)
    assert measured.costs.room == ROOM_SECONDS
    assert measured.assumed == ["room"], "it was never measured"


@pytest.mark.parametrize(
    ("variation", "noise", "is_known"),
    [(0.3, 0.02, True), (0.0, 0.02, False), (0.01, 0.1, False), (0.3, 1.0, False)],
)
def test_batches_of_equal_size_leave_training_proportional(
    run_of, variation: float, noise: float, is_known: bool
) -> None:
    random = np.random.default_rng(0)
    records = [record_of(step, variation, noise * random.normal()) for step in range(1, 41)]
    measured = read_run(run_of(records))
    costs, doubts = measured.costs, measured.doubts
    if is_known:
        assert costs.train_token == pytest.approx(1e-4, rel=0.1) and not doubts
        return
    assert costs.train == pytest.approx(0, abs=1e-9)
    assert costs.train_token == pytest.approx((0.2 + 0.256) / 2560, rel=0.5)
    assert "how training time depends on its tokens" in doubts[0]


def test_training_may_take_the_same_time_for_batches_of_all_sizes(run_of) -> None:
    records = [record_of(step, token_seconds=0.0) for step in range(1, 21)]
    measured = read_run(run_of(records))
    assert (measured.costs.train, measured.costs.train_token) == pytest.approx((0.2, 0.0))
    assert not measured.doubts


def server(port: int, completions: int, costs: Sequence[float]) -> dict[str, float]:
    """Of a server's metrics."""
    values = dict(zip(SPEED_METRICS, costs, strict=True)) | {"completions_total": completions}
    return {f"servers/127.0.0.1:{port}/{key}": value for key, value in values.items()}


def record_of(
    step: int, variation: float = 0.3, late: float = 0.0, token_seconds: float = 1e-4
) -> dict[str, float]:
    """A step of 128 samples of 20 tokens, and of some tokens more or fewer."""
    tokens = 128 * 20 * (1 + variation * (-1) ** step)
    train = (0.2 + token_seconds * tokens) * math.exp(late)
    return {
        "step": step,
        "time/step_seconds": train + 0.1,
        "time/wait_data_seconds": 0.1,
        "time/tokens_per_second": tokens / (train + 0.1),
        "rollout/completion_tokens_mean": 6.0,
        "rollout/completion_tokens_max": 9.0,
        "weight_sync/gather_seconds": 0.02,
        "weight_sync/push_seconds": 0.04,
    } | server(1, 997, (0.005, 0.002, 0.0001))
