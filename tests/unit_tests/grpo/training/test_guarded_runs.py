# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Guards in the real trainer: bad steps are skipped or end the run, on all ranks alike.

A policy loss of this test's is NaN, or huge, at tokens with a marked log-probability. Recorded
batches hold such tokens in their second and in their last batch.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay_settings
import torch
from replay_settings import PIPELINE, events_of_steps, layout_case
from safetensors.torch import load_file

from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.types import PromptProgress, RolloutGroup

NAN_MARK, HUGE_MARK = -50.0, -60.0
NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 5, 2, 2
LOSS = f"""
import torch
from torchtitan.grpo.losses.policy_terms import PolicyTerm

def marked(inputs, config):
    factor = torch.where(inputs.generator_logprobs == {NAN_MARK}, torch.nan, 1.0)
    factor = torch.where(inputs.generator_logprobs == {HUGE_MARK}, 1e7, factor)
    return PolicyTerm(-factor * inputs.advantages * inputs.logprobs)
"""


class Recorded:
    """A record of batches, and runs that replay it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.loss = folder / "marked_loss.py"
        self.loss.write_text(LOSS)
        random = np.random.default_rng(0)
        marks = {1: NAN_MARK, NUM_STEPS - 1: HUGE_MARK}
        recorder = RolloutRecorder(str(folder / "rollouts.jsonl"), 128, 1.0, 0)
        for step in range(NUM_STEPS):
            groups = [
                random_group(random, NUM_GROUPS * step + i, step, marks.get(step) if i else None)
                for i in range(NUM_GROUPS)
            ]
            recorder.write(step, PromptProgress(10 * (step + 1), ()), groups)
        recorder.close()

    def case(self, name: str, dump: str = "", **more: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "job.dump_folder": self.folder / (dump or name),
            "model.hf_assets_path": self.model,
            "training.steps": NUM_STEPS, "training.seq_len": 64, "optimizer.lr": 1e-3,
            "checkpoint.enable": True, "checkpoint.interval": 100,
            "rollout.replay": self.folder / "rollouts.jsonl", "rollout.max_new_tokens": 16,
            "grpo.prompts_per_step": NUM_GROUPS, "grpo.group_size": GROUP_SIZE,
            "grpo.policy_loss": f"{self.loss}:marked", "grpo.mismatch_correction": "none",
            "grpo.hf_export_interval": 1, "guards.grad_norm_window": 2,
            "guards.mismatch_kl": "off",  # the marks are far from the policy
        }  # fmt: skip
        return replay_settings.case(name, settings, more)

    def weights(self, dump: str, step: int) -> dict[str, torch.Tensor]:
        (file,) = (self.folder / dump / "hf" / f"step-{step}").glob("*.safetensors")
        return load_file(file)


def random_group(random: Any, index: int, version: int, mark: float | None) -> RolloutGroup:
    prompt, rollouts = random.integers(3, 100, 4).astype(np.int32), []
    logprobs = np.array([-4.0, -4.0, mark or -4.0, -4.0, -4.0, -4.0])
    for member in range(GROUP_SIZE):
        completion = random.integers(3, 100, 6).astype(np.int32)
        rollouts.append(
            replay_settings.rollout(prompt, completion, logprobs, version, float(member))
        )
    return RolloutGroup(index, "", tuple(rollouts), "")


SPIKED = "tok_embeddings.weight"
SKIPPING = events_of_steps(range(1, 6), skipped=(2, 5))


def are_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, repository) -> Recorded:
    model = repository / "assets/reverse_digits/model"
    return Recorded(tmp_path_factory.mktemp("guarded"), model)


def test_a_bad_step_is_skipped_or_ends_the_run_before_it(recorded, run_ranks):
    cases = [
        recorded.case("skip", guards__grad_norm="skip"),
        recorded.case("warn", observe__progress="lines"),
        recorded.case("off", guards__nonfinite="off"),
        recorded.case("stop", guards__nonfinite="stop"),
        recorded.case("resumed", "stop", guards__grad_norm="skip"),
        recorded.case("in parts", guards__grad_norm="skip", rollout__stream=True, rollout__stream_parts=2),
    ]  # fmt: skip
    (results,) = run_ranks("replayed_runs", 1, folder=str(recorded.folder), cases=cases)

    assert results["skip"]["events"] == [*SKIPPING, "save 5"]
    assert results["in parts"]["events"] == results["skip"]["events"]
    for name in ("skip", "in parts", "warn"):
        (spike,) = results[name]["spikes"]
        assert re.fullmatch(rf"grad_norm \S+, \d+% of its square in {SPIKED}", spike), name
    shown = results["warn"]["shown"].splitlines()
    assert [line[:8] for line in shown if spike in line] == ["step 5/5"]
    counts = {"nonfinite": 1, "grad_norm": 1, "skipped": 2}
    assert {name: results["skip"]["guards"][f"guards/{name}"] for name in counts} == counts
    records = replay_settings.records(recorded.folder / "skip")
    assert [record["guards/skipped"] for record in records] == [0, 1, 1, 1, 2]
    for before, after in ((1, 2), (4, 5)):
        same = recorded.weights("skip", before), recorded.weights("skip", after)
        assert are_equal(*same), (before, after)
    assert not are_equal(recorded.weights("skip", 2), recorded.weights("skip", 3))

    assert results["warn"]["events"] == events_of_steps(range(1, 6), skipped=(2,), saved=(5,))
    assert results["warn"]["guards"]["guards/grad_norm"] == 1
    assert all(tensor.isnan().all() for tensor in recorded.weights("off", 2).values())

    stopped = results["stop"]
    assert stopped["error"].startswith("Guard at step 2: loss/total is nan and grad_norm is nan. ")
    assert stopped["events"] == [*events_of_steps(range(1, 2)), "fence", "save 1"]
    assert (recorded.folder / "stop/checkpoint/step-1").is_dir()
    # The run goes on with the bad batch, skips it, and ends with the very same weights.
    assert results["resumed"]["events"] == events_of_steps(range(2, 6), skipped=(2, 5), saved=(5,))
    assert are_equal(recorded.weights("stop", 5), recorded.weights("skip", 5))


def test_all_ranks_of_every_kind_of_layout_skip_the_same_steps(recorded, run_ranks):
    layouts: dict[str, dict[str, Any]] = {
        "fsdp": {"data_parallel_shard_degree": 2},
        "tensor": {"tensor_parallel_degree": 2},
        "pipeline": PIPELINE,
    }
    cases = [layout_case(recorded, n, layouts[n], guards__grad_norm="skip") for n in layouts]
    cases.append(layout_case(recorded, "stopped", PIPELINE, guards__nonfinite="stop"))
    results = run_ranks("replayed_runs", 2, folder=str(recorded.folder), cases=cases)
    for rank, result in enumerate(results):
        for name in layouts:
            if rank == 0:  # it alone saves rollouts
                assert result[name]["events"].pop() == f"save {NUM_STEPS}"
            assert result[name]["events"] == SKIPPING, name
            assert result[name]["guards"]["guards/skipped"] == 2, name
            assert [spike.split()[-1] for spike in result[name]["spikes"]] == [SPIKED], name
        assert result["stopped"]["error"].startswith("Guard at step 2: ")
    assert (recorded.folder / "stopped/checkpoint/step-1").is_dir()
