# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes the files of `train_configs/smollm2_gsm8k*.toml` from GSM8K.

    python scripts/make_gsm8k_examples.py --data path/to/gsm8k --output outputs/smollm2_gsm8k/data

The folder `--data` holds `train.jsonl` and `test.jsonl` of GSM8K (https://github.com/openai/grade-school-math, under the
MIT licence; columns `question` and `answer`). The script writes the same files with answers from which the calculator's
annotations, such as `<<48/2=24>>`, are removed, and takes the last rows of `train.jsonl` out into `heldout.jsonl`, so
that the test set is used only at the end.
"""

import argparse
import json
from pathlib import Path

from make_gsm8k_cpu import plain_answer, read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Make GSM8K's examples for SmolLM2.")
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's JSONL files")
    parser.add_argument("--output", type=Path, default=Path("outputs/smollm2_gsm8k/data"))
    parser.add_argument("--heldout-rows", type=int, default=128)
    options = parser.parse_args()
    rows = {name: read_rows(options.data / f"{name}.jsonl") for name in ("train", "test")}
    rows["heldout"] = rows["train"][-options.heldout_rows :]
    rows["train"] = rows["train"][: -options.heldout_rows]
    options.output.mkdir(parents=True, exist_ok=True)
    for name, part in rows.items():
        plain = [row | {"answer": plain_answer(row["answer"])} for row in part]
        text = "".join(json.dumps(row) + "\n" for row in plain)
        (options.output / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{options.output / name}.jsonl: {len(plain):,} rows")


if __name__ == "__main__":
    main()
