# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes `assets/arithmetic`: sums and differences of numbers up to 100, asked in words.

    python scripts/make_arithmetic.py

The script writes `train.jsonl` and `heldout.jsonl` (columns `prompt` and `answer`). A pair of numbers that is
held out is in no training prompt, in neither order and with neither sign. Differences are never negative. The
same seed gives the same files.
"""

import argparse
import json
import random
from pathlib import Path

SUMS = (
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "How much is {a} and {b} together?",
    "I have {a} apples and get {b} more. How many apples do I have now?",
)
DIFFERENCES = (
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "What is the difference of {a} and {b}?",
    "How much is left of {a} when {b} are taken away?",
    "I have {a} apples and give away {b}. How many apples do I have left?",
)
LARGEST = 100


def draw_rows(rng: random.Random, pairs: list[tuple[int, int]]) -> list[dict[str, str]]:
    """Returns one row for each pair of numbers. Half of them are sums."""
    rows = []
    for index, (small, large) in enumerate(pairs):
        if index % 2:
            a, b, answer, forms = large, small, large - small, DIFFERENCES
        else:
            a, b = rng.sample((small, large), 2)
            answer, forms = small + large, SUMS
        rows.append({"prompt": rng.choice(forms).format(a=a, b=b), "answer": str(answer)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the arithmetic task.")
    assets = Path(__file__).resolve().parent.parent / "assets" / "arithmetic"
    parser.add_argument("--output", type=Path, default=assets, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heldout-rows", type=int, default=256)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    pairs = [(a, b) for b in range(LARGEST + 1) for a in range(b + 1)]
    rng.shuffle(pairs)
    options.output.mkdir(parents=True, exist_ok=True)
    cut = options.heldout_rows
    for name, part in (("heldout", pairs[:cut]), ("train", pairs[cut:])):
        rows = draw_rows(rng, part)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (options.output / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
