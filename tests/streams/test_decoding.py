# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decoding steps of the embedded server: what they upload to the GPU, and when they wait for it.

The engine's steps run on the recorder's training thread, so that the recorder tells each time that the
host waits. Values are right, because everything is computed; only the devices are the recorder's.
"""

import copy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from recorder import Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))

from engine_harness import make_model, reference_logprobs

from torchtitan.grpo.inference.embedded.decode_graph import Capture, Compute
from torchtitan.grpo.inference.embedded.engine import Engine
from torchtitan.grpo.inference.embedded.model import ModelRunner
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.sampling import SamplingParams

CUDA = torch.device("cuda", 0)
PLAIN = make_model("qwen3")  # made before CUDA is replaced, which transformers looks at
pytestmark = pytest.mark.filterwarnings("ignore")  # autocast is told of a CUDA that is not there


def on_device(module: torch.nn.Module) -> list[torch.Tensor]:
    """Moves a model to the recorder's device; returns its tensors, which must be kept."""
    kept = []
    for part in module.modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is None:
                continue
            moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
            moved.copy_(tensor.detach())
            kept.append(moved)
            if name in part._parameters:
                part._parameters[name] = torch.nn.Parameter(moved, requires_grad=False)
            else:
                part._buffers[name] = moved
    return kept


class Decoder:
    def __init__(self, capture: Capture | None) -> None:
        served = copy.deepcopy(PLAIN)
        self.kept = on_device(served)
        self.runner = ModelRunner(served, 8, 200, range(50), capture)
        with mock.patch.object(torch, "Generator", lambda _: torch.default_generator):
            self.engine = Engine(self.runner, lambda _: None)

    def submit(self, length: int, count: int, **sampling: Any) -> Request:
        params = SamplingParams(max_new_tokens=count, **sampling)
        prompt = [(7 * i + length) % 50 for i in range(length)]
        request = Request("r", prompt, params, frozenset())
        self.engine._enqueue([request])
        return request

    def step(self, recorder: Recorder) -> tuple[int, int]:
        """Makes a step; returns the number of its uploads, and how often the host waited."""
        uploads, waits = recorder.num_uploads, recorder.num_waits
        with torch.no_grad():  # in inference mode, the recorder sees fewer operations
            self.engine._step()
        return recorder.num_uploads - uploads, recorder.num_waits - waits


@pytest.mark.parametrize("graphs", [False, True])
def test_a_decoding_step_uploads_nothing_and_waits_for_its_tokens_alone(
    recorder: Recorder, graphs: bool
):
    num_replayed = 0

    def capture(compute: Compute, _: bool) -> Compute:
        def replay() -> torch.Tensor:
            nonlocal num_replayed
            num_replayed += 1
            return compute()

        return replay

    decoder = Decoder(capture if graphs else None)
    short = decoder.submit(5, 4, temperature=0.7)
    long = [
        decoder.submit(3, 12, top_p=0.9, top_k=4),
        decoder.submit(9, 12, temperature=0.0),
        decoder.submit(9, 12),
    ]
    found = [decoder.step(recorder) for _ in range(12)]
    assert all(len(request.output_ids) == 12 for request in long)
    # A step with prompts uploads these and the rows. The short request ends with the fourth step: its
    # row is taken by another, and the rows are uploaded anew.
    assert [uploads for uploads, _ in found] == [2, 0, 0, 0, 1] + [0] * 7
    assert [waits for _, waits in found] == [1] * 12
    waits = {"training stalls: the training thread waits for stream trainer/default"}
    assert set(recorder.problems) == waits
    assert num_replayed == (11 if graphs else 0)
    for request in (short, *long):
        expected = reference_logprobs(PLAIN, request)
        torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=1e-4, rtol=0)
