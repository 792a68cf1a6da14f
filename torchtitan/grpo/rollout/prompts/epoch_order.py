# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The order of a set's rows in every epoch, computed from the draw's number alone."""

import numpy as np

# Prompts that a resumed run issues again may belong to the previous epoch.
_KEPT_EPOCHS = 2


class EpochOrder:
    """Gives each epoch a permutation of its own, derived from the seed.

    Args:
        num_rows: Number of rows in the set.
        seed: ``debug.seed``.
        set_number: Position of the set in ``prompts.paths``, so that sets of equal size get
            different orders. 0 for ``prompts.path``.
        shuffle: ``prompts.shuffle``. ``False`` keeps the order of the file in each epoch.
    """

    def __init__(self, num_rows: int, *, seed: int, set_number: int, shuffle: bool) -> None:
        self._num_rows = num_rows
        self._seed = seed
        self._set_number = set_number
        self._shuffle = shuffle
        self._permutations: dict[int, np.ndarray] = {}

    def row(self, draw: int) -> int:
        """Returns the row for the draw with this number."""
        epoch, offset = divmod(draw, self._num_rows)
        return int(self._permutation(epoch)[offset]) if self._shuffle else offset

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            if len(self._permutations) == _KEPT_EPOCHS:
                del self._permutations[min(self._permutations)]
            rng = np.random.default_rng([self._seed, epoch, self._set_number])
            self._permutations[epoch] = rng.permutation(self._num_rows)
        return self._permutations[epoch]
