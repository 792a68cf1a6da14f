# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures decoding in the embedded server, with CUDA graphs, without them, and beside a push.

The engine is the real one, with a model of random weights. All requests have prompts of one length and
are computed to the end, so that every measured step has all rows. Prompts, the first steps, and the
capture of the graph are left out.
"""

import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from check_gpu.parts import device_of, percentile
from check_gpu.row import Row, Settings, judged
from torchtitan.grpo.inference.embedded.decode_graph import Capture, Compute, CudaCapture
from torchtitan.grpo.inference.embedded.engine import Engine
from torchtitan.grpo.inference.embedded.model import ModelRunner
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.sampling import SamplingParams
from torchtitan.grpo.inference.embedded.weights import WeightTable

_TIMEOUT_SECONDS = 120.0
_SETTLED = 10
_COMPARED_ROWS = 8
_MAX_LOGPROB_ERROR = 0.1  # in bfloat16


@dataclass(frozen=True)
class _Sizes:
    model: dict[str, int]
    rows: tuple[int, ...]
    prompt: int
    steps: int


# Prompts and completions of the GPU's sizes end in one bucket of 256 positions.
_SIZES = _Sizes(
    {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    },
    rows=(8, 64, 256), prompt=130, steps=100,
)  # fmt: skip
_SMALL_SIZES = _Sizes(
    {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97,
    },
    rows=(3,), prompt=5, steps=20,
)  # fmt: skip


def run(settings: Settings) -> Iterator[Row]:
    """Yields a row that compares graphs with single kernels, and three for each number of rows."""
    device = device_of(settings)
    sizes = _SIZES if settings.on_gpu else _SMALL_SIZES
    model = _make_model(sizes, device)
    yield _compare(model, sizes, device)
    for rows in sizes.rows:
        for capture in (None, _capture(device)):
            case = f"{rows} rows, {'single kernels' if capture is None else 'graphs'}"
            yield Row(case, "measured", _figures(_decode(model, sizes, rows, capture), rows))
        case = f"{rows} rows, graphs, beside a push"
        if not settings.on_gpu:
            yield Row(case, "skipped", reason="It needs a GPU.")
            continue
        with _pushing(model) as pushed:
            steps = _decode(model, sizes, rows, _capture(device))
        yield Row(case, "measured", _figures(steps, rows) | {"gb_per_second": pushed.speed()})


def _make_model(sizes: _Sizes, device: torch.device) -> Any:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = Qwen3Config(**sizes.model)  # pyright: ignore[reportArgumentType]
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _capture(device: torch.device) -> Capture:
    """Returns what captures graphs; a CPU repeats the same computation over the same memory."""
    return CudaCapture(device) if device.type == "cuda" else _repeat


def _repeat(compute: Compute, _: bool) -> Compute:
    return compute


@dataclass
class _Steps:
    """What the engine reports: the requests, and the time of each token of the first one."""

    left: int
    requests: list[Request] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def report(self, changed: list[Request]) -> None:
        now = time.perf_counter()
        for request in changed:
            self.left -= request.finish_reason is not None
            if request is self.requests[0]:
                self.times.append(now)
        if self.left == 0:
            self.done.set()

    def milliseconds(self) -> list[float]:
        """Returns the durations of the steps that are measured."""
        settled = self.times[_SETTLED:]
        return [(b - a) * 1e3 for a, b in itertools.pairwise(settled)]


def _decode(
    model: Any, sizes: _Sizes, rows: int, capture: Capture | None, *, seeded: bool = False
) -> _Steps:
    """Samples for ``rows`` requests at once."""
    runner = ModelRunner(model, rows, 2 * (sizes.prompt + sizes.steps), capture=capture)
    steps = _Steps(rows)
    # All prompts in the first step, so that the second one has all rows.
    engine = Engine(runner, steps.report, max_prefill_tokens=rows * sizes.prompt)
    engine.start()
    engine.pause().result(_TIMEOUT_SECONDS)
    for row in range(rows):
        params = SamplingParams(max_new_tokens=sizes.steps, sampling_seed=row if seeded else None)
        prompt = [(7 * row + i) % sizes.model["vocab_size"] for i in range(sizes.prompt)]
        request = Request(str(row), prompt, params, frozenset())
        steps.requests.append(request)
    engine.submit(steps.requests).result(_TIMEOUT_SECONDS)
    engine.resume().result(_TIMEOUT_SECONDS)
    is_done = steps.done.wait(_TIMEOUT_SECONDS)
    engine.close(_TIMEOUT_SECONDS)
    ends = {(request.finish_reason or {}).get("type") for request in steps.requests}
    if not is_done or ends != {"length"}:
        raise RuntimeError(
            f"{rows} requests must end within {_TIMEOUT_SECONDS:g} s by their length; they ended "
            f"by {ends}, and the engine by {engine.failure!r}."
        )
    return steps


def _figures(steps: _Steps, rows: int) -> dict[str, float]:
    taken = steps.milliseconds()
    median = statistics.median(taken)
    return {
        "tokens_per_second": rows * 1e3 / median,
        "median_ms": median,
        "p99_ms": percentile(taken, 0.99),
        "steps": float(len(taken)),
    }


def _compare(model: Any, sizes: _Sizes, device: torch.device) -> Row:
    """Samples the same requests with and without graphs, each up to the first other token."""
    rows = min(_COMPARED_ROWS, sizes.rows[0])
    found = [
        _decode(model, sizes, rows, capture, seeded=True).requests
        for capture in (None, _capture(device))
    ]
    num_equal, error = 0, 0.0
    for one, other in zip(*found, strict=True):
        for a, b, p, q in zip(
            one.output_ids, other.output_ids, one.logprobs, other.logprobs, strict=True
        ):
            if a != b:
                break
            num_equal, error = num_equal + 1, max(error, abs(p - q))
    share = num_equal / (rows * sizes.steps)
    return judged(
        "tokens with graphs and without",
        error <= _MAX_LOGPROB_ERROR and share >= 0.5,
        f"logprobs of equal tokens within {_MAX_LOGPROB_ERROR:g} nats, at least half of all equal",
        {"logprob_error": error, "equal_part": share},
    )


class _Pushed:
    """Bytes that were copied to the GPU, and the time that it took."""

    def __init__(self) -> None:
        self.num_bytes, self.started = 0, time.perf_counter()

    def speed(self) -> float:
        return self.num_bytes / 1e9 / (time.perf_counter() - self.started)


@contextmanager
def _pushing(model: Any) -> Iterator[_Pushed]:
    """Copies versions from pinned memory to the GPU during the block, and uses none of them."""
    table, stop, pushed = WeightTable(model), threading.Event(), _Pushed()
    host = {
        n: torch.empty_like(p, device="cpu").pin_memory() for n, p in model.state_dict().items()
    }

    def push() -> None:
        while not stop.is_set():
            staged = [table.prepared(name, tensor) for name, tensor in host.items()]
            table.wait_prepared()
            pushed.num_bytes += sum(tensor.nbytes for tensor in staged)

    thread = threading.Thread(target=push, name="check-push", daemon=True)
    thread.start()
    try:
        yield pushed
    finally:
        stop.set()
        thread.join(_TIMEOUT_SECONDS)
