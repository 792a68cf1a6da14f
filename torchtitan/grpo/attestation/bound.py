# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How much a server's log-probabilities may differ from the trainer's, measured for each server.

Trainer and server run different kernels, and how much these differ depends on the GPU, the model
and the server's settings. A bound that fits every machine would notice nothing. So the difference
is measured once, under weights that both sides are known to have: a server that nobody has pushed
to serves the directory that the trainer has loaded as well. A multiple of that difference is the
bound from then on. A difference beyond what kernels can explain is never taken as the measure.
"""

from dataclasses import dataclass

import torch

FACTOR = 3.0
"""The bound, in multiples of the measured difference: training sharpens distributions, and the
difference grows with them."""
# Under float32, kernels differ in the order of their sums, or compute products in TF32. Under
# bfloat16 they also round in other places, and a mixture of experts may choose other experts.
_FLOORS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
_CEILINGS = {torch.float32: 0.02, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class Tolerances:
    """The limits between which bounds are chosen, in nats.

    Attributes:
        floor: Smallest bound.
        ceiling: Largest difference that kernels can explain. A ceiling that equals the floor
            leaves nothing to measure.
    """

    floor: float
    ceiling: float

    @property
    def is_fixed(self) -> bool:
        """Whether every server has the same bound."""
        return self.floor == self.ceiling


@dataclass(frozen=True)
class Bound:
    """Largest mean difference that a server may show.

    Attributes:
        value: The bound, in nats.
        measured: The difference that it was chosen by; ``None`` if it was not measured.
        ceiling: Largest difference that kernels can explain.
    """

    value: float
    measured: float | None
    ceiling: float

    def describe(self) -> str:
        """Returns how the bound came about, as the end of a sentence."""
        if self.measured is None:
            return f"{self.value:g}"
        return (
            f"{self.value:.3g} ({self.measured:.3g} was measured when both sides had the same "
            f"weights; kernels explain at most {self.ceiling:g})"
        )


def tolerances_of(wire_dtype: torch.dtype, configured: float) -> Tolerances:
    """Returns the limits of a run.

    Args:
        wire_dtype: Dtype in which weights are sent.
        configured: ``weight_sync.attest_tolerance``; 0 lets each server's bound be measured.
    """
    if configured > 0:
        return Tolerances(configured, configured)
    return Tolerances(_FLOORS[wire_dtype], _CEILINGS[wire_dtype])


def bound_for(measured: float | None, tolerances: Tolerances) -> Bound:
    """Returns the bound of a server.

    Args:
        measured: Mean difference under weights that both sides have; ``None`` if it is not
            known. It must not be above the ceiling.
        tolerances: The limits of the run.
    """
    if tolerances.is_fixed or measured is None:
        return Bound(tolerances.ceiling, None, tolerances.ceiling)
    assert measured <= tolerances.ceiling, (measured, tolerances)
    value = min(max(tolerances.floor, FACTOR * measured), tolerances.ceiling)
    return Bound(value, measured, tolerances.ceiling)
