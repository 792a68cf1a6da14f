"""Whole runs under tensor, pipeline and context parallelism, in parts, and replayed."""

import pytest
import torch
from safetensors.torch import load_file

SMALL = ("--grpo.prompts_per_step=4", "--evaluation.num_prompts=16", "--training.steps=4")
DEADLY_REWARD = """
import os, signal

def reward(prompts, completions, **columns):
    file = os.open({calls!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b".")
    if os.fstat(file).st_size == {deadly}:
        os.kill(os.getppid(), signal.SIGKILL)
    os.close(file)
    return [float(sum(map(ord, completion)) % 7) for completion in completions]
"""


@pytest.mark.parametrize(
    ("config", "num_ranks", "more"),
    [
        pytest.param("tensor_parallel", 2, (), marks=pytest.mark.long),
        # The layout of "3d" has its schedule, too.
        pytest.param("zero_bubble", 2, (), marks=pytest.mark.long),
        # The unit tests of the schedule compare its gradients, and those of shards their collection.
        pytest.param(
            "zero_bubble", 2, ("--parallelism.pipeline_parallel_schedule=Helix",),
            marks=pytest.mark.long,
        ),
        ("context_parallel", 2, ()),
        ("3d", 8, ()),
    ],
)  # fmt: skip
def test_servers_get_the_weights_of_all_stages_and_shards(make_run, config, num_ranks, more):
    """Without staleness, the trainer scores tokens that the server sampled from the weights
    pushed last. At this learning rate, a shard or stage that was not pushed would show."""
    run = make_run(
        *SMALL, "--rollout.max_head_offpolicyness=0", "--optimizer.lr=3e-3",
        "--lr_scheduler.warmup_steps=0", *more, config=f"quickstart_{config}", num_ranks=num_ranks,
    ).succeed()  # fmt: skip
    for record in run.metrics:
        assert record["staleness/max_steps"] == 0
        assert record["mismatch/kl"] < 1e-6
    assert run.summary["policy_version"] == run.summary["server_version"] == 4
    run.wait_until_processes_end()


def test_a_replay_repeats_a_run_bit_by_bit_and_shows_a_numeric_change(make_run, tmp_path):
    """It needs no server, and its export equals that of the live run, too."""
    record = tmp_path / "rollouts.jsonl.gz"
    live = make_run(*SMALL, f"--rollout.record={record}", num_ranks=1, name="live").succeed()
    replay, changed = (
        make_run(*SMALL, f"--rollout.replay={record}", *more, num_ranks=1, name=name).succeed()
        for name, more in {"same": (), "changed": ("--optimizer.eps=1e-6",)}.items()
    )
    learning = ("loss/total", "loss/policy", "grad_norm", "policy/entropy", "mismatch/kl")
    for mine, theirs in zip(replay.metrics, live.metrics, strict=True):
        assert [mine[key] for key in learning] == [theirs[key] for key in learning]
    assert not (replay.folder / "rollout_process.log").exists()
    exported = _exported(replay)
    assert all(torch.equal(tensor, exported[name]) for name, tensor in _exported(live).items())
    # It shows in the step after the one that it changed.
    assert changed.metrics[0]["grad_norm"] == live.metrics[0]["grad_norm"]
    assert changed.metrics[1]["grad_norm"] != live.metrics[1]["grad_norm"]


@pytest.mark.parametrize(
    "aggregation", ["token_mean", pytest.param("sequence_mean", marks=pytest.mark.long)]
)
def test_a_batch_in_parts_takes_the_step_of_the_whole_batch(make_run, tmp_path, aggregation):
    """Gradients that were accumulated before a kill of the rollout process do not count twice."""
    # One call tries the function, four groups make a batch: this is the third of batch 2.
    text = DEADLY_REWARD.format(calls=str(tmp_path / "calls"), deadly=1 + 2 * 4 + 3)
    (tmp_path / "mine.py").write_text(text)
    settings = (
        *SMALL, "--grpo.group_size=4", f"--reward.functions={tmp_path / 'mine.py'}:reward",
        f"--grpo.aggregation={aggregation}",
    )  # fmt: skip
    record = tmp_path / "live/rollouts.jsonl"
    live = make_run(
        *settings, "--rollout.stream", "--rollout.stream_parts=4", "--reward.num_workers=1",
        "--rollout.max_head_offpolicyness=0", "--rollout.max_concurrent_rollouts=4",
        f"--rollout.record={record}", name="live",
    ).succeed()  # fmt: skip
    assert "restarted, from batch 2 on" in live.console
    assert not live.fates()
    others = {"whole": (), "two parts": ("--rollout.stream", "--rollout.stream_parts=2")}
    runs = [
        make_run(*settings, f"--rollout.replay={record}", *more, name=name).succeed()
        for name, more in others.items()
    ]
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
            for name in ("data/trained_tokens", "reward/mean"):
                assert mine[name] == theirs[name]
        for name, tensor in _exported(run).items():
            # By norm, for the same reason.
            assert (tensor - exported[name]).norm() <= 1e-4 * exported[name].norm(), name


def _exported(run):
    return load_file(next(iter((run.folder / "hf").glob("step-*/*.safetensors"))))
