import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_files import character_tokenizer
from tokenizers import processors

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.ptx import PtxStream
from torchtitan.grpo.system.errors import DataError

CHARACTERS = "?^$abcdefghijklmnopqrstuvwxyz"
BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="^ $A", special_tokens=[("^", BOS)]
    )
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def open_stream(model, tmp_path_factory):
    def make(rows, vocab_size=50, row_len=8, seed=0):
        path = tmp_path_factory.mktemp("ptx") / "mix.jsonl"
        lines = rows if isinstance(rows, str) else "\n".join(json.dumps(row) for row in rows)
        if lines:
            path.write_text(lines)
        config, described = JobConfig(), SimpleNamespace(path=model, eos_token_ids=(EOS, 0))
        described.vocab_size = vocab_size
        config.grpo.ptx_path, config.training.seq_len, config.debug.seed = str(path), row_len, seed
        return PtxStream(config, described)  # pyright: ignore[reportArgumentType]

    return make


def texts(samples):
    return ["".join(CHARACTERS[i] for i in sample.completion_ids) for sample in samples]


def test_a_row_becomes_a_prompt_and_a_completion_that_ends(open_stream):
    (sample,) = open_stream([{"completion": "a$"}]).take(0, 1)
    assert (sample.prompt_ids.tolist(), sample.completion_ids.tolist()) == ([BOS], [3, EOS])
    (sample,) = open_stream([{"prompt": "ab", "completion": "cd"}]).take(0, 1)
    assert sample.prompt_ids.tolist() == [BOS, 3, 4]
    assert sample.completion_ids.tolist() == [5, 6, EOS]
    assert sample.generator_logprobs is None
    assert sample.num_predicted == 3


def test_rows_that_are_too_long_are_left_out_and_counted(open_stream):
    rows = [{"completion": "a" * n} for n in (1, 6, 7, 20)]
    stream = open_stream(rows, row_len=8)
    assert (len(stream), stream.num_too_long) == (2, 2)
    with pytest.raises(DataError, match=r"grpo\.ptx_path: .*training\.seq_len \(2\).*got 4"):
        open_stream(rows, row_len=2)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 3))
def test_each_epoch_holds_every_row_once_and_any_step_can_be_asked_for(
    open_stream, num_rows, per_step, seed
):
    rows = [{"completion": chr(ord("a") + n)} for n in range(num_rows)]
    stream = open_stream(rows, seed=seed)
    in_order = [text for step in range(num_rows) for text in texts(stream.take(step, per_step))]
    for epoch in range(per_step):
        part = in_order[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(part) == [f"{row['completion']}$" for row in rows]
    last = num_rows - 1  # which a resumed run asks for first
    resumed = open_stream(rows, seed=seed).take(last, per_step)
    assert texts(resumed) == in_order[last * per_step :]


def test_the_seed_gives_the_order(open_stream):
    rows = [{"completion": c} for c in "abcdefgh"]
    orders = {tuple(texts(open_stream(rows, seed=seed).take(0, 8))) for seed in range(4)}
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            '{"completion": "a"}\n\nno json\n',
            r"mix\.jsonl:3: every line of grpo\.ptx_path must be a JSON object",
        ),
        ('{"prompt": "a"}\n', r"mix\.jsonl:1: an example must have a string completion"),
        ('{"completion": 3}\n', r"mix\.jsonl:1: an example must .*got \{'completion': 3\}"),
        ('{"completion": ""}\n', r"mix\.jsonl:1: the completion must have a token, got ''"),
        ("\n", r"must hold an example .*got 0 examples that are longer"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(open_stream, rows, message):
    with pytest.raises(DataError, match=message):
        open_stream(rows)


def test_a_foreign_tokenizer_and_a_missing_file_are_refused(open_stream):
    with pytest.raises(DataError, match=r"token id 28, but the model's vocabulary has only 20"):
        open_stream([{"completion": "z"}], vocab_size=20)
    with pytest.raises(DataError, match=r"grpo\.ptx_path: .*mix\.jsonl cannot be read: No such"):
        open_stream("")
