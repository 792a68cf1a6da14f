# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes `assets/arithmetic`: sums and differences of numbers up to 100, asked in words.

    python scripts/make_arithmetic.py
    python scripts/make_arithmetic.py --largest 9999 --rows 4096 --output outputs/large_numbers

The script writes `train.jsonl`, `heldout_sums.jsonl` and `heldout_differences.jsonl` (columns `prompt` and
`answer`). A pair of numbers that is held out is in no training prompt, in neither order and with neither sign.
Differences are never negative. The same seed gives the same files. The second command is for
`train_configs/smollm2_agent.toml`.
"""

import argparse
import json
import math
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


def draw_pairs(rng: random.Random, largest: int, rows: int) -> list[tuple[int, int]]:
    """Returns ``rows`` different pairs of numbers up to ``largest``, the smaller one first; all of them if 0."""
    total = (largest + 1) * (largest + 2) // 2
    pairs = []
    for index in rng.sample(range(total), rows or total):
        large = (math.isqrt(8 * index + 1) - 1) // 2
        pairs.append((index - large * (large + 1) // 2, large))
    return pairs


def draw_rows(rng: random.Random, pairs: list[tuple[int, int]]) -> list[dict[str, str]]:
    """Returns one row for each pair of numbers: sums and differences in turns."""
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
    parser.add_argument(
        "--heldout-rows", type=int, default=256, help="of both held-out files together"
    )
    parser.add_argument("--largest", type=int, default=100, help="largest number of a question")
    parser.add_argument(
        "--rows", type=int, default=0, help="rows of all files together; 0: every pair"
    )
    options = parser.parse_args()
    total = (options.largest + 1) * (options.largest + 2) // 2
    if not options.heldout_rows < (options.rows or total) <= total:
        parser.error(
            f"--rows must be above --heldout-rows = {options.heldout_rows} and at most the {total} pairs of "
            f"numbers up to --largest = {options.largest}, got {options.rows or f'all {total}'}."
        )
    rng = random.Random(options.seed)
    pairs = draw_pairs(rng, options.largest, options.rows)
    options.output.mkdir(parents=True, exist_ok=True)
    cut = options.heldout_rows
    heldout, train = draw_rows(rng, pairs[:cut]), draw_rows(rng, pairs[cut:])
    files = {"train": train, "heldout_sums": heldout[::2], "heldout_differences": heldout[1::2]}
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (options.output / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
