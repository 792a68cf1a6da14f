# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes `assets/instructions`: short requests with instructions that `examples/instructions.py` verifies.

    python scripts/make_instructions.py --questions GSM8K/train.jsonl

The script writes three files with the columns `prompt` and `instructions`: `train.jsonl`; `heldout.jsonl`, with the same
kinds of instructions and other requests; and `heldout_kinds.jsonl`, with kinds that are in no training prompt. A
request is a question of GSM8K, the first sentence of another one as the beginning of a story, or a topic of this
file's own. No question, sentence or topic is in two of the files. The same questions and the same seed give the same
files.

GSM8K (https://github.com/openai/grade-school-math, `openai/gsm8k` on the Hub) is under the MIT licence, copyright (c)
2021 OpenAI. The shipped files were made from its training split.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.append(str(REPOSITORY / "examples"))

from instructions import SENTENCE_END, statement  # noqa: E402

Instruction = dict[str, Any]

LONGEST_QUESTION = 180
LONGEST_SENTENCE = 100
"""In characters: a prompt then has at most 100 tokens of SmolLM2's tokenizer."""

TOPICS = (
    "the sea", "a garden in spring", "a rainy day", "an old bridge", "a small village", "winter in the mountains",
    "a dog that likes music", "a good breakfast", "a long train ride", "a lost key", "the moon", "a busy market",
    "a quiet library", "learning to swim", "a birthday party", "a cat in a window", "the first day of school",
    "a walk in the forest", "baking bread", "a letter from a friend", "a football match", "a storm at night",
    "a river in summer", "growing tomatoes", "a visit to the zoo", "an empty house", "a new bicycle", "falling leaves",
    "a painting of a horse", "a shop that sells clocks", "fishing with a grandfather", "the smell of coffee",
    "a bird that cannot fly", "a song from childhood", "a broken chair", "a night under the stars", "planting a tree",
    "a clever fox", "a market for old books", "a snowman", "a boat on a lake", "moving to a new city", "a teacher",
    "a picnic", "a lighthouse", "bees", "a farm in autumn", "a kite",
)  # fmt: skip
TOPIC_FORMS = ("Write about {}.", "Describe {}.", "Tell me something about {}.", "Write a story about {}.")  # fmt: skip

WORDS = ("because", "day", "good", "home", "people", "time", "water", "world")
FIRST_WORDS = ("A", "I", "In", "My", "Once", "The", "There", "To")
RANGES = ((8, 15), (10, 20), (15, 25), (20, 30))
KEYS = (("name", "answer"), ("answer", "reason"), ("title", "text"), ("place", "person"))

PARAMETERS: dict[str, Callable[[random.Random], Instruction]] = {
    "word_range": lambda rng: dict(zip(("least", "most"), rng.choice(RANGES), strict=True)),
    "min_words": lambda rng: {"count": rng.choice((25, 30, 35))},
    "sentences": lambda rng: {"count": rng.choice((2, 3))},
    "begins_with": lambda rng: {"word": rng.choice(FIRST_WORDS)},
    "contains": lambda rng: {"word": rng.choice(WORDS)},
    "word_times": lambda rng: {"word": rng.choice(("and", *WORDS)), "count": rng.choice((2, 3))},
    "no_word": lambda rng: {"word": rng.choice(("the", "a", "and"))},
    "json_object": lambda rng: {"keys": list(rng.choice(KEYS))},
}
"""How parameters are drawn. Kinds that are not listed have none."""

ALONE = "whole"
PARTS = {
    "word_range": "length",
    "min_words": "length",
    "sentences": "length",
    "begins_with": "start",
    "ends_with_exclamation": "end",
    "ends_with_question": "end",
    "contains": "vocabulary",
    "word_times": "vocabulary",
    "no_word": "vocabulary",
    "no_commas": "characters",
    "no_digits": "characters",
    "quotes": "marks",
    "bold": "marks",
    "numbered": ALONE,
    "json_object": ALONE,
}
"""What each kind is about. Two instructions of a prompt are about different parts of an answer, since no answer could,
for example, have two lengths. An instruction about the whole answer stands alone."""
HELD_OUT = ("ends_with_question", "no_word", "bold", "numbered")
"""Kinds that are in no training prompt."""


def read_questions(path: Path) -> list[str]:
    """Returns the questions of a file in GSM8K's form.

    Raises:
        ValueError: If a line has no question.
    """
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        question = json.loads(line).get("question")
        if not isinstance(question, str):
            raise ValueError(
                f"{path}, line {number}: must have the column question with a text, got {line:.80}. "
                "Name GSM8K's train.jsonl with --questions."
            )
        questions.append(" ".join(question.split()))
    return questions


def part(items: list[str], begin: float, end: float) -> list[str]:
    """Returns the items between two fractions of a list."""
    return items[round(begin * len(items)) : round(end * len(items))]


def requests_of(rng: random.Random, questions: list[str], topics: list[str]) -> Iterator[str]:
    """Yields different requests without instructions: of ten, five questions, three stories and two topics."""
    whole = (question for question in questions if len(question) <= LONGEST_QUESTION)
    begun = (first_sentence(question) for question in questions if len(question) > LONGEST_QUESTION)
    stories = (f"Continue this story: {sentence}" for sentence in begun if sentence)
    for turn in cycle("qsqtqsqtqs"):
        if turn == "t":
            request = rng.choice(TOPIC_FORMS).format(rng.choice(topics))
        else:
            request = next(whole if turn == "q" else stories, None)
        if request is None:
            return
        yield request


def first_sentence(question: str) -> str | None:
    """Returns the first sentence of a question, if it is short and a statement."""
    sentence = SENTENCE_END.split(question)[0] + "."
    return sentence if len(sentence) <= LONGEST_SENTENCE and question.startswith(sentence) else None


def draw_instructions(rng: random.Random, kinds: Iterator[str], num: int) -> list[Instruction]:
    """Returns ``num`` instructions that one answer can follow, or one that stands alone."""
    drawn = [next(kinds)]
    while len(drawn) < num and PARTS[drawn[0]] != ALONE:
        kind = next(kinds)
        if PARTS[kind] not in (ALONE, *(PARTS[other] for other in drawn)):
            drawn.append(kind)
    return [
        {"kind": kind, **(PARAMETERS[kind](rng) if kind in PARAMETERS else {})} for kind in drawn
    ]


def draw_rows(
    rng: random.Random, requests: Iterator[str], kinds: list[str], count: int
) -> list[dict[str, Any]]:
    """Returns rows with different prompts, of which every second one has two instructions if it can.

    Raises:
        ValueError: If there are too few questions.
    """
    rows: dict[str, dict[str, Any]] = {}
    shuffled = (kind for _ in repeat(None) for kind in rng.sample(kinds, len(kinds)))
    for request in requests:
        if len(rows) == count:
            break
        instructions = draw_instructions(rng, shuffled, 1 + len(rows) % 2)
        prompt = " ".join([request, *map(statement, instructions)])
        rows[prompt] = {"prompt": prompt, "instructions": instructions}
    if len(rows) < count:
        raise ValueError(
            f"The questions must suffice for {count} prompts, got {len(rows)}. Name a larger file with --questions, or ask for fewer rows."
        )
    return list(rows.values())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description="Make prompts with instructions that a program can verify."
    )
    parser.add_argument("--questions", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "assets" / "instructions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-rows", type=int, default=1536)
    parser.add_argument("--heldout-rows", type=int, default=128, help="of each held-out file")
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    questions, topics = read_questions(options.questions), list(TOPICS)
    rng.shuffle(questions)
    rng.shuffle(topics)
    trained = [kind for kind in PARTS if kind not in HELD_OUT]
    options.output.mkdir(parents=True, exist_ok=True)
    for name, begin, end, kinds, count in (
        ("heldout", 0.0, 0.1, trained, options.heldout_rows),
        ("heldout_kinds", 0.1, 0.2, list(HELD_OUT), options.heldout_rows),
        ("train", 0.2, 1.0, trained, options.train_rows),
    ):
        requests = requests_of(rng, part(questions, begin, end), part(topics, begin, end))
        rows = draw_rows(rng, requests, kinds, count)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (options.output / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
