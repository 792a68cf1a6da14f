# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how long running requests wait for long prompts in the embedded server.

    python benchmarks/chunked_prefill.py [--json] [--running 60] [--steps 320] [--prompts 6]

The engine of the embedded server samples for 60 requests with prompts of 100 to 300 tokens. In
each run but the first, prompts of 2,000 tokens arrive at fixed steps and ask for 8 tokens each.
`chunked` uses the token budget that the server chooses by itself, and `whole` uses a budget that
fits a long prompt into a single step, as without chunked prefill. Both do the same work. A long
prompt and some short ones are computed before each run, so that the cache of keys and values has
its full size. With several rounds, the runs alternate, and each figure is the median over the
rounds.

The time between two tokens of a request is measured in CPU seconds of the engine's thread. The
thread computes without a pause and on one core, so this is the time on a machine that does nothing
else. Throughput is the number of all tokens, of prompts and of completions, divided by the time
until the last one.

The exit status is 1 if the 99th percentile of the time between tokens is more than 1.5 times that
without long prompts, or if the throughput is more than 3 % below that of `whole`. With ``--json``
the last line is a JSON object.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from figures import finish, make_parser

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from torchtitan.grpo.inference.embedded.engine import Engine
from torchtitan.grpo.inference.embedded.model import ModelRunner
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.sampling import SamplingParams

LATENCY_BOUND, THROUGHPUT_BOUND = 1.5, 0.97
LONG_PROMPT, LONG_ANSWER = 2000, 8
VOCAB_SIZE = 512
FREE_ROWS = 4
TIMEOUT_SECONDS = 900.0


@dataclass
class Run:
    """The requests of one run of the engine, and the times that its thread measures.

    Attributes:
        arrivals: Long prompts, by the number of tokens that the running requests have when the
            prompt arrives.
        left: Number of requests that have not finished.
        is_warm: Whether the warm-up is over. Nothing is counted before.
        started: Time of the first token of the run.
        ended: Time at which the last request finished.
        gaps: Seconds between two tokens of a running request, except for its first tokens.
    """

    arrivals: dict[int, Request]
    left: int
    engine: Engine | None = None
    is_warm: bool = False
    started: float = 0.0
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)
    seen: dict[int, float] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    def report(self, changed: list[Request]) -> None:
        """Receives the requests that a step has changed from the engine."""
        if not self.is_warm:
            return
        now = time.thread_time()
        self.started = self.started or now
        for request in changed:
            self.left -= request.finish_reason is not None
            if len(request.prompt_ids) == LONG_PROMPT:
                continue
            num_tokens = len(request.output_ids)
            # All prompts of the running requests are computed within the first tokens.
            if num_tokens > FIRST_TOKENS:
                self.gaps.append(now - self.seen[id(request)])
            self.seen[id(request)] = now
            arrived = self.arrivals.pop(num_tokens, None)
            if arrived is not None:
                assert self.engine is not None, "the engine must be set before it reports"
                self.engine.submit([arrived])
        if self.left == 0:
            self.ended = now
            self.done.set()


FIRST_TOKENS = 16


