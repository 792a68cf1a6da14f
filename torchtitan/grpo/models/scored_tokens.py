# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tokens whose log-probabilities the output layer computes."""

from collections.abc import Callable

import numpy as np
import torch


class ScoredTokens:
    """A mask of tokens that the host knows as well as the device.

    The number of tokens decides the shapes of the output layer's tensors. A device would have to be
    waited for to learn it, in every microbatch.

    This is neither a tensor nor a container that FSDP knows, so that it reaches the model as it is:
    FSDP would move a tensor to the device.

    Args:
        mask: [rows, seq] bool on the device of the model.
        host_mask: The same mask in host memory.
    """

    def __init__(self, mask: torch.Tensor, host_mask: torch.Tensor) -> None:
        self._mask, self._host_mask = mask, host_mask

    def positions(self, part: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """Returns the tokens of a part of the rows, [tokens] int64; None if they are all of them.

        Args:
            part: Cuts the part, [rows, seq_local], out of [rows, seq]. Positions count its tokens
                row by row.
        """
        host_part = part(self._host_mask)
        count = int(np.count_nonzero(host_part.numpy()))
        if count == host_part.numel():
            return None
        return torch.nonzero_static(part(self._mask).flatten(), size=count).squeeze(1)
