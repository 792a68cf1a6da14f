# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares training with prompts that a group shares with training each sequence by itself.

    python benchmarks/shared_prompts.py [--json] [--rounds N]

The batch has 16 groups of 8 completions, whose mean length is 128 tokens; the prompt is 0.25, 1 or 4
times as long. Both ways plan the same rollouts into rows of 2,048 tokens, as a run does, and take the
forward and backward passes of a step on one core (a Qwen3 model with 2 layers of 192 channels, in
float32, with a dense mask). Each round runs both ways one after the other, in alternating order. A row
of the table has the tokens that are computed, the rows, and the time with shared prompts relative to
the time without, as the median of the rounds and their range. A batch of 512 groups on 64 ranks with
prompts as long as completions, and rows of 4,096 tokens, is planned and counted, but not trained: few
groups leave rows that are filled unevenly. The exit status is 1 if a bound is missed. With ``--json``
the last line is an object. It takes about five minutes.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import finish, make_parser
from random_models import make_model
from ranks import run_job

BOUNDS = {0.25: 0.95, 1.0: 0.7, 4.0: 0.4}
"""Largest time with shared prompts, by the length of the prompt; both are ratios."""
TOKENS_BOUND = 0.57
"""Largest part of the tokens that are computed if prompts are as long as completions."""
SETTINGS = {
    "groups": 16, "group_size": 8, "completion": 128, "row_len": 2048, "ranks": 1,
    "large": {"groups": 512, "row_len": 4096, "ranks": 64},
}  # fmt: skip
TIMEOUT_SECONDS = 800


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, _ = make_model(folder, "1M")
        settings = SETTINGS | {
            "model": str(model), "rounds": arguments.rounds, "prompts": list(BOUNDS),
        }  # fmt: skip
        found = run_job(1, "shared_prompts_run.py", settings, timeout_seconds=TIMEOUT_SECONDS)
    print("prompt/completion  tokens  rows    time without  time with      ratio (range)   bound")
    figures: dict[str, Any] = {"tokens of a large batch": found["counted"]}
    ok = found["counted"] <= TOKENS_BOUND
    for prompt, case in zip(BOUNDS, found["cases"], strict=True):
        alone, shared = case["alone"], case["shared"]
        ratios = sorted(a / b for a, b in zip(shared["seconds"], alone["seconds"], strict=True))
        ratio, part = statistics.median(ratios), shared["tokens"] / alone["tokens"]
        ok &= ratio <= BOUNDS[prompt]
        print(
            f"{prompt:17.2f}  {part:6.3f}  {alone['rows']:3d} {shared['rows']:3d}"
            f"  {statistics.median(alone['seconds']):10.2f} s  {statistics.median(shared['seconds']):7.2f} s"
            f"  {ratio:5.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})  {BOUNDS[prompt]:.2f}"
        )
        figures[f"prompt {prompt:g}"] = {"tokens": part, "time": ratio, "times": ratios}
    print(
        f"A large batch computes {found['counted']:.4f} of its tokens (bound {TOKENS_BOUND:.2f})."
    )
    return finish(arguments, "shared_prompts", ok, figures)


if __name__ == "__main__":
    sys.exit(main())
