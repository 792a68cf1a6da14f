# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_files import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.ptx import PtxStream
from torchtitan.grpo.data.supervised import ExampleStream
from torchtitan.grpo.rollout.model_match import prompt_notes
from torchtitan.grpo.rollout.tokenizer import TextCodec, TextTooLong

BOS, EOS, SEP = 256, 257, 258
MARKS = ["<s>", "</s>", "[SEP]"]
BYTES = processors.ByteLevel(trim_offsets=False)


def template(single: str) -> processors.TemplateProcessing:
    ids = list(zip(MARKS, (BOS, EOS, SEP), strict=True))
    return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=ids)


PROCESSORS = {
    "none": (None, [], []),
    "bytes": (BYTES, [], []),
    "appends two": (template("$A [SEP] </s>"), [], [SEP, EOS]),
    "does both": (template("<s> $A </s>"), [BOS], [EOS]),
    "prepends two": (template("[SEP] <s> $A </s> </s>"), [SEP, BOS], [EOS, EOS]),
    "begins and ends alike": (template("</s> $A </s>"), [EOS], [EOS]),
    "BERT": (processors.BertProcessing(("</s>", EOS), ("<s>", BOS)), [BOS], [EOS]),
    "RoBERTa": (processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS)), [BOS], [EOS]),
    "sequence": (processors.Sequence([BYTES, template("<s> $A </s>")]), [BOS], [EOS]),
}


def make(folder: Path, processor) -> TextCodec:
    """Writes a tokenizer of bytes, which also cuts and pads as its training run once did."""
    tokenizer = byte_tokenizer(MARKS)
    if processor is not None:
        tokenizer.post_processor = processor
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_eos_token": True}))
    return TextCodec(str(folder), [EOS])


@pytest.mark.parametrize("name", PROCESSORS)
def test_what_is_put_before_a_prompt_stays_and_what_is_put_after_it_does_not(name, tmp_path):
    processor, before, after = PROCESSORS[name]
    codec = make(tmp_path, processor)
    own = codec.encode_continuation("2 + 3 = ?")
    assert len(own) == 9 and not {BOS, EOS, SEP} & set(own)
    assert codec.encode("2 + 3 = ?") == before + own
    # A text that was rendered before has its special tokens, which then stand there once.
    text = "".join(MARKS[token - BOS] for token in before) + "2 + 3 = ?"
    assert codec.encode(text) == before + own
    assert codec.encode("2</s>") == before + own[:1] + [EOS], "what the user writes stays"
    assert codec.encode("") == before
    (*note,) = prompt_notes(codec, is_chat=False)
    assert codec.left_out() == [MARKS[token - BOS] for token in after]
    assert len(note) == bool(after) and all(f"{MARKS[t - BOS]!r}" in note[0] for t in after)
    # Supervised examples have the prompts of rollouts, and end once.
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "2+3=", "completion": "5"}) + "\n")
    config = JobConfig()
    config.training.seq_len, config.grpo.ptx_path = 64, str(file)
    model: Any = SimpleNamespace(path=tmp_path, eos_token_ids=(EOS,), vocab_size=300)
    stream = ExampleStream(config, model, str(file), "sft.path")
    for sample in (stream.next(), *PtxStream(config, model).take(0, 1)):
        assert sample.prompt_ids.tolist() == before + codec.encode_continuation("2+3=")
        assert sample.completion_ids.tolist() == [*codec.encode_continuation("5"), EOS]
    stream.close()


