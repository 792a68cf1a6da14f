# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Packs dataclasses with arrays, such as groups of rollouts, as a msgpack header and raw arrays.

The result is sent to other processes or written to files. In the header, an :class:`_Array` stands
for an array that follows. An array that several objects share, such as a group's prompt, follows once.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from torchtitan.grpo.types import RolloutGroup

_Value = TypeVar("_Value")

_ALIGNMENT = 8
"""Arrays begin at multiples of it, so that views of them are aligned."""


class _Array(msgspec.Struct, array_like=True):
    """An array in the header. ``shared`` is the index of an earlier array that is the same object, or -1.

    An array that is not ``sent`` is read as zeros.
    """

    dtype: str
    shape: tuple[int, ...]
    sent: bool = True
    shared: int = -1


class Packed(msgspec.Struct):
    header: msgspec.Raw
    arrays: bytes


def pack(value: Any, is_sent: Callable[[np.ndarray], bool] = lambda array: True) -> Packed:
    """Packs a value. Arrays for which ``is_sent`` returns False are left out and unpacked as zeros."""
    positions: dict[int, int] = {}
    parts: list[bytes | memoryview] = []

    def describe(array: Any) -> _Array:
        if not isinstance(array, np.ndarray):
            raise NotImplementedError(f"a {type(array).__name__} cannot be packed")
        if id(array) in positions:
            return _Array("", (), shared=positions[id(array)])
        positions[id(array)] = len(positions)
        sent = is_sent(array)
        if sent and array.nbytes:
            parts.append(np.ascontiguousarray(array).data.cast("B"))
            parts.append(bytes(-array.nbytes % _ALIGNMENT))
        return _Array(array.dtype.str, array.shape, sent)

    header = msgspec.msgpack.encode(value, enc_hook=describe)
    return Packed(msgspec.Raw(header), b"".join(parts))


def unpack(packed: Packed, kind: type[_Value]) -> _Value:
    """Reverses :func:`pack`. The arrays are views of the bytes, and therefore read-only.

    Raises ``ValueError`` if the header does not describe a ``kind``, or the arrays do not match it.
    """
    found: list[np.ndarray] = []
    position = 0

    def take(of_type: type, fields: Any) -> np.ndarray:
        nonlocal position
        assert of_type is np.ndarray
        array = msgspec.convert(fields, _Array)
        if array.shared >= 0:
            return found[array.shared]
        dtype = np.dtype(array.dtype)
        if array.sent:
            count = int(np.prod(array.shape))
            view = np.empty(0, dtype)
            if count:
                view = np.frombuffer(packed.arrays, dtype, count, position)
            position += view.nbytes + -view.nbytes % _ALIGNMENT
            found.append(view.reshape(array.shape))
        else:  # takes no memory
            found.append(np.broadcast_to(np.zeros((), dtype), array.shape))
        return found[-1]

    value = msgspec.msgpack.decode(packed.header, type=kind, dec_hook=take)
    if position != len(packed.arrays):
        raise ValueError("its arrays are longer than its header says")
    return value


def pack_without_arrays(groups: Sequence[RolloutGroup], num_samples: int) -> Packed:
    """Packs groups for rank 0, which plans the batch and logs the first ``num_samples`` groups.

    Only two kinds of arrays are included: boolean masks, and the token ids and logprobs of the groups to log.
    """
    logged = [r for group in groups[:num_samples] for r in (*group.rollouts, *group.left_out)]
    arrays = (array for r in logged for array in (r.prompt_ids, r.token_ids, r.logprobs))
    kept: Collection[int] = {id(array) for array in arrays}
    return pack(groups, lambda array: array.dtype == np.bool_ or id(array) in kept)
