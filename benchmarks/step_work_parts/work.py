# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The work of a step, and the time that an H100 takes for it."""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from torchtitan.grpo.data.cost import flops_cost

# An H100 SXM by its data sheet, dense.
PEAK_FLOPS = {2: 989e12, 4: 67e12}
"""Peak by the bytes of an operand: bfloat16 on tensor cores, and float32 without TF32."""
BANDWIDTH = 3.35e12
LINK_BANDWIDTH = 450e9
"""NVLink, one direction."""
LAUNCH_SECONDS = 5e-6
# What kernels reach of it: large bfloat16 products of cuBLAS under the power limit of 700 W, fused
# attention, and elementwise kernels.
SUSTAINED_PRODUCT, SUSTAINED_ATTENTION, SUSTAINED_BANDWIDTH, SUSTAINED_LINK = 0.65, 0.5, 0.85, 0.8

PARTS = (
    "embedding", "attention", "MLP", "norms", "head", "loss", "optimizer", "casts and copies",
    "collectives",
)  # fmt: skip


@dataclass
class Work:
    """What one part of a step does.

    Attributes:
        launches: Number of kernels.
        bytes: Bytes read and written in the memory of the device; those of collectives that go
            over the link.
        flops: Floating-point operations of matrix products and attention.
        seconds: Time on the device at the rates that kernels reach.
        sheet_seconds: Time on the device at the rates of the data sheet.
    """

    launches: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    sheet_seconds: float = 0.0

    def add(self, other: "Work", times: float = 1) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + times * value)


@dataclass
class Ledger:
    """The work of a step by part, and the places where the host waits for the device."""

    parts: defaultdict[str, Work] = field(default_factory=lambda: defaultdict(Work))
    waits: Counter[str] = field(default_factory=Counter)
    kernels: defaultdict[str, Work] = field(default_factory=lambda: defaultdict(Work))

    def add(self, part: str, work: Work, name: str = "") -> None:
        self.parts[part].add(work)
        self.kernels[f"{part}: {name}"].add(work)

    @property
    def total(self) -> Work:
        total = Work()
        for work in self.parts.values():
            total.add(work)
        return total

    def step_seconds(self, *, sheet: bool = False) -> float:
        """Returns the predicted time of the step.

        The kernels run one after the other, and collectives beside them on streams of their own. The
        host launches all of them, so that the step takes as long as the slowest of the three.
        """
        key = "sheet_seconds" if sheet else "seconds"
        device = sum(getattr(w, key) for part, w in self.parts.items() if part != "collectives")
        collectives = getattr(self.parts["collectives"], key)
        return max(device, collectives, self.total.launches * LAUNCH_SECONDS)


def kernel(
    num_bytes: float,
    flops: float = 0.0,
    *,
    itemsize: int = 2,
    sustained: float = SUSTAINED_PRODUCT,
    launches: int = 1,
) -> Work:
    """Returns the work of a kernel, bound by computing or by memory, whichever takes longer."""
    sheet = (flops / PEAK_FLOPS[itemsize], num_bytes / BANDWIDTH)
    reached = (sheet[0] / sustained, sheet[1] / SUSTAINED_BANDWIDTH)
    return Work(launches, num_bytes, flops, max(reached), max(sheet))


def collective(num_bytes: float) -> Work:
    """Returns the work of a collective that sends so many bytes from each rank."""
    sheet = num_bytes / LINK_BANDWIDTH
    return Work(1, num_bytes, 0.0, sheet / SUSTAINED_LINK, sheet)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and the sequences of a step of one rank.

    Attributes:
        sizes: The keys of ``config.json``.
        lengths: Number of tokens of each sequence, without padding.
        padded: Number of tokens of each sequence, the padding of a row being one.
        scored: Number of tokens whose log-probabilities are computed.
    """

    sizes: dict[str, Any]
    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    scored: int

    @property
    def num_tokens(self) -> int:
        return sum(self.padded)

    @property
    def mean_keys(self) -> float:
        """Number of keys that a query attends to, on average over all tokens."""
        return sum(n * (n + 1) / 2 for n in self.padded) / self.num_tokens

    def forward(self, lengths: tuple[int, ...], scored: int) -> float:
        """Returns the FLOPs of a forward pass, of whose tokens so many have log-probabilities."""
        head = 2 * self.sizes["hidden_size"] * self.sizes["vocab_size"]
        whole = sum(map(flops_cost(self.sizes), lengths)) / 3  # of which two are the backward pass
        return whole - head * (sum(lengths) - scored)

    @property
    def model_flops(self) -> float:
        """FLOPs that a step must spend: forward and twice as many backward, without padding."""
        return 3 * self.forward(self.lengths, self.scored)

    @property
    def padding_flops(self) -> float:
        """FLOPs that a step spends on padding in the blocks."""
        return 3 * (self.forward(self.padded, 0) - self.forward(self.lengths, 0))
