# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whole runs with several turns: the embedded server, the calculator, and the trained tokens."""

import re

import pytest

from torchtitan.grpo.rollout.environments.calculator import CannotCalculate, calculate


@pytest.mark.parametrize("segment_tokens", [pytest.param(0, marks=pytest.mark.long), 3])
def test_what_the_environment_put_in_is_read_and_not_trained(
    make_run, calculator_task, tmp_path, segment_tokens
):
    """Without staleness, the trainer's logprobs equal the server's token by token only if the
    trainer reads the same context and trains on no token that the environment inserted."""
    record = tmp_path / "rollouts.jsonl.gz"
    model = f"--model.hf_assets_path={calculator_task / 'model'}"
    task = (
        model, f"--prompts.path={calculator_task / 'train.jsonl'}",
        f"--evaluation.path={calculator_task / 'heldout.jsonl'}", "--grpo.prompts_per_step=6",
        "--evaluation.num_prompts=16", "--observe.samples_per_step=48",
        f"--rollout.segment_tokens={segment_tokens}", "--checkpoint.enable",
        "--checkpoint.interval=2",
    )  # fmt: skip
    run = make_run(
        *task, "--training.steps=4", "--rollout.max_head_offpolicyness=0",
        f"--rollout.record={record}", config="calculator", num_ranks=1,
    ).succeed()  # fmt: skip
    for step in run.metrics:
        assert step["staleness/max_steps"] == 0
        assert step["mismatch/kl"] < 1e-6
        assert step["environment/failed_episodes"] == 0
        assert 0 < step["reward/environment"] == step["reward/mean"] < 1
    assert run.summary["mismatch_kl_mean"] < 1e-6
    assert 0.5 < run.summary["heldout_before"] <= 1
    assert sum(map(is_answered, run.records("samples.jsonl"))) >= 5
    run.wait_until_processes_end()

    replay = make_run(
        model, f"--rollout.replay={record}", "--training.steps=4", config="calculator",
        num_ranks=1, name="replay",
    ).succeed()  # fmt: skip
    for mine, theirs in zip(replay.metrics, run.metrics, strict=True):
        for name in ("loss/policy", "grad_norm", "mismatch/kl"):
            assert mine[name] == theirs[name]

    # Episodes that were under way are resumed, by another number of ranks.
    assert (run.folder / "rollouts/step-4.msgpack").is_file()
    resumed = make_run(*task, "--training.steps=6", config="calculator").succeed()
    assert [step["step"] for step in resumed.metrics] == [1, 2, 3, 4, 5, 6]
    assert all(step["environment/failed_episodes"] == 0 for step in resumed.metrics)


def test_two_environments_are_mixed_by_weight_each_with_its_turns_and_rewards(
    make_run, calculator_task
):
    run = make_run(
        f"--model.hf_assets_path={calculator_task / 'model'}", "--training.steps=3",
        f"--environments.calculator.prompts.path={calculator_task / 'train.jsonl'}",
        f"--evaluation.sets.calculator.path={calculator_task / 'heldout.jsonl'}",
        "--environments.calculator.weight=2", "--grpo.prompts_per_step=6",
        # How many reversals the model has entirely right at first depends on the machine's rounding.
        "--evaluation.sets.reversal.function=partial_match",
        "--evaluation.num_prompts=8", "--rollout.max_head_offpolicyness=0",
        "--observe.samples_per_step=48", config="two_environments", num_ranks=1,
    ).succeed()  # fmt: skip
    for step in run.metrics:
        assert step["mismatch/kl"] < 1e-6
        assert step["rollout/file/calculator/fraction"] == pytest.approx(2 / 3)
        assert step["rollout/file/reversal/fraction"] == pytest.approx(1 / 3)
        assert step["environment/calculator/failed_episodes"] == 0
        assert step["reward/environment"] == pytest.approx(step["reward/file/calculator"])
        assert step["reward/partial_match"] == pytest.approx(step["reward/file/reversal"])
    for name in ("calculator", "reversal"):
        assert sum(step[f"reward/file/{name}"] for step in run.metrics) > 0
    samples = run.records("samples.jsonl")
    of_environment = {s["columns"]["prompt_set"]: set(s["reward_components"]) for s in samples}
    assert of_environment == {"calculator": {"environment"}, "reversal": {"partial_match"}}
    for record in run.records("evaluations.jsonl"):
        assert 0 < record["evaluation/calculator/score"] <= 1
        assert 0 < record["evaluation/reversal/score"] <= 1


def is_answered(sample: dict) -> bool:
    """Checks what a sample shows; returns whether the calculator has answered in it."""
    turns = sample["context"]
    assert all(turn["trained"] == (turn["role"] == "model") for turn in turns)
    written = "".join(turn["text"] for turn in turns[1:])
    # A completion leaves out special tokens; these models sample <pad> now and then.
    assert re.sub("<(eos|pad|unk)>", "", written) == sample["completion"]
    before, equals, rest = sample["completion"].partition("=")
    if not equals or sample["finish_reason"] != "stop":
        return False
    # The calculator reads the end of the text alone: 8 of "12-3_8=".
    call = re.split(r"[^-+*() \d]", before, flags=re.ASCII)[-1]
    try:
        result = str(calculate(call))
    except CannotCalculate:
        return False  # it was an error, or no call
    assert rest.startswith(result)
    roles = [turn["role"] for turn in turns]
    assert roles[:4] == ["prompt", "model", "environment", "model"]
    assert turns[2]["text"] == result
    return True
