import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts import assert_same, rollout
from rollouts import group as group_of

from torchtitan.grpo.commands.show import show
from torchtitan.grpo.data.record import RecordReader, RolloutRecorder
from torchtitan.grpo.rollout.codec import pack
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
    # Those that are not trained on are for logs.
    recorder = record(path, [[replace(groups[0], left_out=(plain,)), groups[1]], [group(11)]])
    batches = read(path)  # before close: each batch is on disk once it is written
    recorder.close()
    assert [(b.version, b.progress, len(b.groups)) for b in batches] == [
        (0, PromptProgress(10, (3, 7)), 2),
        (1, PromptProgress(20, (3, 7)), 1),
    ]
    assert_same(batches[0].groups, groups)


@given(
    logprobs=st.lists(st.floats(width=32), min_size=1, max_size=20),
    reward=st.floats(allow_nan=False, allow_infinity=False),
    data=st.data(),
)
def test_numbers_keep_every_bit(tmp_path_factory, logprobs, reward, data):
    mask = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(logprobs), max_size=len(logprobs)))
    )
    plain, *_ = group(logprobs=logprobs, reward=reward).rollouts
    mixed = replace(plain, sampled=mask)
    path = tmp_path_factory.mktemp("record") / "rollouts"
    record(path, [[group_of(0, mixed, plain)]]).close()
    found, other = read(path)[0].groups[0].rollouts
    assert found.logprobs.tobytes() == other.logprobs.tobytes() == plain.logprobs.tobytes()
    assert np.float64(found.reward).tobytes() == np.float64(reward).tobytes()
    assert found.sampled is not None and other.sampled is None
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


def test_a_last_batch_that_was_cut_off_ends_the_file(path):
    record(path, [[group(g)] for g in range(3)]).close()
    content = path.read_bytes()
    for missing in (10, 100):
        path.write_bytes(content[:-missing])
        reader = reader_of(path)
        assert [batch.version for _, batch in reader] == [0, 1]
        assert reader.was_cut_off
    # A run that resumes behind it writes a whole file again.
    record(path, [[group(7)]], first_version=2).close()
    assert [batch.version for batch in read(path)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (
            b"no record, but a text of some length\n",
            "it must be a file that rollout.record has written",
        ),
        (
            b'{"crc32":1,"format":"torchtitan-grpo-rollouts","format_version":4,"vocab_size":100}\n',
            r"format 5, but it begins as the JSON lines of formats up to 4\. .* record again",
        ),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content, message):
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"rollout\.replay: .*other\.jsonl: .*{message}"):
        read(path)


def test_a_record_of_another_model_or_temperature_is_refused(tmp_path):
    path = tmp_path / "other"
    for name, message in (("missing.gz", "No such file"), ("text.gz", "Not a gzipped file")):
        (tmp_path / "text.gz").write_bytes(b"no record")
        with pytest.raises(DataError, match=rf"{name}: it cannot be read: .*{message}"):
            read(tmp_path / name)
    record(path, [[group()]]).close()
    with pytest.raises(DataError, match=r" recorded with a vocabulary of 100 .* has 64"):
        read(path, vocab_size=64)
    message = r" with rollout\.temperature = 0\.7, but this run has 1\.0\. .*Set rollout"
    with pytest.raises(DataError, match=message):
        read(path, temperature=1.0)


def test_what_was_not_written_as_a_batch_is_named(path, monkeypatch):
    recorder = record(path, [[group()]])
    monkeypatch.setattr("torchtitan.grpo.data.record.pack", lambda batch: pack([batch.version]))
    recorder.write(1, PromptProgress(), [])
    recorder.close()
    with pytest.raises(
        DataError, match=r"block 2 cannot be decoded: Expected `object`, got `array`"
    ):
        read(path)


def test_a_record_is_shown_as_json_lines(path, capsys):
    record(path, [[group(4)], [group(9, reward=None)]]).close()
    assert show([str(path)]) == 0
    header, first, second = map(json.loads, capsys.readouterr().out.strip().split("\n"))
    assert header["vocab_size"] == VOCAB_SIZE
    assert [line["groups"][0]["group_id"] for line in (first, second)] == [4, 9]
    shown = first["groups"][0]["rollouts"][0]
    assert shown["completion"] == 'líne\n"two" \u2028' and shown["token_ids"] == [0, 1]
    assert np.float32(shown["logprobs"]).tolist() == group().rollouts[0].logprobs.tolist()
    path.write_bytes(path.read_bytes()[:-20])
    assert show([str(path)]) == 0
    told = capsys.readouterr()
    assert told.out.count("\n") == 2 and "is cut off" in told.err


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
        else:  # a block that is cut off is told where it is replayed
            assert [b.version for b in found] == [b.version for b in expected[: len(found)]]
            assert reader.was_cut_off or len(found) == len(expected), position
    assert num_refused > len(positions) * 0.9
