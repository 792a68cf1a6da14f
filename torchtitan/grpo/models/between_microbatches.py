# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What FSDP2 keeps between the microbatches of an optimizer step.

Left to itself, FSDP2 gathers and casts every parameter for each microbatch, and reduces the gradients
after each. Whole parameters and gradients that are kept in between cost memory, and save this work for
all microbatches but one. This holds on a single rank as well, where FSDP2 casts without gathering.
"""

from typing import Literal, get_args

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

Kept = Literal["free", "keep_parameters", "keep_all"]
"""The values of ``parallelism.fsdp_between_microbatches``, of which ``auto`` chooses one."""


def keeps_parameters(kept: str) -> bool:
    """Returns whether gathered parameters stay from one microbatch to the next."""
    return kept in ("keep_parameters", "keep_all")


class BetweenMicrobatches:
    """Tells FSDP2 what to keep; does nothing if FSDP2 is not applied.

    ``set_is_last_backward`` stays as it is. It would only delay the wait for the reductions of a
    microbatch, and FSDP2 would then prefetch the last parameters of the previous microbatch at the
    end of each backward pass.

    Args:
        model: The model, parallelized. It does not reshard parameters after its forward pass if
            they are to be kept, see :func:`parallelize`.
        kept: What is kept.
    """

    def __init__(self, model: nn.Module, kept: Kept) -> None:
        assert kept in get_args(Kept), f"{kept!r} is not resolved"
        self._root = model if isinstance(model, FSDPModule) else None
        self._sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self.keeps_parameters = keeps_parameters(kept)
        self._keeps_gradients = kept == "keep_all"
        if self._root is not None:
            self._root.set_reshard_after_backward(not self.keeps_parameters)

    def before_backward(self, *, is_last: bool) -> None:
        """Sets whether the gradients of the next backward pass are reduced.

        Args:
            is_last: Whether it is the last one of a sequence of microbatches. What the earlier ones
                have left is then reduced with it, and nothing remains.
        """
        if self._root is None:
            return
        if self._keeps_gradients:
            self._root.set_requires_gradient_sync(is_last)
        else:
            # Sums that replicas have not exchanged yet take no more memory than exchanged ones.
            self._root.set_requires_all_reduce(is_last)

    def forget_parameters(self) -> None:
        """Frees gathered parameters, which would be outdated after the next optimizer step."""
        for module in self._sharded:
            module.reshard()
