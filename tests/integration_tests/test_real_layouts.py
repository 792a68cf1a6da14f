# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whole runs of a real model; `test_benchmarks.py` compares its parallel layouts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torchtitan.grpo.data.record import RecordReader, RolloutRecorder

pytestmark = pytest.mark.long
REWARD = """
def reward(prompts, completions, **columns):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]
"""


def test_a_colocated_run_of_a_real_model_serves_what_it_trains_and_is_repeated_by_a_resumed_replay(
    make_run, smollm2: Path, repository: Path, tmp_path: Path
):
    """The replay ends with its file, after one step, and goes on when the file is longer."""
    (tmp_path / "mine.py").write_text(REWARD)
    record, beginning = tmp_path / "rollouts.jsonl", tmp_path / "beginning.jsonl"
    data = repository / "assets/arithmetic"
    settings = (
        f"--model.hf_assets_path={smollm2}", "--training.steps=3", "--training.seq_len=128",
        "--optimizer.lr=1e-4", "--lr_scheduler.warmup_steps=0",
        f"--prompts.path={data / 'train.jsonl'}", f"--evaluation.path={data / 'heldout_sums.jsonl'}",
        "--evaluation.num_prompts=2", f"--reward.functions={tmp_path / 'mine.py'}:reward",
        "--grpo.prompts_per_step=2", "--grpo.group_size=4", "--rollout.max_new_tokens=24",
        "--rollout.max_head_offpolicyness=0",
    )  # fmt: skip
    options = {"config": "quickstart_colocated", "num_ranks": 1}
    live = make_run(*settings, f"--rollout.record={record}", name="live", **options).succeed()
    assert live.summary["server_version"] == len(live.metrics) == 3
    for step in live.metrics:
        assert step["staleness/max_steps"] == 0
        # Had the second or the third batch been sampled from earlier weights, this would be 1e-3.
        assert step["mismatch/kl"] < 1e-7
        assert step["grad_norm"] > 0

    reader = RecordReader(str(record), None, None, "rollout.record")
    _, first = next(iter(reader))
    assert reader.header is not None and reader.header.temperature is not None
    header = reader.header
    recorder = RolloutRecorder(str(beginning), header.vocab_size, header.temperature, 0)
    recorder.write(first.version, first.progress, first.groups)
    recorder.close()
    for file, step in ((beginning, 1), (record, 3)):
        replay = make_run(
            *settings, "--inference.no-lend", "--checkpoint.enable", f"--rollout.replay={file}",
            name="replay", **options,
        ).succeed()  # fmt: skip
        assert [record["step"] for record in replay.metrics] == list(range(1, step + 1))
    exported, expected = (
        load_file(next((run.folder / "hf/step-3").glob("*.safetensors"))) for run in (replay, live)
    )
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
