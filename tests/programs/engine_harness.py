# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An engine of the embedded server with a tiny model, and what its logprobs are compared with."""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from torchtitan.grpo.inference.embedded.engine import Engine
from torchtitan.grpo.inference.embedded.model import ModelRunner
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.sampling import SamplingParams
from torchtitan.grpo.inference.embedded.weights import WeightTable

VOCAB = 53
TIMEOUT = 60.0


def make_model(kind: str, seed: int = 0, **more: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
    } | more
    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[kind](**sizes)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def reference_logprobs(model: Any, request: Request) -> torch.Tensor:
    """Returns the [completion] logprobs of a finished request, from a forward without a cache."""
    ids = torch.tensor([request.token_ids])
    attention = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].float()
    model.config._attn_implementation = attention
    start = len(request.prompt_ids) - 1
    temperature = request.sampling.temperature or 1.0
    logprobs = torch.log_softmax(logits[start:-1] / temperature, -1)
    return logprobs.gather(-1, torch.tensor(request.output_ids).unsqueeze(-1)).squeeze(-1)


def assert_exact(model: Any, requests: list[Request], *later: Any) -> None:
    """Compares logprobs with transformers; with later models, a request's segments are one of each."""
    for request in requests:
        found = torch.tensor(request.logprobs)
        ends = (
            [*(start for _, start in request.segments[1:]), len(found)] if later else [len(found)]
        )
        for each, start, end in zip((model, *later), (0, *ends), ends, strict=False):
            expected = reference_logprobs(each, request)[start:end]
            torch.testing.assert_close(found[start:end], expected, atol=1e-4, rtol=0)


class Harness:
    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.finished: queue.Queue[Request] = queue.Queue()
        slots = options.pop("max_slots", 4)
        make_runner = options.pop("make_runner", ModelRunner)
        self.runner = make_runner(model, slots, options.pop("max_length", 300))
        self.engine = Engine(self.runner, self._report, **options)
        self._stops_when: Callable[[], bool] | None = None
        self._is_stopped = threading.Event()
        self.engine.start()
        self.count = 0

    def _report(self, changed: list[Request]) -> None:
        for request in changed:
            if request.finish_reason is not None:
                self.finished.put(request)
        if self._stops_when is not None and self._stops_when():
            self._stops_when = None
            self._is_stopped.set()
            while not (self.engine._calls or self.engine._closing):
                time.sleep(0.001)

    def resume_until(self, condition: Callable[[], bool]) -> None:
        """Resumes the engine, and stops it after the step that makes ``condition`` true.

        Its thread then waits for the next call, which it carries out before the next step.
        """
        self._is_stopped.clear()
        self._stops_when = condition
        self.engine.resume().result(TIMEOUT)
        assert self._is_stopped.wait(TIMEOUT)

    def submit(self, prompt: list[int], **sampling: Any) -> Request:
        self.count += 1
        params = SamplingParams(**sampling)
        request = Request(f"request-{self.count}", prompt, params, params.stop_token_ids)
        self.engine.submit([request]).result(TIMEOUT)
        return request

    def finish(self, requests: list[Request]) -> None:
        waiting = {id(r) for r in requests}
        while waiting:
            waiting.discard(id(self.finished.get(timeout=TIMEOUT)))


@contextmanager
def harness(model: Any, **options: Any) -> Iterator[Harness]:
    made = Harness(model, **options)
    try:
        yield made
    finally:
        assert made.engine.close(10.0)


def random_prompt(rng: random.Random, low: int = 1, high: int = 40) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]


def swap_to(h: Harness, other: Any, version: str) -> None:
    tensors = {k: v.clone() for k, v in other.state_dict().items()}
    table = WeightTable(h.model)
    prepared = {name: table.prepared(name, tensor) for name, tensor in tensors.items()}
    h.engine.swap_weights(lambda: table.adopt(prepared), version).result(TIMEOUT)
