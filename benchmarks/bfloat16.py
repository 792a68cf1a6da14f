# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Times the parts of a step of a real model in bfloat16 and in float32, on one core.

    bash scripts/get_smollm2.sh
    python benchmarks/bfloat16.py [--json] [--rounds N]

The batch has 16 prompts of the arithmetic task, with 8 completions of 16 random tokens each. Masters, gradients and
the optimizer's states are float32 in both cases, as in a run; the type is that of products and activations. The parts:

    prefill     the embedded engine computes the 16 prompts and samples the first token of 128 completions
    decode      one further token of 128 completions; and of one completion
    forward     the trainer's forward pass over the packed rows, with the log-probabilities
    backward    its backward pass
    optimizer   AdamW over all parameters
    push        a copy of all parameters in the type in which servers receive them

Both types take turns in each round. A row has the medians over the rounds with their ranges, and the ratio. There is
no bound: what pays depends on the processor.
"""

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import finish, make_parser
from ranks import run_ranks

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "programs"))

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "assets/smollm2/model"
PROMPTS = ROOT / "assets/arithmetic/train.jsonl"
GROUPS, GROUP_SIZE, NEW_TOKENS, ROW = 16, 8, 16, 512
TYPES = ("float32", "bfloat16")
TIMEOUT_SECONDS = 800


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} must exist: call `bash scripts/get_smollm2.sh` first.")
    with tempfile.TemporaryDirectory() as name:
        job, result = Path(name) / "job.json", Path(name) / "result.json"
        job.write_text(json.dumps({"rounds": arguments.rounds}))
        run_ranks(1, "bfloat16.py", job, result, timeout_seconds=TIMEOUT_SECONDS)
        found = json.loads(result.read_text())
    figures = {}
    print(f"{'part':12}  {'float32':>24}  {'bfloat16':>24}  ratio")
    for part in found["float32"]:
        texts, medians = [], []
        for dtype in TYPES:
            seconds = sorted(found[dtype][part])
            medians.append(statistics.median(seconds))
            texts.append(f"{medians[-1]:.3f} s ({seconds[0]:.3f} to {seconds[-1]:.3f})")
            figures[f"{part} {dtype}"] = medians[-1]
        print(f"{part:12}  {texts[0]:>24}  {texts[1]:>24}  {medians[1] / medians[0]:.2f}")
    return finish(arguments, "bfloat16", True, figures)


class Timed:
    """Seconds of the parts of one type."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._server = _Server(dtype)
        self._trainer = _Trainer(dtype)

    def round(self) -> None:
        for part, seconds in (*self._server.round(), *self._trainer.round()):
            self.seconds[part].append(seconds)


class _Server:
    def __init__(self, dtype: str) -> None:
        from torchtitan.grpo.inference.embedded.model import ModelRunner, load_model

        num_rows = GROUPS * GROUP_SIZE
        model = load_model(str(MODEL), "cpu", dtype)
        self._runner = ModelRunner(model, num_rows, 128)

    def round(self) -> list[tuple[str, float]]:
        prompts = [ids for ids in _prompts() for _ in range(GROUP_SIZE)]
        steps = self._step_seconds(prompts)
        single = self._step_seconds(prompts[:1])
        return [
            ("prefill", steps[0]),
            ("decode 128", statistics.median(steps[1:])),
            ("decode 1", statistics.median(single[1:])),
        ]

    def _step_seconds(self, prompts: list[list[int]]) -> list[float]:
        """Returns the seconds of each step, the first of which computes the prompts."""
        from torchtitan.grpo.inference.embedded.engine import Engine
        from torchtitan.grpo.inference.embedded.request import Request
        from torchtitan.grpo.inference.embedded.sampling import SamplingParams

        ends: list[float] = []
        engine = Engine(self._runner, lambda _: ends.append(time.perf_counter()), step_tokens=8192)
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        requests = [Request(str(i), p, sampling, frozenset()) for i, p in enumerate(prompts)]
        submitted = engine.submit(requests)
        begin = time.perf_counter()
        engine.start()
        submitted.result(60)
        while any(request.finish_reason is None for request in requests):
            time.sleep(0.01)
        engine.close(10)
        return np.diff([begin, *ends[:NEW_TOKENS]]).tolist()


