"""The token that ends a completion is found wherever transformers writes it."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from torchtitan.grpo.models.hf_config import (
    ModelError,
    NoEosTokenError,
    eos_token_ids,
    read_hf_model,
)

END, END_ID = "<|im_end|>", 60
GENERATION, CONFIG = "generation_config.json", "config.json"
TOKENIZER, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"


@pytest.fixture
def folder(tmp_path):
    """A Qwen3 directory as transformers writes it: only the tokenizer names the end token."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, head_dim=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=32,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    words = {f"w{i}": i for i in range(END_ID)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["eos_token_id"] is None
    return tmp_path


def change(file, **values):
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(found | values))


def test_each_file_comes_before_those_behind_it(folder):
    assert read_hf_model(folder).eos_token_ids == (END_ID,)
    change(folder / SPECIAL, eos_token="w7")
    assert eos_token_ids(folder) == (END_ID,)
    change(folder / CONFIG, eos_token_id=5)
    assert eos_token_ids(folder) == (5,)
    change(folder / GENERATION, eos_token_id=[3, 4])
    assert eos_token_ids(folder) == (3, 4)
    change(folder / GENERATION, eos_token_id=None)  # hides nothing
    change(folder / CONFIG, eos_token_id=0)
    assert eos_token_ids(folder) == (0,)


@pytest.mark.parametrize("token", ["w7", {"content": "w7", "lstrip": False}])
def test_the_map_of_special_tokens_counts_last_in_either_spelling(folder, token):
    (folder / TOKENIZER).unlink()
    change(folder / SPECIAL, eos_token=token)
    assert eos_token_ids(folder) == (7,)


def test_where_nothing_names_it_all_that_was_looked_at_is_named(folder):
    change(folder / TOKENIZER, eos_token=None)
    with pytest.raises(ModelError, match=r"model\.hf_assets_path: ") as refusal:
        read_hf_model(folder)
    ids, token = "(eos_token_id: not set)", "(eos_token: not set)"
    for said in (f"{GENERATION} {ids}", f"{CONFIG} {ids}", f"{TOKENIZER} {token}", SPECIAL):
        assert said in str(refusal.value)


NOTHING = [None, [], [None], [None, None]]
WRONG = ["1", -1, 1.0, True, 64, {}, [1, "2"], [[1]], [1, None], [1, 64], [True]]


@pytest.mark.parametrize("value", NOTHING, ids=json.dumps)
def test_what_names_no_token_lets_the_next_file_decide(folder, value):
    change(folder / GENERATION, eos_token_id=value)
    change(folder / CONFIG, eos_token_id=value)
    assert eos_token_ids(folder) == (END_ID,)
    change(folder / CONFIG, eos_token_id=[5, 5, 7])
    assert eos_token_ids(folder) == (5, 7)
    change(folder / CONFIG, eos_token_id=value)
    change(folder / TOKENIZER, eos_token="" if value else {"content": None})
    change(folder / SPECIAL, eos_token="w7")
    assert eos_token_ids(folder) == (7,)


@pytest.mark.parametrize("value", WRONG, ids=json.dumps)
@pytest.mark.parametrize("file", [GENERATION, CONFIG])
def test_what_is_no_token_id_is_refused_with_its_file(folder, file, value):
    change(folder / file, eos_token_id=value)
    message = rf"eos_token_id in .*{file} must be a token id of the model, from 0 to 63, .* got "
    with pytest.raises(ModelError, match=message):
        read_hf_model(folder)


def test_an_end_token_that_the_tokenizer_or_the_model_does_not_have_is_refused(folder):
    change(folder / CONFIG, vocab_size=32)
    with pytest.raises(NoEosTokenError, match=r"id 60 must be below the model's vocab_size, 32"):
        eos_token_ids(folder)
    change(folder / TOKENIZER, eos_token="<|endoftext|>")
    with pytest.raises(NoEosTokenError, match=r"endoftext.*does not contain"):
        eos_token_ids(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(NoEosTokenError, match=r"there is no .*tokenizer\.json"):
        eos_token_ids(folder)


def test_a_file_that_holds_no_object_is_refused(folder):
    no_object = r"generation_config\.json must hold an object"
    for text, message in (("null", no_object), ("{", r"^model\.hf_assets_path must be a readable")):
        (folder / GENERATION).write_text(text)
        with pytest.raises(ModelError, match=message):
            read_hf_model(folder)
