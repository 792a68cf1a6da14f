# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""`examples/instructions.py`, and the prompts that `scripts/make_instructions.py` makes for it."""

import json
from pathlib import Path

import pytest
from load_script import REPOSITORY, load_script

FILES = ("train", "heldout", "heldout_kinds")


rewards = load_script("examples/instructions.py")
script = load_script("scripts/make_instructions.py")

PROMPT = "Tell me something about the harbor of a town."
ANSWER = "The ships wait quietly at the old pier."


def asks(kind, **parameters):
    return {"kind": kind, **parameters}


FOLLOWED = [
    (asks("word_range", least=8, most=8), ANSWER),
    (asks("word_range", least=7, most=7), "It's a well-known place: 1,000.50 ships there."),
    (asks("min_words", count=8), ANSWER),
    (asks("sentences", count=2), "Ships wait at the pier. Do people see them?"),
    (asks("sentences", count=2), 'Mr. Lee left at 3.5 p.m. with Dr. Who. "Ships wait here!"'),
    (asks("begins_with", word="Because"), '"because ships wait, people come'),
    (asks("ends_with_exclamation"), '"Ships wait at the old pier!"'),
    (asks("ends_with_question"), "Why do ships wait at a pier?"),
    (asks("contains", word="Home"), "Ships on water are going home soon."),
    (asks("word_times", word="and", count=2), "Ships and Boats AND sand are here now."),
    (asks("no_word", word="the"), "Other ships then wait here quietly."),
    (asks("no_commas"), ANSWER),
    (asks("no_digits"), ANSWER),
    (asks("quotes"), 'The ships wait "at the old" pier.'),
    (asks("quotes"), "The ships wait “at the old” pier."),
    (asks("bold"), "The ships wait **quietly** at a pier."),
    (asks("numbered"), "Here it is:\n1. ships wait there\n2. people come too"),
    (asks("quotes"), 'The "ships" and the "boats" wait at a pier.'),
    (asks("sentences", count=2), "Ships wait at the pier. People see them at 5 p.m."),
    (asks("min_words", count=6), "Ships\twait\tquietly\tat the pier."),
    (asks("json_object", keys=["name", "place"]), '{"place": "old pier", "name": 3}'),
    (asks("json_object", keys=["a"]), '```json\n{"a": ["ships", "boats"]}\n```'),
]

NOT_FOLLOWED = [
    (asks("word_range", least=9, most=20), ANSWER),
    (asks("word_range", least=2, most=7), ANSWER),
    (asks("min_words", count=9), ANSWER),
    (asks("sentences", count=2), ANSWER),
    (asks("sentences", count=2), "Ships wait at the pier. Do people see"),  # it is cut
    (asks("sentences", count=2), "Ships wait at the pier quietly. Yes."),
    (asks("begins_with", word="Because"), ANSWER),
    (asks("ends_with_exclamation"), "Ships wait! People come there too."),
    (asks("ends_with_question"), "Why do ships wait there? I know."),
    (asks("contains", word="home"), "Ships of homesick people wait there."),
    (asks("word_times", word="and", count=2), "Ships and boats are sandy here now."),
    (asks("word_times", word="and", count=2), "Ships and boats and sand and people."),
    (asks("no_word", word="the"), ANSWER),
    (asks("no_word", word="the"), "Look at the-ships that wait here quietly."),
    (asks("no_commas"), "The ships, big and small, wait here."),
    (asks("no_commas"), "The ships， big and small، wait here."),
    (asks("no_digits"), "The 3 ships wait at an old pier."),
    (asks("no_digits"), "The ships of dock ② wait at an old pier."),
    (asks("quotes"), 'The ships wait at the "pier" quietly.'),
    (asks("quotes"), 'A "ship" of 5" and another one of 6" wait here.'),
    (asks("quotes"), "The ships' crews wait 'at the' pier."),
    (asks("bold"), "The ships wait quietly, 2*3*4 of them."),
    (asks("bold"), "The ships wait like *this* at a pier."),
    (asks("numbered"), "1. ships wait there at a pier"),
    (asks("numbered"), "1. ships wait there\n3. people come too"),
    (asks("numbered"), "1. ships wait there at piers\n2. Ships wait there, at piers!"),
    (asks("numbered"), "1. ships wait there at a pier\n2. "),
    (asks("json_object", keys=["name", "place"]), '{"name": "Lee"}'),
    (asks("json_object", keys=["name"]), '{"name": "Lee", "place": "pier"}'),
    (asks("json_object", keys=["name"]), '{"name": "Lee", "name": "Ann"}'),
    (asks("json_object", keys=["name"]), '{"name": " "}'),
    (asks("json_object", keys=["name"]), '{"name": []}'),
    (asks("json_object", keys=["name", "place"]), '{"name": "place", "place": "old pier"}'),
    (asks("json_object", keys=["name", "place"]), '{"name": "old pier", "place": "old pier"}'),
    (asks("json_object", keys=["name", "place"]), '{"name": 1, "place": 2}'),
    (asks("json_object", keys=["name"]), '{"name": NaN}'),
    (asks("json_object", keys=["name"]), '["name", "Lee"]'),
    (asks("json_object", keys=["name"]), 'Here: {"name": "Lee"}'),
]


@pytest.mark.parametrize(("instruction", "text"), FOLLOWED)
def test_a_right_answer_follows_its_instruction(instruction, text):
    assert rewards.is_followed(instruction, text, PROMPT)