def make_model() -> Any:
    """Returns a random Qwen3 model of 15 million parameters."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=4096,
        )
    )


def make_requests(arguments: argparse.Namespace) -> Iterator[Request]:
    """Yields the running requests and then the long prompts, which are the same in every run."""
    rng = np.random.default_rng(0)
    for index in range(arguments.running + arguments.prompts):
        is_long = index >= arguments.running
        length = LONG_PROMPT if is_long else int(rng.integers(100, 300))
        params = SamplingParams(max_new_tokens=LONG_ANSWER if is_long else arguments.steps)
        prompt = rng.integers(0, VOCAB_SIZE, length).tolist()
        yield Request(str(index), prompt, params, frozenset())


def measure(model: Any, step_tokens: int | None, with_long: bool, arguments) -> dict[str, float]:
    """Runs the engine once; returns percentiles in milliseconds, and tokens per second."""
    requests = list(make_requests(arguments))
    running, long_prompts = requests[: arguments.running], requests[arguments.running :]
    long_prompts = long_prompts if with_long else []
    every = (arguments.steps - 2 * FIRST_TOKENS) // arguments.prompts
    arrivals = {2 * FIRST_TOKENS + i * every: r for i, r in enumerate(long_prompts)}
    run = Run(arrivals, len(running) + len(long_prompts))
    runner = ModelRunner(model, arguments.running + FREE_ROWS, LONG_PROMPT + LONG_ANSWER)
    run.engine = Engine(runner, run.report, step_tokens=step_tokens)
    run.engine.start()
    warm_up(run.engine, arguments)
    run.is_warm = True
    run.engine.submit(running)
    if not run.done.wait(TIMEOUT_SECONDS):
        sys.exit(f"error: the engine has not finished in {TIMEOUT_SECONDS:g} s.")
    run.engine.close(10.0)
    tokens = sum(r.length for r in running + long_prompts)
    gaps = np.array(run.gaps) * 1000
    return {
        "median_ms": float(np.median(gaps)),
        "p99_ms": float(np.percentile(gaps, 99)),
        "max_ms": float(gaps.max()),
        "tokens_per_second": tokens / (run.ended - run.started),
    }


def warm_up(engine: Engine, arguments: argparse.Namespace) -> None:
    """Fills every row once, one of them with a long prompt, and waits until all requests end."""
    engine.pause().result(TIMEOUT_SECONDS)
    for length in [LONG_PROMPT] + [8] * (arguments.running + FREE_ROWS - 1):
        params = SamplingParams(max_new_tokens=1)
        engine.submit([Request("warm", [1] * length, params, frozenset())])
    engine.resume().result(TIMEOUT_SECONDS)
    while engine.num_running or engine.num_waiting:
        engine.run(lambda: None).result(TIMEOUT_SECONDS)


def measure_rounds(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns the median of each figure over the rounds, by the name of the kind of run."""
    model = make_model()
    fits_whole = arguments.running + FREE_ROWS + LONG_PROMPT
    kinds = {"no_prompts": (None, False), "chunked": (None, True), "whole": (fits_whole, True)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for number in range(arguments.rounds):
        for name in list(kinds) if number % 2 == 0 else list(kinds)[::-1]:
            step_tokens, with_long = kinds[name]
            found[name].append(measure(model, step_tokens, with_long, arguments))
            print(number, name, {k: round(v, 1) for k, v in found[name][-1].items()}, flush=True)
    return {
        name: {key: float(np.median([run[key] for run in runs])) for key in runs[0]}
        for name, runs in found.items()
    }


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--running", type=int, default=60)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    found = measure_rounds(arguments)
    print(f"{'':12} {'median':>9} {'p99':>9} {'longest':>9}  tokens/s")
    for name, row in found.items():
        times = " ".join(f"{row[key]:6.1f} ms" for key in ("median_ms", "p99_ms", "max_ms"))
        print(f"{name:12} {times} {row['tokens_per_second']:9.0f}")
    base, chunked, whole = (found[name] for name in ("no_prompts", "chunked", "whole"))
    figures = {f"{name}_{key}": value for name, row in found.items() for key, value in row.items()}
    latency = figures["latency_ratio"] = chunked["p99_ms"] / base["p99_ms"]
    figures["latency_ratio_whole"] = whole["p99_ms"] / base["p99_ms"]
    speed = figures["throughput_ratio"] = chunked["tokens_per_second"] / whole["tokens_per_second"]
    ok = latency <= LATENCY_BOUND and speed >= THROUGHPUT_BOUND
    print(
        f"With chunks, p99 is {latency:.2f} times that without long prompts (must be <= "
        f"{LATENCY_BOUND}), and throughput is {speed:.3f} of that with whole prompts (must be >= "
        f"{THROUGHPUT_BOUND}). With whole prompts, p99 is {figures['latency_ratio_whole']:.2f} "
        "times that without long prompts."
    )
    sys.exit(finish(arguments, "chunked_prefill", ok, figures))


if __name__ == "__main__":
    main()
