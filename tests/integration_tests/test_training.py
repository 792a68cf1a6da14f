"""Whole runs with the embedded server: what they compute and which files they write."""

import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

SMALL = ("--grpo.prompts_per_step=4", "--evaluation.num_prompts=16", "--training.steps=4")


def test_an_asynchronous_run_leaves_everything_it_promises(make_run, repository):
    run = make_run(
        *SMALL, "--rollout.max_head_offpolicyness=2", "--metrics.enable_tensorboard"
    ).succeed()
    assert [record["step"] for record in run.metrics] == [1, 2, 3, 4]
    for key in (
        "reward/mean", "loss/policy", "grad_norm", "policy_version", "staleness/mean_steps",
        "staleness/max_steps", "time/step_seconds", "time/wait_data_seconds",
        "time/boundary_stall_seconds", "weight_sync/push_seconds", "rollout/tokens_per_second",
        "mismatch/kl", "rollout/completion_tokens_mean", "memory/peak_gib",
    ):  # fmt: skip
        assert all(key in record for record in run.metrics), key
    assert all(record["staleness/max_steps"] <= 2 for record in run.metrics)
    summary = run.summary
    assert summary["policy_version"] == summary["server_version"] == summary["steps"] == 4
    assert 0 <= summary["heldout_before"] <= 1
    written = [sample["completion"] for sample in run.records("samples.jsonl")]
    assert sum(map(str.isdigit, written)) > len(written) / 2
    (file,) = run.folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4]
    # The export is a model that has learned: transformers loads it, and it is not the old one.
    exported = AutoModelForCausalLM.from_pretrained(summary["hf_checkpoint"]).state_dict()
    original = AutoModelForCausalLM.from_pretrained(repository / "assets/reverse_digits/model")
    assert any(not torch.equal(v, exported[k]) for k, v in original.state_dict().items())
    assert AutoTokenizer.from_pretrained(summary["hf_checkpoint"]).encode("12")
    run.wait_until_processes_end()


def test_without_staleness_trainer_and_server_compute_the_same_model(make_run):
    """With a penalty that grows with the distance; and a new run serves what this one exports."""
    run = make_run(
        *SMALL, "--rollout.max_head_offpolicyness=0", "--optimizer.lr=3e-3", "--grpo.kl_coef=0.1",
        "--lr_scheduler.warmup_steps=0", "--rollout.segment_tokens=3",
    ).succeed()  # fmt: skip
    for record in run.metrics:
        assert record["staleness/max_steps"] == 0
        assert record["mismatch/kl"] < 1e-6
        assert record["weight_sync/server_version"] >= record["policy_version"] - 1
    assert run.summary["mismatch_kl_mean"] < 1e-6
    divergence = [record["loss/reference_kl"] for record in run.metrics]
    assert abs(divergence[0]) < 1e-6
    assert all(d > 1e-5 for d in divergence[1:])
    # Rank 0 does not receive the token ids of a batch, but those of the samples.
    for sample in run.records("samples.jsonl"):
        prompt, written = sample["context"]
        assert prompt["text"] == sample["prompt"]
        assert re.sub("<(eos|pad|unk)>", "", written["text"]) == sample["completion"]
        spread = max(sample["group_rewards"]) - min(sample["group_rewards"])
        assert (sample["advantage"] != 0) <= (spread > 0)

    exported = run.summary["hf_checkpoint"]
    # With a learning rate of 0 the new run's server must serve the old run's last weights.
    second = make_run(
        *SMALL, "--optimizer.lr=0", f"--model.hf_assets_path={exported}",
        "--rollout.max_head_offpolicyness=0", "--training.steps=1", name="second",
    ).succeed()  # fmt: skip
    # Its first step scores what the server sampled from those weights, token by token.
    assert second.metrics[0]["mismatch/kl"] < 1e-6
    assert second.summary["heldout_before"] == run.summary["heldout_after"]
    old = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    new = AutoModelForCausalLM.from_pretrained(second.summary["hf_checkpoint"]).state_dict()
    assert all(torch.equal(tensor, new[name]) for name, tensor in old.items())


def test_a_run_resumes_from_its_checkpoint(make_run):
    """The last checkpoint of a finished run is whole, though no interval ends there."""
    checkpoint = ("--checkpoint.enable", "--checkpoint.interval=3")
    first = make_run(*SMALL, *checkpoint, "--grpo.no-async_weight_update").succeed()
    for record in first.metrics:
        assert record["weight_sync/server_version"] == record["policy_version"]
        # A push in the foreground is inside the boundary.
        assert record["time/boundary_stall_seconds"] >= record["weight_sync/push_seconds"]
    assert (first.folder / "rollouts/step-4.msgpack").is_file()
    changes = ("--training.steps=6", "--optimizer.lr=1e-4", "--lr_scheduler.warmup_steps=0")
    changes = (*changes, "--lr_scheduler.decay_ratio=1.0")
    second = make_run(*SMALL, *checkpoint, *changes).succeed()
    assert second.folder == first.folder
    assert [record["lr"] for record in second.metrics[4:]] == pytest.approx([1e-4 / 3, 1e-4 / 6])
    assert "optimizer.lr: 0.0003 -> 0.0001, takes effect from step 5" in second.console
    assert [path.name for path in sorted((second.folder / "starts").glob("[0-9]*"))] == ["1", "2"]
    assert [record["step"] for record in second.metrics] == [1, 2, 3, 4, 5, 6]
    assert second.summary["server_version"] == 6
    samples = second.records("samples.jsonl")
    before = {sample["group_id"] for sample in samples if sample["step"] <= 4}
    after = {sample["group_id"] for sample in samples if sample["step"] > 4}
    assert before.isdisjoint(after)
