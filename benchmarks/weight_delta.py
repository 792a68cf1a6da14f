# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how much a delta push saves at the learning rates of reinforcement learning.

    python benchmarks/weight_delta.py [--json] [--steps N] [--models tiny 30M]

The benchmark trains the quickstart's tiny model and a Qwen3 of 30 M random parameters in float32,
with AdamW and the GRPO objective on random prompt groups. It compares each version with the version
before, in both dtypes of a transfer: the share of the elements that changed, the bytes of a
lossless delta (`weight_wire/sparse.py`) relative to those of a full push, and the speed of encoding
and applying a delta. The figures are means over the steps after a warm-up. They have no bounds. The
exit status is 1 if the decoded weights differ in any bit from the encoded weights. With ``--json``
the last line is a JSON object.
"""

import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import finish, make_parser
from random_models import make_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.rows import Sample, TrainRows, build_rows
from torchtitan.grpo.losses.advantages import compute_advantages
from torchtitan.grpo.losses.objective import LossInputs, objective
from torchtitan.grpo.weight_wire.sparse import apply, decode, encode

REPOSITORY = Path(__file__).resolve().parents[1]
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
WIRES = (torch.bfloat16, torch.float32)
# AdamW's first steps are larger than later ones, because its moments have not converged yet.
WARM_UP = 8
GROUPS, GROUP_SIZE, PROMPT_TOKENS, COMPLETION_TOKENS = 2, 4, 8, 40
MAX_NORM = 1.0
NOISE = 0.02
"""Standard deviation of the difference between the trainer's and the servers' logprobs."""


@dataclass(frozen=True)
class Delta:
    """The difference between a version and the version before.

    Attributes:
        changed: Share of the elements that changed.
        size: Bytes of the delta relative to those of a full push.
        encode_gbps: Gigabytes of full weights that are compared and encoded per second.
        apply_gbps: Gigabytes of full weights that are decoded and applied per second.
        is_exact: Whether the receiver's weights equal the encoded weights bit for bit.
    """

    changed: float
    size: float
    encode_gbps: float
    apply_gbps: float
    is_exact: bool


class Learner:
    """A model that is trained with the GRPO objective on random groups."""

    def __init__(self, path: Path, learning_rate: float) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._random = np.random.default_rng(0)
        self._vocab_size = self.model.config.vocab_size

    def step(self) -> None:
        """Takes one optimizer step on new groups."""
        rows = self._random_rows()
        logprobs, entropy = self._score(rows)
        noise = NOISE * torch.randn_like(logprobs)
        rows = replace(rows, generator_logprobs=logprobs.detach() + noise)
        inputs = LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=logprobs.detach(),
            generator_logprobs=rows.generator_logprobs,
            ref_logprobs=None,
            advantages=rows.advantages,
            loss_mask=rows.loss_mask,
            loss_weights=rows.loss_weights,
            ptx_weights=rows.ptx_weights,
            sequence_ids=rows.sequence_ids,
        )
        loss, _ = objective(inputs, GRPO())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()

    def wire(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns all parameters as they are transferred, [num_bytes] uint8."""
        flat = [p.detach().to(dtype).reshape(-1).view(torch.uint8) for p in self.parameters]
        return torch.cat(flat)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

    def _random_rows(self) -> TrainRows:
        """Returns rows with one sample each."""
        count = GROUPS * GROUP_SIZE
        prompts = self._tokens(GROUPS, PROMPT_TOKENS)
        samples = [
            Sample(
                prompts[index // GROUP_SIZE],
                completion,
                np.zeros(COMPLETION_TOKENS, np.float32),
                sample_id=index,
                loss_weight=1 / (count * COMPLETION_TOKENS),
            )
            for index, completion in enumerate(self._tokens(count, COMPLETION_TOKENS))
        ]
        rows = build_rows(samples, [[i] for i in range(count)], PROMPT_TOKENS + COMPLETION_TOKENS)
        config = GRPO()
        assert config.advantage != "gae"
        advantages = compute_advantages(
            self._random.integers(0, 2, count).astype(np.float64),
            np.repeat(np.arange(GROUPS), GROUP_SIZE),
            kind=config.advantage,
        )
        return rows.with_advantages(advantages)

    def _tokens(self, *shape: int) -> np.ndarray:
        return self._random.integers(1, self._vocab_size, shape).astype(np.int32)

    def _score(self, rows: TrainRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logprobs of the labels and the entropies, both [rows, seq]."""
        logits = self.model(input_ids=rows.tokens).logits
        everything = logits.log_softmax(-1)
        logprobs = everything.gather(-1, rows.labels[..., None])[..., 0]
        entropy = -(everything.exp() * everything).sum(-1)
        return logprobs, entropy.detach()


def measure(path: Path, learning_rate: float, steps: int) -> dict[torch.dtype, list[Delta]]:
    """Trains a model and measures the delta of each version after the warm-up, in each dtype."""
    learner = Learner(path, learning_rate)
    for _ in range(WARM_UP):
        learner.step()
    held = {dtype: learner.wire(dtype) for dtype in WIRES}
    deltas: dict[torch.dtype, list[Delta]] = {dtype: [] for dtype in WIRES}
    for _ in range(steps):
        learner.step()
        for dtype in WIRES:
            current = learner.wire(dtype)
            numels = [p.numel() for p in learner.parameters]
            deltas[dtype].append(take_delta(held[dtype], current, numels, dtype))
            held[dtype] = current
    return deltas


def take_delta(
    previous: torch.Tensor, current: torch.Tensor, numels: list[int], dtype: torch.dtype
) -> Delta:
    begin = time.perf_counter()
    payload, num_changed = encode(previous, current, numels, dtype.itemsize)
    encoded = time.perf_counter()
    received = previous.clone()
    sizes = [numel * dtype.itemsize for numel in numels]
    decoding = time.perf_counter()
    changes = decode(payload, numels, num_changed, dtype.itemsize)
    for tensor, change in zip(received.split(sizes), changes, strict=True):
        apply(tensor.view(dtype), change)
    applied = time.perf_counter()
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    gigabytes = current.numel() / 1e9
    return Delta(
        changed=(previous.view(bits) != current.view(bits)).double().mean().item(),
        size=payload.numel() / current.numel(),
        encode_gbps=gigabytes / (encoded - begin),
        apply_gbps=gigabytes / (applied - decoding),
        is_exact=torch.equal(received, current),
    )


def mean_figures(deltas: list[Delta]) -> dict[str, float]:
    return {
        name: float(np.mean([getattr(delta, name) for delta in deltas]))
        for name in ("changed", "size", "encode_gbps", "apply_gbps")
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=12, help="number of counted steps")
    parser.add_argument("--models", nargs="+", choices=("tiny", "30M"), default=["tiny", "30M"])
    options = parser.parse_args()
    logging.disable_progress_bar()
    figures: dict[str, Any] = {}
    ok = True
    print(
        f"{'model':7}{'wire':10}{'lr':>8}{'changed':>10}{'delta':>15}{'encode':>13}{'apply':>13}"
        "  bitwise"
    )
    with tempfile.TemporaryDirectory() as name:
        for model in options.models:
            path = REPOSITORY / "assets/reverse_digits/model"
            if model != "tiny":
                path, _ = make_model(Path(name), model)
            for learning_rate in LEARNING_RATES:
                for dtype, deltas in measure(path, learning_rate, options.steps).items():
                    wire = str(dtype).removeprefix("torch.")
                    is_exact = all(delta.is_exact for delta in deltas)
                    ok = ok and is_exact
                    mean = mean_figures(deltas)
                    figures |= {
                        f"{model}/{wire}/{learning_rate:.0e}/{k}": v for k, v in mean.items()
                    }
                    print(
                        f"{model:7}{wire:10}{learning_rate:8.0e}{mean['changed']:10.2%}"
                        f"{mean['size']:8.1%} of all{mean['encode_gbps']:8.2f} GB/s"
                        f"{mean['apply_gbps']:8.2f} GB/s  {'ok' if is_exact else 'DIFFERS'}",
                        flush=True,
                    )
    return finish(options, "weight_delta", ok, figures)


if __name__ == "__main__":
    sys.exit(main())
