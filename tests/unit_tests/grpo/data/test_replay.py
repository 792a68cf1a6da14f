from pathlib import Path

import pytest
import torch
from metric_page import undescribed
from rollouts import group, rollout

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.data.replay import ReplaySource
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.system.errors import DataError
from torchtitan.grpo.types import BatchPart, PromptProgress

SEQ_LEN = 16


@pytest.fixture
def model(repository):
    return read_hf_model(repository / "assets/reverse_digits/model")


@pytest.fixture
def record(tmp_path, model):
    """A file with this many batches; batch k is recorded at version k times ``versions_apart``."""

    def make(num_batches: int, versions_apart: int = 1, files: tuple[str, str] = ("", "")) -> Path:
        path = tmp_path / "rollouts.jsonl.gz"
        recorder = RolloutRecorder(str(path), model.vocab_size, 1.0, 0)
        for version in range(num_batches):
            ids = [version, version + 1, 3]
            pair = [
                rollout(ids, reward, version=oldest, reward_components={"x": reward})
                for reward, oldest in ((1.0, version), (0.0, max(version - 1, 0)))
            ]
            groups = [group(2 * version + g, *pair, file=files[g]) for g in range(2)]
            progress = PromptProgress(2 * (version + 1), (1,))
            recorder.write(versions_apart * version, progress, groups)
        recorder.close()
        return path

    return make


@pytest.fixture
def replay(tmp_path, model):
    def make(
        path, start_version=0, should_stop=lambda: False, temperature=1.0, stream_parts=None, **grpo
    ) -> ReplaySource:
        config = JobConfig()
        config.job.dump_folder = str(tmp_path / "out")
        config.rollout.replay = str(path)
        config.rollout.temperature = temperature
        config.rollout.stream = stream_parts is not None
        config.rollout.stream_parts = stream_parts or 4
        config.training.seq_len = SEQ_LEN
        config.training.local_batch_size = 1
        for key, value in grpo.items():
            setattr(config.grpo, key, value)
        source = ReplaySource(
            config, model, start_version=start_version, progress=PromptProgress(),
            should_stop=should_stop,
        )  # fmt: skip
        source.start()
        return source

    return make


def test_steps_come_in_the_file_s_order_and_end_with_it(record, replay):
    path = record(2)
    source = replay(path)
    assert (source.servers, source.link, source.served_version()) == ([], None, -1)
    for version in range(2):
        step = source.next_step(version, num_ranks=1)
        assert step is not None
        rows = step.plan.rows_of_rank[0]
        assert rows.labels[rows.loss_mask][0].item() == version
        assert step.plan.samples.rewards.tolist() == [1, 0, 1, 0]
        assert source.progress == PromptProgress(2 * (version + 1), (1,))
        assert step.metrics["reward/mean"] == step.metrics["reward/x"] == 0.5
        assert step.metrics["rollout/completion_tokens_mean"] == 3
        assert step.metrics["staleness/max_steps"] == min(version, 1)
    assert not source.is_exhausted
    assert source.next_step(2, num_ranks=1) is None
    assert source.is_exhausted
    source.close()
    stopped = [False]
    source = replay(path, should_stop=lambda: stopped[0])
    stopped[0] = True
    assert source.next_step(0, 1) is None and not source.is_exhausted


@pytest.mark.parametrize(
    ("num_batches", "settings", "message"),
    [
        (1, {"temperature": 0.5}, r"rollout\.replay: .*rollout\.temperature = 1\.0.* has 0\.5"),
        (2, {"start_version": 3}, r"at least 3 batches .*at step 3\), got 2"),
        (0, {}, r"rollout\.replay: .* at least 1 batches .* got 0"),
    ],
)
def test_a_file_that_does_not_suit_the_run_is_refused(
    record, replay, num_batches, settings, message
):
    with pytest.raises(DataError, match=message):
        replay(record(num_batches), **settings)


@pytest.mark.parametrize(
    ("files", "shares"),
    [(("v1.5", "a b"), {"v1.5": 0.5, "a b": 0.5}), (("d-x", ""), {"d-x": 0.5}), (("", ""), {})],
)
def test_metrics_of_each_file_come_again_where_the_file_is_known(record, replay, files, shares):
    source = replay(record(1, files=files))
    step = source.next_step(0, num_ranks=1)
    assert step is not None
    expected = {}
    for name, share in shares.items():
        expected |= {
            f"reward/file/{name}": 0.5,
            f"rollout/file/{name}/completion_tokens_mean": 3.0,
            f"rollout/file/{name}/fraction": share,
        }
    assert {key: v for key, v in step.metrics.items() if "/file/" in key} == expected
    assert undescribed(expected) == []
    source.close()


def test_ages_count_from_the_version_that_a_batch_was_recorded_with(record, replay):
    source = replay(record(3, versions_apart=10))
    ages = []
    for version in range(3):
        step = source.next_step(version, num_ranks=1)
        assert step is not None
        ages.append(step.metrics["staleness/max_steps"])
    # Batch k was sampled under version k - 1 and k, and recorded at version 10 k.
    assert ages == [0, 10, 19]


def test_a_batch_may_come_in_parts(record, replay):
    path = record(2)
    source, whole = replay(path, stream_parts=2), replay(path)
    for version in range(2):
        expected = whole.next_step(version, num_ranks=1)
        assert expected is not None
        first = source.next_step(version, num_ranks=1)
        assert first is not None
        assert (first.part, first.metrics) == (BatchPart.FIRST, {})
        assert source.progress.position == 2 * version, "not before the batch is whole"
        last = source.next_step(version, num_ranks=1)
        assert last is not None
        assert last.part is BatchPart.LAST
        assert source.progress == whole.progress
        assert len(first.plan.samples) + len(last.plan.samples) == len(expected.plan.samples)
        assert last.metrics["reward/mean"] == expected.metrics["reward/mean"]
    assert source.next_step(2, num_ranks=1) is None
    assert source.is_exhausted


def test_a_resumed_run_goes_on_with_the_next_batch_and_the_next_supervised_rows(
    record, replay, tmp_path
):
    mix, path = tmp_path / "mix.jsonl", record(4)
    mix.write_text("".join(f'{{"completion": "{n}"}}\n' for n in range(7)))
    settings = {"ptx_path": str(mix), "ptx_per_step": 2}
    whole, resumed = replay(path, **settings), replay(path, start_version=2, **settings)
    whole.next_step(0, 2)
    whole.next_step(1, 2)
    for version in (2, 3):
        a, b = whole.next_step(version, 2), resumed.next_step(version, 2)
        assert a is not None and b is not None
        assert a.metrics == b.metrics
        for rows, same in zip(a.plan.rows_of_rank, b.plan.rows_of_rank, strict=True):
            assert all(torch.equal(x, same.tensors()[name]) for name, x in rows.tensors().items())
        weight = sum(float(rows.ptx_weights.sum()) for rows in a.plan.rows_of_rank)
        assert weight == pytest.approx(1.0)
