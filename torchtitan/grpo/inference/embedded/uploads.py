# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Moves lists of numbers to the device of the model."""

from collections.abc import Sequence

import torch


def upload(
    lists: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.long
) -> list[torch.Tensor]:
    """Returns each list as a tensor on the device, all of them parts of one.

    To a GPU they are one copy from pinned memory, for which the host does not wait.

    Args:
        lists: Numbers that ``dtype`` represents.
        device: Where the tensors are to lie.
        dtype: Their dtype.
    """
    packed = torch.tensor(
        [number for numbers in lists for number in numbers],
        dtype=dtype,
        pin_memory=device.type == "cuda",
    )
    return list(packed.to(device, non_blocking=True).split([len(numbers) for numbers in lists]))