@pytest.mark.parametrize(
    ("kind", "settings", "before"),
    [
        ("LlamaTokenizerFast", {"add_bos_token": True}, [BOS]),
        ("LlamaTokenizer", {}, [BOS]),
        ("LlamaTokenizerFast", {"add_bos_token": False}, []),
        ("GemmaTokenizer", {"bos_token": {"content": "<s>", "lstrip": False}}, [BOS]),
        ("CodeLlamaTokenizerFast", {}, [BOS]),
        ("CohereTokenizerFast", {}, [BOS]),
        ("GPTNeoXTokenizerFast", {}, []),
        ("GPTNeoXTokenizerFast", {"add_bos_token": True}, [BOS]),
        ("LlamaTokenizerFast", {"bos_token": "<unknown>"}, [SEP]),
        ("LlamaTokenizerFast", {"bos_token": None}, [SEP]),
        ("Qwen2TokenizerFast", {"add_bos_token": True}, [SEP]),
        ("PreTrainedTokenizerFast", {"add_bos_token": True}, [SEP]),
    ],
)
def test_texts_begin_as_transformers_4_began_them(kind, settings, before, tmp_path):
    """Its classes for these families replace what tokenizer.json says."""
    make(tmp_path, template("[SEP] $A"))
    config = {"tokenizer_class": kind, "bos_token": "<s>"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    codec = TextCodec(str(tmp_path), [EOS])
    assert codec.encode("q 0") == before + codec.encode_continuation("q 0")
    assert codec.encode("<s>q") == ([] if before == [BOS] else before) + [
        BOS,
        *codec.encode_continuation("q"),
    ]


CHAT = (
    "{% for t in tools or [] %}{{ t|tojson }}{% endfor %}"
    "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
)
SPECIAL = {
    "user": [{"role": "user", "content": "a</s>b"}],
    "user, twice": [{"role": "user", "content": "</s></s>"}],
    "system": [{"role": "system", "content": "<s>"}, {"role": "user", "content": "a"}],
    "tool": [{"role": "user", "content": "a"}, {"role": "tool", "content": '{"x": "</s>"}'}],
    "not whole": [{"role": "user", "content": "</s"}, {"role": "user", "content": ">"}],
    "marked": [{"role": "user", "content": "\ufdd1</s> \ufdd1<\ufdd0/s> <\ufdd0/s>"}],
    "of another form": [{"role": "user", "content": "<|mark|> <\uff5cmark\uff5c>"}],
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_tokens_that_data_spells_are_its_text(name, tmp_path):
    messages = SPECIAL[name]
    tokenizer = byte_tokenizer([*MARKS])
    tokenizer.add_tokens(["<|mark|>", "<\uff5cmark\uff5c>", "<think>"])  # not said to be special
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    plain, special = (TextCodec(str(tmp_path), [], special_tokens=on) for on in (False, True))
    ids = plain.encode_chat(messages, [{"name": "</s>"}])
    written = [token for token in ids if token >= BOS]
    assert written == [BOS, EOS] * len(messages), "of the template alone"
    if name != "marked":
        text = special.decode_exactly(special.encode_chat(messages, [{"name": "</s>"}]))
        assert plain.decode_exactly(ids) == text
    assert len(special.encode_chat(messages, [{"name": "</s>"}])) < len(ids)
    thinks = [{"role": "user", "content": "</s><think>"}]
    assert plain.encode_chat(thinks).count(tokenizer.token_to_id("<think>")) == 1
    said = [{"role": "assistant", "content": "</s>"}]
    assert plain.encode_chat(said) == special.encode_chat(said) == [BOS, EOS, EOS]
    assert EOS not in plain.encode_observation("\ufdd1</s></s>", has_special_tokens=False)


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Special tokens of several families, some of which overlap, and a template that prints tools."""
    folder = tmp_path_factory.mktemp("spelled")
    byte_tokenizer([*MARKS, *SPELLINGS]).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return TextCodec(str(folder), [])


SPELLINGS = [
    "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[INST]",
    "[[X]]", "[X]", "X]]", "$$",
]  # fmt: skip
HIDDEN = {
    "alone": "{0}{1}",
    "twice": "{0}{1}{0}{1}",
    "inside": "{0}{mark}{1}",
    "inside, behind one": "{0}{1} {0}{mark}{1}",
    "several": "{0}{mark}{mark}{1} {mark}{0}{1}{mark}",
    "before": "{mark}{0}{1}",
    "behind": "{0}{1}{mark}",
    "overlapping": "{0}{1}{1}",
    "half before": "{0}{0}{mark}{1}",
}


@pytest.mark.parametrize("form", HIDDEN)
@pytest.mark.parametrize("mark", ["\ufdd0", "\ufdd1", "\ufdd0\ufdd1", "\ufdd1\ufdd0"])
def test_no_code_point_makes_data_a_special_token(form, mark, spelled: TextCodec) -> None:
    cut = [HIDDEN[form].format(s[:n], s[n:], mark=mark) for s in SPELLINGS for n in (1, len(s) - 1)]
    text = "".join(cut)
    said = [{"role": "user", "content": text}, {"role": "tool", "content": f"x{text}"}]
    tools = [{"name": text, "parameters": {"properties": {text: {"description": text}}}}]
    ids = spelled.encode_chat(said, tools)
    assert [token for token in ids if token >= BOS] == [BOS, EOS] * 2, "of the template alone"
    assert max(spelled.encode_observation(text, has_special_tokens=False)) < BOS
    spoken = [{"role": "assistant", "content": mark}, {"role": "user", "content": text}]
    assert [token for token in spelled.encode_chat(spoken) if token >= BOS] == [BOS, EOS] * 2


@pytest.mark.parametrize(
    ("vocabulary", "size", "known", "unknown"),
    [
        ({"a": 0, "b": 1}, 2, [], ()),
        ({"a": 0, "b": 1}, 4, [], (2, 3)),
        ({"a": 0, "b": 3}, 4, [], (1, 2)),
        ({"a": 0, "b": 9}, 4, [], (1, 2, 3)),
        ({"a": 1}, 4, [], (0, 2, 3)),
        ({"a": 0}, 4, [3], (1, 2)),
    ],
)
def test_ids_without_a_token_are_found_behind_the_tokenizer_and_inside_it(
    vocabulary, size, known, unknown, tmp_path
):
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextCodec(str(tmp_path), []).unknown_ids(size, known) == unknown


@pytest.fixture(scope="module")
def bounded_codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """A tokenizer with merges, and with long tokens of blanks and of special text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=["</s>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    words = ["the long token of many letters", " " * 64, "=" * 64, "0123456789"] * 50
    tokenizer.train_from_iterator(words, trainer)
    folder = tmp_path_factory.mktemp("bounded")
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(str(folder), [0])


LONG_TEXTS = {
    "blanks": " ",
    "rulers": "=",
    "words": "the long token of many letters ",
    "digits": "0123456789",
    "rare bytes": "\u00e9\u6570\U0001f9a9",
    "special tokens": "<|im_start|>",
    "mixed": " " * 150 + "the token" + "=" * 70 + "<|im_start|>7",
}


@pytest.mark.parametrize("kind", LONG_TEXTS)
def test_a_bounded_codec_refuses_only_what_cannot_fit(bounded_codec: TextCodec, kind: str) -> None:
    text = LONG_TEXTS[kind] * (300_000 // len(LONG_TEXTS[kind]))
    ids = bounded_codec.encode_continuation(text)
    assert bounded_codec.bounded(len(ids)).encode_continuation(text) == ids
    with pytest.raises(TextTooLong):
        bounded_codec.bounded(min(len(ids), len(text)) // 8).encode_continuation(text)
    # The text may be long, but what is tokenized of it then is not.
    with pytest.raises(TextTooLong):
        bounded_codec.bounded(100).encode_continuation(LONG_TEXTS[kind] * 10**6)


def test_marks_of_plain_text_do_not_count_as_its_tokens(bounded_codec: TextCodec) -> None:
    text = (" " * 64 + "<|im_start|>") * 3000
    ids = bounded_codec.encode_observation(text, has_special_tokens=False)
    bounded = bounded_codec.bounded(len(ids))
    assert bounded.encode_observation(text, has_special_tokens=False) == ids


HALVES = [
    "a",
    "\u00e9",
    "\u65e5\u672c",
    "\U0001f9a9 x",
    "\ufffd",
    "\u00ff\u00bd \n",
    "\U0001f468\u200d\U0001f469",
]


@pytest.mark.parametrize("text", HALVES)
@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_the_bytes_of_tokens_are_those_of_the_text(tmp_path: Path, text: str, kind: str) -> None:
    codec = make(tmp_path, None)
    if kind == "byte fallback":  # as SentencePiece spells what is not in its vocabulary
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "x": 257}
        tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        codec = TextCodec(str(tmp_path), [])
    found = [codec.token_bytes(token) for token in codec.encode_continuation(text)]
    assert b"".join(found) == text.encode()
    pieces = codec.pieces(codec.encode_continuation(text))
    assert "".join(pieces) == text
    assert text != "\U0001f9a9 x" or pieces[:4] == ["", "", "", "\U0001f9a9"]
    assert text != "\U0001f9a9 x" or found[:4] == [bytes([byte]) for byte in (240, 159, 166, 169)]


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_pieces_of_any_tokens_are_the_whole_text(tmp_path: Path, kind: str) -> None:
    """Bytes that are no text included, such as a model writes that has not been trained."""
    codec = make(tmp_path, None)
    if kind == "byte fallback":
        blank = "\u2581"
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
        vocabulary |= {f"{blank}a": 256, "x": 257, blank: 258}
        tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        parts = [decoders.Replace(blank, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        codec = TextCodec(str(tmp_path), [])
        assert codec.pieces([256, 258, 257]) == [" a", " ", "x"]
    random, some = Random(0), sorted(codec.vocabulary().values())
    first = codec.encode_continuation("x")
    for _ in range(300):
        ids = random.choices(some, k=random.randrange(30))
        whole = codec.decode_exactly([*first, *ids])
        assert "x" + "".join(codec.pieces(ids)) == whole


def test_special_tokens_may_be_kept_in_a_text(tmp_path: Path) -> None:
    codec = make(tmp_path, None)
    ids = codec.encode_continuation("<s>1[SEP]2</s>")
    assert [codec.decode(ids), codec.decode(ids, ["[SEP]"])] == ["12", "1[SEP]2"]