@pytest.mark.parametrize(("instruction", "text"), NOT_FOLLOWED)
def test_a_wrong_answer_does_not_follow_its_instruction(instruction, text):
    assert not rewards.is_followed(instruction, text, PROMPT)


def test_deeply_nested_json_is_no_object():
    assert not rewards.json_object("[" * 100_000, ["name"])


def test_every_kind_has_right_and_wrong_answers_here_and_parameters_to_draw():
    for examples in (FOLLOWED, NOT_FOLLOWED):
        assert {instruction["kind"] for instruction, _ in examples} == set(rewards.KINDS)
    assert set(script.PARTS) == set(rewards.KINDS)


@pytest.mark.parametrize(
    "text",
    ["", " \n", "Yes.", "Ships wait.", "ships " * 9, "a b c d e f g h", "1 2 3 4 5 6 7", ". ! ?", "\u200b\u2060" * 9, "\u3164 " * 9, PROMPT],
)  # fmt: skip
def test_a_degenerate_answer_follows_nothing(text):
    for instruction, _ in FOLLOWED:
        assert not rewards.is_followed(instruction, text, PROMPT), instruction


def test_an_answer_cannot_be_the_sentence_of_its_instruction():
    instruction = asks("contains", word="home")
    sentence = rewards.statement(instruction)
    assert rewards.is_followed(instruction, sentence, PROMPT)
    assert not rewards.is_followed(instruction, sentence, f"{PROMPT} {sentence}")


def test_invisible_characters_hide_nothing():
    assert not rewards.is_followed(
        asks("no_word", word="the"), "Old ships of t\u200bhe town wait.", ""
    )
    assert not rewards.is_followed(asks("no_commas"), "Old ships wait\uff0c as ever, quietly.", "")


def test_the_rewards_count_the_instructions_of_each_row_in_texts_and_messages():
    asked = [asks("no_digits"), asks("no_commas", count=None, word=None)]
    texts = [ANSWER, "The 3 ships wait at the old pier.", "The 3 ships, all of them, wait."]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    for prompts, completions in (
        ([PROMPT] * 3, texts),
        ([[{"role": "user", "content": PROMPT}]] * 3, chats),
    ):
        arguments = {"prompts": prompts, "completions": completions, "instructions": [asked] * 3}
        assert rewards.instructions_followed(**arguments, answer=[1] * 3) == [1.0, 0.5, 0.0]
        assert rewards.all_followed(**arguments, answer=[1] * 3) == [1.0, 0.0, 0.0]


# -- scripts/make_instructions.py, on a few questions, and what it has made -------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("instructions")
    with (folder / "questions.jsonl").open("w") as file:
        for n in range(200):
            begin = f"Ann has {n} apples. She buys {n + 1} more."
            for question in (
                f"{begin} How many has she?",
                f"{begin} " + "Ben likes pears. " * 10 + "How many has she?",
            ):
                file.write(json.dumps({"question": question, "answer": f"#### {2 * n + 1}"}) + "\n")
    for name in ("once", "again"):
        sizes = ["--train-rows", "96", "--heldout-rows", "16", "--output", str(folder / name)]
        script.main(["--questions", str(folder / "questions.jsonl"), *sizes])
    return folder


def read(folder: Path) -> dict[str, list[dict]]:
    return {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").open()] for name in FILES
    }


def test_the_same_questions_give_the_same_files(made):
    assert read(made / "once") == read(made / "again")
    assert {name: len(rows) for name, rows in read(made / "once").items()} == {
        "train": 96, "heldout": 16, "heldout_kinds": 16,
    }  # fmt: skip


@pytest.mark.parametrize("shipped", [False, True], ids=["made", "shipped"])
def test_prompts_state_their_instructions_and_held_out_ones_are_not_trained_on(made, shipped):
    files = read(REPOSITORY / "assets" / "instructions" if shipped else made / "once")
    requests, kinds = {}, {}
    for name, rows in files.items():
        assert len({row["prompt"] for row in rows}) == len(rows)
        for row in rows:
            assert set(row) == {"prompt", "instructions"}
            stated = " ".join(map(rewards.statement, row["instructions"]))
            request, found, rest = row["prompt"].partition(" " + stated)
            assert found and not rest
            assert request not in requests or requests[request] == name
            requests[request] = name
            parts = [script.PARTS[one["kind"]] for one in row["instructions"]]
            assert len(set(parts)) == len(parts) in (1, 2)
            assert parts == [script.ALONE] or script.ALONE not in parts
        kinds[name] = {one["kind"] for row in rows for one in row["instructions"]}
    assert kinds["train"] == kinds["heldout"] == set(rewards.KINDS) - set(script.HELD_OUT)
    assert kinds["heldout_kinds"] == set(script.HELD_OUT)
    topics = {
        name: {t for t in script.TOPICS if any(requests.get(f.format(t)) == name for f in script.TOPIC_FORMS)}
        for name in FILES
    }  # fmt: skip
    assert not topics["train"] & (topics["heldout"] | topics["heldout_kinds"])


def test_too_few_questions_and_other_files_are_refused(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "How many apples are there?"}\n')
    with pytest.raises(ValueError, match="must suffice for 128 prompts, got"):
        script.main(["--questions", str(path), "--output", str(tmp_path)])
    path.write_text('{"prompt": "How many apples are there?"}\n')
    with pytest.raises(ValueError, match="line 1: must have the column question"):
        script.read_questions(path)
