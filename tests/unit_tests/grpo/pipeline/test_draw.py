# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Schedules are drawn as they run, and the command compares them."""

import pytest

from torchtitan.grpo.commands.cli import run
from torchtitan.grpo.pipeline.draw import draw_text
from torchtitan.grpo.pipeline.schedules import AUTO, SCHEDULES
from torchtitan.grpo.pipeline.tables.actions import Costs
from torchtitan.grpo.pipeline.tables.rules import one_forward_one_backward
from torchtitan.grpo.pipeline.tables.simulate import simulate


def test_text_shows_each_rank_over_time():
    table, costs = one_forward_one_backward(2, 2), Costs.uniform(2, 1)
    assert draw_text(table, simulate(table, costs), width=9).splitlines() == [
        "rank  0  FF..BB.BB",
        "rank  1  .FBBFBB..",
    ]


def test_the_command_compares_all_schedules(capsys, tmp_path):
    arguments = ["train_configs/quickstart_zero_bubble.toml", "--times", "1", "2", "0.5"]
    arguments += ["--microbatches", "5"]
    arguments += ["--parallelism.pipeline_parallel_schedule", "VHalf"]
    assert run(["schedule", *arguments, "--picture", str(tmp_path / "all.png")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("VHalf on 2 ranks with 5 microbatches. F, I, W take 1, 2, 0.5.")
    rows = {line[2:].split()[0]: line[0] for line in out.splitlines() if line[2:3].strip()}
    assert set(SCHEDULES) - {AUTO} <= set(rows)
    assert [name for name, mark in rows.items() if mark == "*"] == ["VHalf"]
    assert (tmp_path / "all.png").stat().st_size > 10_000


def test_the_command_draws_the_critic_in_the_same_pass(capsys):
    settings = ["--parallelism.pipeline_parallel_degree", "2", "--microbatches", "2"]
    settings += ["--parallelism.pipeline_parallel_schedule", "1F1B", "--times", "1", "1", "1"]
    assert run(["schedule", "train_configs/quickstart_ppo.toml", *settings]) == 0
    out = capsys.readouterr().out
    assert "One pass trains the critic, too" in out and "It takes 12 instead of 18" in out
    rank = next(line for line in out.splitlines() if line.startswith("rank  1"))
    assert rank.split()[2].startswith("f"), "the last rank begins with the critic"


COMMAND = [
    *("schedule", "train_configs/quickstart_zero_bubble.toml", "--times", "1", "1", "1"),
    *("--parallelism.pipeline_parallel_schedule", "auto"),
]
LAYERS = "--parallelism.pipeline_parallel_layers_per_stage"


@pytest.mark.parametrize(
    ("more", "chosen"),
    [
        (["--microbatches", "3"], "InterleavedZeroBubble"),
        # The quickstart's model has four layers, so that six parts are cut into 2 or 6 stages.
        ([LAYERS, "3"], "ZBH1"),
        ([LAYERS, "1"], "InterleavedZeroBubble"),
    ],
)
def test_the_command_shows_what_would_be_chosen(more, chosen, capsys):
    assert run([*COMMAND, *more]) == 0
    expected = f"For these times, auto would choose {chosen}. A run measures its own times."
    assert expected in capsys.readouterr().out


def test_the_command_refuses_stages_that_ranks_cannot_share_and_a_run_without_a_pipeline(capsys):
    assert run([*COMMAND, LAYERS, "2"]) == 2
    error = capsys.readouterr().err
    assert "parallelism.pipeline_parallel_layers_per_stage (2) divides 6 layers" in error
    assert "auto needs the same number of stages, at least 1, on each of 2 ranks" in error
    assert run(["schedule", "train_configs/quickstart.toml"]) == 2
    error = capsys.readouterr().err
    assert "parallelism.pipeline_parallel_degree must be above 1" in error


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("--times", ["1", "2"], "expected 3 arguments"),
        ("--times", ["inf", "0", "1"], "a time must be a finite number above 0, got 'inf'"),
        ("--microbatches", ["2.5"], "the number must be an integer above 0, got '2.5'"),
        ("--hop", ["-1"], "the time must be a finite number from 0, got '-1'"),
    ],
)
def test_numbers_that_no_schedule_can_have_are_refused(option, values, message, capsys):
    with pytest.raises(SystemExit) as ended:
        run(["schedule", "train_configs/quickstart_zero_bubble.toml", option, *values])
    assert ended.value.code == 2
    assert f"argument {option}: {message}" in capsys.readouterr().err
