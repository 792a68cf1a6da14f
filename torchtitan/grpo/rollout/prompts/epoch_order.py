# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The order of a set's rows, epoch after epoch, from the draw's number alone."""

import numpy as np

# Prompts that a resumed run asks again may lie in the epoch before the present one.
_KEPT_EPOCHS = 2


class EpochOrder:
    """Each epoch is a permutation of its own, given by the seed.

    Args:
        num_rows: Rows of the set.
        seed: ``debug.seed``.
        set_number: Position of the set in ``prompts.paths``: sets of equal sizes get orders of
            their own. 0 for ``prompts.path``.
        shuffle: ``prompts.shuffle``; otherwise each epoch is in the order of the file.
    """

    def __init__(self, num_rows: int, *, seed: int, set_number: int, shuffle: bool) -> None:
        self._num_rows = num_rows
        self._seed = seed
        self._set_number = set_number
        self._shuffle = shuffle
        self._permutations: dict[int, np.ndarray] = {}

    def row(self, draw: int) -> int:
        """The row of the set's draw of this number."""
        epoch, offset = divmod(draw, self._num_rows)
        return int(self._permutation(epoch)[offset]) if self._shuffle else offset

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            if len(self._permutations) == _KEPT_EPOCHS:
                del self._permutations[min(self._permutations)]
            rng = np.random.default_rng([self._seed, epoch, self._set_number])
            self._permutations[epoch] = rng.permutation(self._num_rows)
        return self._permutations[epoch]
