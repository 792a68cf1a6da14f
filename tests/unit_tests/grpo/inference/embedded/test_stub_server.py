# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The benchmarks' server that computes nothing must not run the model."""

import importlib.util
import time
from pathlib import Path

from engine_harness import Harness, make_model

STUB = Path(__file__).resolve().parents[5] / "benchmarks/stub_server.py"


def test_a_completion_takes_the_time_of_its_steps_and_never_runs_the_model() -> None:
    spec = importlib.util.spec_from_file_location("stub_server", STUB)
    assert spec is not None and spec.loader is not None
    stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stub)

    model = make_model("qwen3")
    model.config.eos_token_id = 0
    calls = []
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    h = Harness(
        model,
        make_runner=lambda *sizes: stub.StubRunner(*sizes, decode_seconds=0.01, mean_tokens=50.0),
    )
    try:
        begin = time.monotonic()
        requests = [h.submit([3, 1, 4], max_new_tokens=20) for _ in range(4)]
        h.finish(requests)
        seconds = time.monotonic() - begin
    finally:
        assert h.engine.close(10.0)
    assert [len(request.output_ids) for request in requests] == [20] * 4
    assert not calls
    assert seconds >= 20 * 0.01
