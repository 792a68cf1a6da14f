# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the embedded server with a model that computes nothing.

    python benchmarks/stub_server.py --decode-seconds 0.02 --mean-tokens 256 --model-path DIR ...

Logits come from a fixed table, in which the probability of the end-of-sequence token gives
completions the stated mean length. Each step sleeps for the stated time, so a thousand completions
can be generated at once without a core of their own. Everything else is the embedded server's own:
HTTP, batching, sampling, versions, weight updates, and the log-probabilities of prompts, which the
model computes. All further arguments are those of the embedded server.
"""

import argparse
import math
import sys
import time
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from typing_extensions import override

from torchtitan.grpo.inference.embedded import __main__ as embedded
from torchtitan.grpo.inference.embedded.model import ModelRunner
from torchtitan.grpo.inference.embedded.prefill import PrefillPlan


class StubRunner(ModelRunner):
    """Takes the place of the model runner.

    Args:
        model: The model whose parameters are updated.
        max_slots: Maximum number of rows at once.
        arguments: Other arguments of the model runner.
        decode_seconds: Duration of a step, for any number of rows and of prompts.
        mean_tokens: Mean length of completions before truncation.
        long_slots: Number of rows whose completions do not end by themselves.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_slots: int,
        *arguments: Any,
        decode_seconds: float,
        mean_tokens: float,
        long_slots: int,
    ) -> None:
        super().__init__(model, max_slots, *arguments)
        self._decode_seconds = decode_seconds
        generator = torch.Generator().manual_seed(0)
        self._table = torch.randn(max_slots, self.vocab_size, generator=generator)
        end = model.config.eos_token_id
        assert isinstance(end, int), f"the model must have one end-of-sequence token, got {end}"
        self._table[:, end] = float("-inf")
        # The end-of-sequence token is sampled with probability 1 / mean_tokens.
        self._table[:, end] = self._table.logsumexp(dim=-1) - math.log(mean_tokens - 1)
        self._table[:long_slots, end] = float("-inf")

    @override
    def step(
        self, ids: torch.Tensor, positions: torch.Tensor, lengths: list[int], plan: PrefillPlan
    ) -> torch.Tensor:
        time.sleep(self._decode_seconds)
        return self._table[: len(ids)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], add_help=False)
    parser.add_argument("--decode-seconds", type=float, required=True)
    parser.add_argument("--mean-tokens", type=float, required=True)
    parser.add_argument("--long-slots", type=int, default=0)
    options, arguments = parser.parse_known_args()
    runner = partial(
        StubRunner,
        decode_seconds=options.decode_seconds,
        mean_tokens=options.mean_tokens,
        long_slots=options.long_slots,
    )
    # Only the runner is replaced. Everything that the server does with it is the server's own.
    setattr(embedded, "ModelRunner", runner)  # noqa: B010
    sys.argv[1:] = arguments
    embedded.main()


if __name__ == "__main__":
    main()
