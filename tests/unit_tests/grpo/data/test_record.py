import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts import assert_same, rollout
from rollouts import group as group_of

from torchtitan.grpo.data.record import RecordReader, RolloutRecorder
from torchtitan.grpo.system.errors import DataError
from torchtitan.grpo.types import PromptProgress, VersionSegment

VOCAB_SIZE = 100
TEMPERATURE = 0.7


def group(group_id=0, logprobs=(-0.1, -2.5), reward: float | None = 1.0):
    first = rollout(
        range(len(logprobs)), reward, logprobs, finish_reason="length",
        completion='líne\n"two" \u2028', reward_components={"exact_match": 1 / 3},
        segments=(VersionSegment(3, 0, 1), VersionSegment(4, 1, len(logprobs))),
    )  # fmt: skip
    return group_of(group_id, first, first, prompt_text="prompt \x00", server_url="http://host:1")


def reader_of(path, vocab_size=VOCAB_SIZE, temperature=TEMPERATURE):
    return RecordReader(str(path), vocab_size, temperature, "rollout.replay")


def read(path, **settings):
    return [batch for _, batch in reader_of(path, **settings)]


def record(path, groups, first_version=0):
    recorder = RolloutRecorder(str(path), VOCAB_SIZE, TEMPERATURE, first_version)
    for version, some in enumerate(groups, start=first_version):
        recorder.write(version, PromptProgress(10 * (version + 1), (3, 7)), some)
    return recorder


@pytest.fixture(params=["rollouts.jsonl", "folder/rollouts.jsonl.gz"])
def path(request, tmp_path):
    return tmp_path / request.param


def test_a_batch_is_read_back_as_it_was(path):
    plain, _ = group(9, reward=None).rollouts
    rated = replace(
        plain,
        teacher_logprobs=np.array([-1 / 3, -1e-8], np.float32),
        teacher_top_ids=np.array([[7, 2**31 - 1], [0, 8]], np.int32),
        teacher_top_logprobs=np.array([[-1 / 3, -1e-8], [-2.5, -7.0]], np.float32),
    )
    groups = [group(4), group_of(9, rated, plain, prompt_text="prompt \x00")]
    recorder = record(path, [groups, [group(11)]])
    batches = read(path)  # before close: each batch is on disk once it is written
    recorder.close()
    assert [(b.version, b.progress, len(b.groups)) for b in batches] == [
        (0, PromptProgress(10, (3, 7)), 2),
        (1, PromptProgress(20, (3, 7)), 1),
    ]
    assert_same(batches[0].groups, groups)


@given(
    logprobs=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20
    ),
    reward=st.floats(allow_nan=False, allow_infinity=False),
    data=st.data(),
)
def test_numbers_keep_every_bit_and_what_an_environment_put_in_is_told_apart(
    tmp_path_factory, logprobs, reward, data
):
    length = len(logprobs) - 1
    mask = np.array([*data.draw(st.lists(st.booleans(), min_size=length, max_size=length)), True])
    plain, *_ = group(logprobs=logprobs, reward=reward).rollouts
    mixed = replace(plain, sampled=mask)
    path = tmp_path_factory.mktemp("record") / "rollouts.jsonl"
    record(path, [[group_of(0, mixed, plain)]]).close()
    found, other = read(path)[0].groups[0].rollouts
    assert found.logprobs.tobytes() == other.logprobs.tobytes() == plain.logprobs.tobytes()
    assert np.float64(found.reward).tobytes() == np.float64(reward).tobytes()
    assert found.num_written == mixed.num_written
    # A mask that is True throughout says nothing.
    assert other.sampled is None and (found.sampled is None) == mask.all()
    if found.sampled is not None:
        assert found.sampled.tolist() == mask.tolist()


def test_a_resumed_run_drops_the_records_of_steps_that_it_takes_again(path):
    record(path, [[group(g)] for g in range(4)]).close()
    record(path, [[group(20)], [group(30)]], first_version=2).close()
    batches = read(path)
    assert [batch.version for batch in batches] == [0, 1, 2, 3]
    assert [batch.groups[0].group_id for batch in batches] == [0, 1, 20, 30]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_new_run_does_not_overwrite_a_record(path):
    record(path, [[group()]]).close()
    with pytest.raises(DataError, match=r"rollout\.record must name a file without batches"):
        RolloutRecorder(str(path), VOCAB_SIZE, TEMPERATURE, 0)
    assert len(read(path)) == 1
    path.write_bytes(b"notes of mine\n")
    with pytest.raises(DataError, match=r"rollout\.record: .*rollouts\.jsonl"):
        RolloutRecorder(str(path), VOCAB_SIZE, TEMPERATURE, 0)
    assert path.read_bytes() == b"notes of mine\n"
    path.unlink()
    record(path, []).close()
    record(path, [[group()]]).close()
    assert len(read(path)) == 1


