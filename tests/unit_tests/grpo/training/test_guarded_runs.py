# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Guards in the real trainer: bad steps are skipped or end the run, on all ranks alike.

A policy loss of this test's is NaN, or huge, at tokens with a marked log-probability. Recorded
batches hold such tokens in their second and in their last batch.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.types import PromptProgress, Rollout, RolloutGroup, VersionSegment

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
            "training.steps": NUM_STEPS,
            "training.seq_len": 64,
            "training.local_batch_size": 1,
            "training.mixed_precision_param": "float32",
            "optimizer.lr": 1e-3,
            "optimizer.implementation": "foreach",
            "activation_checkpoint.mode": "none",
            "checkpoint.enable": "true",
            "checkpoint.interval": 100,
            "rollout.replay": self.folder / "rollouts.jsonl",
            "rollout.max_new_tokens": 16,
            "grpo.prompts_per_step": NUM_GROUPS,
            "grpo.group_size": GROUP_SIZE,
            "grpo.policy_loss": f"{self.loss}:marked",
            "grpo.mismatch_correction": "none",
            "grpo.hf_export_interval": 1,
            "guards.grad_norm_window": 2,
            "guards.mismatch_kl": "off",  # the marks are far from the policy
            "observe.progress": "none",
            "observe.log_level": "warning",
            "debug.seed": 0,
            **{key.replace("__", "."): value for key, value in more.items()},
        }
        return {"name": name, "arguments": [f"--{key}={value}" for key, value in settings.items()]}

    def weights(self, dump: str, step: int) -> dict[str, torch.Tensor]:
        (file,) = (self.folder / dump / "hf" / f"step-{step}").glob("*.safetensors")
        return load_file(file)

    def metrics(self, dump: str) -> list[dict[str, float]]:
        lines = (self.folder / dump / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def random_group(random: Any, index: int, version: int, mark: float | None) -> RolloutGroup:
    prompt, rollouts = random.integers(3, 100, 4).astype(np.int32), []
    for member in range(GROUP_SIZE):
        completion = random.integers(3, 100, 6).astype(np.int32)
        logprobs = np.full(6, -4.0, np.float32)
        if mark is not None:
            logprobs[2] = mark
        segments = (VersionSegment(version, 0, 6),)
        rollouts.append(
            Rollout(
                prompt_ids=prompt,
                token_ids=completion,
                logprobs=logprobs,
                segments=segments,
                finish_reason="stop",
                completion="",
                reward=float(member),
            )
        )
    return RolloutGroup(index, "", tuple(rollouts), "")


def events(steps: range, skipped: tuple[int, ...] = (), first: int = 0) -> list[str]:
    """What must happen in this order: a skipped step lacks the optimizer and nothing else."""
    expected = [f"publish {first} from slot 0"]
    for slot, step in enumerate(steps, start=1):
        expected += ["fence", *(["optimizer"] if step not in skipped else []), "scheduler"]
        expected.append(f"publish {step} from slot {slot}")
    return expected + [f"save {NUM_STEPS}"] * (steps[-1] == NUM_STEPS)


def are_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, repository) -> Recorded:
    model = repository / "assets/reverse_digits/model"
    return Recorded(tmp_path_factory.mktemp("guarded"), model)


def test_a_bad_step_is_skipped_or_ends_the_run_before_it(recorded, run_ranks):
    cases = [
        recorded.case("skip", guards__grad_norm="skip"),
        recorded.case("warn"),
        recorded.case("off", guards__nonfinite="off"),
        recorded.case("stop", guards__nonfinite="stop"),
        recorded.case("resumed", "stop", guards__grad_norm="skip"),
        recorded.case("in parts", guards__grad_norm="skip", rollout__stream="true", rollout__stream_parts=2),
    ]  # fmt: skip
    (results,) = run_ranks("replayed_runs", 1, folder=str(recorded.folder), cases=cases)

    assert results["skip"]["events"] == events(range(1, 6), skipped=(2, 5))
    assert results["in parts"]["events"] == results["skip"]["events"]
    assert results["skip"]["guards"]["guards/nonfinite"] == 1
    assert results["skip"]["guards"]["guards/grad_norm"] == 1
    assert results["skip"]["guards"]["guards/skipped"] == 2
    records = recorded.metrics("skip")
    assert [record["guards/skipped"] for record in records] == [0, 1, 1, 1, 2]
    for before, after in ((1, 2), (4, 5)):
        same = recorded.weights("skip", before), recorded.weights("skip", after)
        assert are_equal(*same), (before, after)
    assert not are_equal(recorded.weights("skip", 2), recorded.weights("skip", 3))

    assert results["warn"]["events"] == events(range(1, 6), skipped=(2,))
    assert results["warn"]["guards"]["guards/grad_norm"] == 1
    assert all(tensor.isnan().all() for tensor in recorded.weights("off", 2).values())

    stopped = results["stop"]
    assert stopped["error"].startswith("Guard at step 2: loss/total is nan and grad_norm is nan. ")
    assert stopped["events"] == [*events(range(1, 2)), "fence", "save 1"]
    assert (recorded.folder / "stop/checkpoint/step-1").is_dir()
    # The run goes on with the bad batch, skips it, and ends with the very same weights.
    assert results["resumed"]["events"] == events(range(2, 6), skipped=(2, 5), first=1)
    assert are_equal(recorded.weights("stop", 5), recorded.weights("skip", 5))


def test_all_ranks_of_every_kind_of_layout_skip_the_same_steps(recorded, run_ranks):
    layouts: dict[str, dict[str, Any]] = {
        "fsdp": {"data_parallel_shard_degree": 2},
        "tensor": {"tensor_parallel_degree": 2},
        "pipeline": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
    }
    cases = []
    for name, settings in layouts.items():
        more: dict[str, Any] = {f"parallelism__{key}": value for key, value in settings.items()}
        if name == "pipeline":
            more["training__local_batch_size"] = 2
        cases.append(recorded.case(name, guards__grad_norm="skip", **more))
    stop = {"parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 2}
    cases.append(
        recorded.case(
            "stopped",
            guards__nonfinite="stop",
            parallelism__pipeline_parallel_schedule="1F1B",
            **stop,
        )
    )
    results = run_ranks("replayed_runs", 2, folder=str(recorded.folder), cases=cases)
    for rank, result in enumerate(results):
        for name in layouts:
            if rank == 0:  # it alone saves rollouts
                assert result[name]["events"].pop() == f"save {NUM_STEPS}"
            assert result[name]["events"] == events(range(1, 6), skipped=(2, 5))[:-1], name
            assert result[name]["guards"]["guards/skipped"] == 2, name
        assert result["stopped"]["error"].startswith("Guard at step 2: ")
    assert (recorded.folder / "stopped/checkpoint/step-1").is_dir()
