"""Whole runs under tensor, pipeline and context parallelism, and the layouts' equality."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

SMALL = ("--grpo.prompts_per_step=4", "--evaluation.num_prompts=16", "--training.steps=4")


@pytest.mark.parametrize(
    ("config", "num_ranks"),
    [
        ("quickstart_tensor_parallel", 2),
        ("quickstart_zero_bubble", 2),
        ("quickstart_context_parallel", 2),
        ("quickstart_3d", 8),
    ],
)
def test_servers_get_the_weights_of_all_stages_and_shards(make_run, config, num_ranks):
    """Without staleness, the trainer scores tokens that the server sampled from the weights
    pushed last. At this learning rate, a shard or stage that was not pushed would show."""
    run = make_run(
        *SMALL, "--rollout.max_head_offpolicyness=0", "--optimizer.lr=3e-3",
        "--lr_scheduler.warmup_steps=0", config=config, num_ranks=num_ranks,
    ).succeed()  # fmt: skip
    for record in run.metrics:
        assert record["staleness/max_steps"] == 0
        assert record["mismatch/kl"] < 1e-6
    assert run.summary["policy_version"] == run.summary["server_version"] == 4
    run.wait_until_processes_end()


def test_a_recorded_run_is_replayed_bit_by_bit_without_a_server(make_run, tmp_path):
    """The export of the replay equals that of the live run, too."""
    record = tmp_path / "rollouts.jsonl.gz"
    live = make_run(*SMALL, f"--rollout.record={record}", num_ranks=1, name="live").succeed()
    replays = [
        make_run(*SMALL, f"--rollout.replay={record}", num_ranks=1, name=name).succeed()
        for name in ("first", "second")
    ]
    learning = ("loss/total", "loss/policy", "grad_norm", "policy/entropy", "mismatch/kl")
    for run in replays:
        for mine, theirs in zip(run.metrics, live.metrics, strict=True):
            assert [mine[key] for key in learning] == [theirs[key] for key in learning]
        assert not run.processes("torchtitan.grpo.rollout")
    exports = [_exported(run) for run in (live, *replays)]
    for export in exports[1:]:
        assert all(torch.equal(tensor, exports[0][name]) for name, tensor in export.items())


def test_a_replay_shows_a_numeric_change(make_run, tmp_path):
    record = tmp_path / "rollouts.jsonl"
    live = make_run(*SMALL, f"--rollout.record={record}", num_ranks=1, name="live").succeed()
    changed = make_run(
        *SMALL, f"--rollout.replay={record}", "--grpo.advantage_eps=1.1e-4",
        num_ranks=1, name="changed",
    ).succeed()  # fmt: skip
    assert changed.metrics[0]["loss/policy"] != live.metrics[0]["loss/policy"]


@pytest.mark.parametrize(
    "aggregation", ["token_mean", pytest.param("sequence_mean", marks=pytest.mark.long)]
)
def test_a_batch_in_parts_takes_the_step_of_the_whole_batch(make_run, tmp_path, aggregation):
    """A live run in parts is replayed with whole batches and with other parts."""
    record = tmp_path / "rollouts.jsonl"
    settings = (*SMALL, f"--grpo.aggregation={aggregation}")
    live = make_run(
        *settings, f"--rollout.record={record}", "--rollout.stream",
        "--rollout.max_head_offpolicyness=0", num_ranks=2, name="live",
    ).succeed()  # fmt: skip
    others = {
        "whole": (),
        "two parts": ("--rollout.stream", "--rollout.stream_parts=2"),
    }
    runs = [
        make_run(
            *settings, f"--rollout.replay={record}", *more, num_ranks=2, name=name
        ).succeed()
        for name, more in others.items()
    ]  # fmt: skip
    assert all(step["mismatch/kl"] < 1e-6 for step in live.metrics)
    # Packed by itself, each part has rows of its own.
    rows = [run.metrics[0]["data/rows_per_rank"] for run in (live, *runs)]
    assert rows[0] > rows[1]
    exported = _exported(live)
    for run in runs:
        for step, (mine, theirs) in enumerate(zip(run.metrics, live.metrics, strict=True)):
            # After the first step, parameters differ by what AdamW has made of rounding: an
            # element whose gradient is next to nothing moves as far as any other.
            rel = 1e-3 if step else 1e-6
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=rel)
            for name in ("loss/total", "loss/policy"):  # of terms that nearly cancel
                assert mine[name] == pytest.approx(theirs[name], rel=rel, abs=rel), name
            assert mine["data/trained_tokens"] == theirs["data/trained_tokens"]
            assert mine["reward/mean"] == theirs["reward/mean"]
        for name, tensor in _exported(run).items():
            # By norm, for the same reason.
            assert (tensor - exported[name]).norm() <= 1e-4 * exported[name].norm(), name


@pytest.mark.parametrize(
    "choice",
    ["--quick", pytest.param("--all", marks=[pytest.mark.long, pytest.mark.timeout(9000)])],
)
def test_layouts_give_the_same_numbers(repository, choice):
    result = subprocess.run(
        [sys.executable, "benchmarks/layout_parity.py", choice, "--json"],
        cwd=repository, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["ok"]
    assert "llama3/FSDP2 x2, PP x2, ZBVZeroBubble/gradients" in report["figures"]


def _exported(run):
    return load_file(next(iter((run.folder / "hf").glob("step-*/*.safetensors"))))