def test_a_last_line_that_was_cut_off_ends_the_file(path):
    record(path, [[group(g)] for g in range(3)]).close()
    path.write_bytes(path.read_bytes()[:-20])
    reader = reader_of(path)
    assert [batch.version for _, batch in reader] == [0, 1]
    assert reader.was_cut_off
    # A run that resumes behind it writes a whole file again.
    record(path, [[group(7)]], first_version=2).close()
    assert [batch.version for batch in read(path)] == [0, 1, 2]


def test_a_file_of_another_kind_is_refused_with_its_line(tmp_path):
    path = tmp_path / "other.jsonl"
    for content, message in (
        (b"", r"rollout\.replay: .*other\.jsonl is empty"),
        (b"no json\n", r"rollout\.replay: .*other\.jsonl:1: "),
        (b'{"prompt": "a"}\n', r"other\.jsonl:1: .*format"),
        (
            b'{"format": "torchtitan-grpo-rollouts", "format_version": 1, "vocab_size": 100}\n',
            r"other\.jsonl:1: the format must be torchtitan-grpo-rollouts 4, got .* 1",
        ),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            read(path)
    with pytest.raises(DataError, match=r"other\.gz cannot be read: Not a gzipped file"):
        read(path.rename(tmp_path / "other.gz"))
    with pytest.raises(DataError, match=r"missing\.gz cannot be read: .*No such file"):
        read(tmp_path / "missing.gz")
    record(path, [[group()]]).close()
    with pytest.raises(DataError, match=r":1: .* recorded with a vocabulary of 100 .* has 64"):
        read(path, vocab_size=64)
    message = r":1: .* with rollout\.temperature = 0\.7, but this run has 1\.0\. .*Set rollout"
    with pytest.raises(DataError, match=message):
        read(path, temperature=1.0)


def test_a_broken_line_is_named(path):
    record(path, [[group()]]).close()
    line = b'{"version": 1, "progress": {"position": 2}, "groups": [{"group_id": "x"}]}\n'
    with path.open("ab") as file:
        file.write(gzip.compress(line) if path.suffix == ".gz" else line)
    with pytest.raises(DataError, match=r":3: Expected `int`, got `str` - at `\$\.groups"):
        read(path)


def test_a_record_is_begun_with_a_run_s_first_batch(path):
    message = r"rollout\.record: .* must hold the 2 batches that this resumed run .*got %d of them"
    with pytest.raises(DataError, match=message % 0):
        record(path, [], first_version=2)
    assert not path.exists()
    record(path, [[group()]]).close()
    with pytest.raises(DataError, match=message % 1):
        record(path, [], first_version=2)
    assert len(read(path)) == 1


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_flipped_bit_anywhere_changes_nothing_or_is_refused_with_its_file(tmp_path, suffix):
    path = tmp_path / f"rollouts.{suffix}"
    record(path, [[group(4), group(9, reward=None)], [group(11)]]).close()
    content, expected = path.read_bytes(), read(path)
    num_refused, positions = 0, range(0, len(content), 5)
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        reader = reader_of(path)
        try:
            found = [batch for _, batch in reader]
        except DataError as error:
            assert str(path) in str(error)
            num_refused += 1
        else:  # a line that is cut off is told where it is replayed
            assert [b.version for b in found] == [b.version for b in expected[: len(found)]]
            assert reader.was_cut_off or len(found) == len(expected), position
    assert num_refused > len(positions) * 0.9


def test_lines_of_earlier_releases_have_no_checksum(path):
    record(path, [[group(4)], [group(9)]]).close()
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        lines = file.readlines()
    assert all(line.startswith(b'{"crc32":') for line in lines)
    with open_file(path, "wb") as file:
        file.writelines(b"{" + line.partition(b",")[2] for line in lines)
    assert [batch.groups[0].group_id for batch in read(path)] == [4, 9]
    with open_file(path, "wb") as file:  # a copy by way of another system
        file.writelines(line.replace(b"\n", b"\r\n") for line in lines)
    assert [batch.groups[0].group_id for batch in read(path)] == [4, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observed": [[1, 3]]}, "observed must be ascending spans within the 2 completion tokens"),
        ({"observed": [[1, 1], [0, 1]]}, "observed must be ascending spans"),
        ({"completion_ids": [1 << 40, 2]}, "out of bounds"),
        (
            {"teacher_top_ids": {"k": 3, "data": "AAAAAAAAAAA="}},
            r"teacher_top_ids must hold 6 values \(k = 3 for each of 2 completion tokens\), got 2",
        ),
    ],
)
def test_columns_that_cannot_be_read_are_refused_with_their_place(tmp_path, changes, message):
    path = tmp_path / "rollouts.jsonl"
    record(path, [[group(4)]]).close()
    header, line = path.read_bytes().splitlines()
    batch = json.loads(line)
    del batch["crc32"]
    batch["groups"][0]["rollouts"][1] |= changes
    path.write_bytes(b"\n".join([header, json.dumps(batch).encode(), b""]))
    with pytest.raises(DataError, match=rf"rollouts.jsonl:2, group 4: .*{message}"):
        read(path)
