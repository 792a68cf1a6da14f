# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A supervised run teaches a form, and GRPO begins with what it exports."""

import json
import re
from pathlib import Path

REWARD = """
def is_marked(prompts, completions, **columns):
    return [float(completion.startswith("=")) for completion in completions]
"""


def write_marked_examples(repository: Path, path: Path) -> None:
    rows = (repository / "assets/reverse_digits/train.jsonl").read_text().splitlines()[:512]
    marked = (
        {"prompt": r["prompt"], "completion": "=" + r["answer"]} for r in map(json.loads, rows)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in marked))


def test_grpo_begins_with_the_form_that_a_supervised_run_has_taught(make_run, repository, tmp_path):
    examples, reward = tmp_path / "examples.jsonl", tmp_path / "reward.py"
    write_marked_examples(repository, examples)
    reward.write_text(REWARD)
    supervised = make_run(
        f"--sft.path={examples}", f"--sft.held_out_path={examples}", "--training.steps=30",
        "--optimizer.lr=3e-3", "--lr_scheduler.warmup_steps=0", "--rollout.temperature=1", name="sft",
    ).succeed()  # fmt: skip
    summary = supervised.summary
    assert summary["heldout_loss_after"] < 0.5 * summary["heldout_loss_before"]
    assert not list(supervised.folder.glob("rollout*")), "a supervised run has no rollout process"
    for step in (1, 30):
        assert re.search(rf"step +{step}/30  loss .* epoch .* trained .* tok/s", supervised.console)
    assert f"Everything is in {supervised.folder}: metrics.jsonl.\n" in supervised.console
    after = make_run(
        "--training.steps=1", "--grpo.prompts_per_step=4", "--evaluation.num_prompts=1",
        f"--reward.functions={reward}:is_marked",
        f"--model.hf_assets_path={summary['hf_checkpoint']}", name="after",
    ).succeed()  # fmt: skip
    assert after.metrics[0]["reward/mean"] > 0.5