class _Trainer:
    def __init__(self, dtype: str) -> None:
        from build_model import build

        from torchtitan.grpo.training.runner import WholeModelRunner

        built = build(str(MODEL), ROW, local_batch_size=2, precision=dtype)
        self._model = built.parts[0]
        self._runner = WholeModelRunner(self._model, rows_at_once=2)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, fused=True)
        self._wire = getattr(torch, dtype)
        self._rows = _rows()

    def round(self) -> list[tuple[str, float]]:
        split: dict[str, float] = defaultdict(float)

        def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                begin = time.perf_counter()
                result = function(*arguments, **named)
                split[part] += time.perf_counter() - begin
                return result

            return call

        forward, backward = self._runner.model, torch.Tensor.backward
        self._runner.model = timed("forward", forward)  # pyright: ignore
        torch.Tensor.backward = timed("backward", backward)
        weights = self._rows.loss_weights
        try:
            self._runner.forward_backward(
                self._rows, lambda output, which: (output[..., 0] * weights[which]).sum()
            )
        finally:
            self._runner.model, torch.Tensor.backward = forward, backward
        timed("optimizer", self._optimizer.step)()
        self._optimizer.zero_grad()
        with torch.no_grad():
            timed("push", self._copy)()
        return list(split.items())

    def _copy(self) -> None:
        for parameter in self._model.parameters():
            parameter.detach().to(self._wire, copy=True)


def _prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = PROMPTS.read_text(encoding="utf-8").splitlines()[:GROUPS]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(row)["prompt"]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for row in rows
    ]
    return [tokenizer.encode(text) for text in texts]


def _rows() -> Any:
    from torchtitan.grpo.config import GRPO
    from torchtitan.grpo.data.cost import token_cost
    from torchtitan.grpo.data.step_plan import plan_step
    from torchtitan.grpo.types import Rollout, RolloutGroup, VersionSegment

    random, groups = np.random.default_rng(0), []
    for number, prompt in enumerate(_prompts()):
        ids = np.array(prompt, np.int32)
        rollouts = [
            Rollout(
                prompt_ids=ids,
                token_ids=random.integers(10, 49000, NEW_TOKENS).astype(np.int32),
                logprobs=np.full(NEW_TOKENS, -1.0, np.float32),
                segments=(VersionSegment(0, 0, NEW_TOKENS),),
                finish_reason="stop",
                completion="",
                reward=float(reward % 2),
            )
            for reward in range(GROUP_SIZE)
        ]
        groups.append(RolloutGroup(number, "", tuple(rollouts), ""))
    made = plan_step(
        groups, GRPO(), num_ranks=1, row_len=ROW, local_batch_size=2,
        max_new_tokens=NEW_TOKENS, balance=True, cost=token_cost, row_bucket=0, shares_contexts=True,
    )  # fmt: skip
    return made.rows_of_rank[0]


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    torch.set_num_threads(1)
    of_types = [Timed(dtype) for dtype in TYPES]
    for number in range(rounds + 1):
        for timed in of_types if number % 2 else reversed(of_types):
            timed.round()
    # The first round allocates and compiles.
    return {t.dtype: {part: seconds[1:] for part, seconds in t.seconds.items()} for t in of_types}


if __name__ == "__main__":
    if sys.argv[1:2] and Path(sys.argv[1]).suffix == ".json":  # the process that measures
        settings = json.loads(Path(sys.argv[1]).read_text())
        Path(sys.argv[2]).write_text(json.dumps(measure(settings["rounds"])))
    else:
        sys.exit(main())
