# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Softmax over a vocabulary in slices: its sums, and gradients through it.

What is done to every logit is in `softmax_passes.py`; here is what is done to every token.
"""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from torchtitan.grpo.losses.softmax_passes import new_scratch, raise_maximum, sum_slice, write_grads


class SoftmaxSums:
    """Running maximum and sums of the softmax, over slices and then over ranks.

    Args:
        ids: [tokens, n] int, whose log-probabilities are computed. Id 0 is the first of the first slice.
        dtype: Dtype of the logits.
        temperature: Divisor of the logits.
        with_entropy: Whether to compute the sum that the entropy needs.
    """

    def __init__(
        self, ids: torch.Tensor, dtype: torch.dtype, temperature: float, with_entropy: bool
    ) -> None:
        def full(value: float, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=ids.device)

        self._ids, self._scale, self._with_entropy = ids, 1 / temperature, with_entropy
        # Finite, so that a rank without any ids causes no inf - inf.
        self._maximum = full(torch.finfo(dtype).min, len(ids))
        self._logits = full(-torch.inf, *ids.shape)
        self._exp_sum = full(0.0, len(ids))
        self._weighted_sum = full(0.0, len(ids))
        self._scratch: torch.Tensor | None = None

    def add(self, start: int, logits: torch.Tensor) -> None:
        """Adds one slice, [tokens, width] logits, whose first id is ``start``."""
        if self._scratch is None:
            self._scratch = new_scratch(logits)
        sum_slice(
            logits, start, self._ids, self._scale, self._with_entropy,
            self._maximum, self._exp_sum, self._weighted_sum, self._logits, self._scratch,
        )  # fmt: skip

    def reduce(self, group: ProcessGroup) -> None:
        """Combines the ranks' pieces of the vocabulary."""
        maxima = torch.cat((self._maximum[None], self._logits.t()))
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        raise_maximum(self._maximum, self._exp_sum, self._weighted_sum, maxima[0])
        self._logits = maxima[1:].t()
        sums = torch.stack((self._exp_sum, self._weighted_sum))
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        self._exp_sum, self._weighted_sum = sums.unbind()

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns log-probabilities [tokens, n], and entropies or 0 and log normalizers [tokens]."""
        log_sum = self._exp_sum.log()
        logprobs = (self._logits - self._maximum[:, None]) - log_sum[:, None]
        entropy = torch.zeros_like(log_sum)
        if self._with_entropy:
            entropy = log_sum - self._weighted_sum / self._exp_sum
        return logprobs, entropy, self._maximum + log_sum


class LogitGrads:
    """Turns a slice of logits into the gradient with respect to it.

    The gradient is that of the logits after their division by the temperature. With ``p`` the softmax, ``H`` its entropy, ``y`` the ids of a token, ``g[y]`` and ``h`` the
    gradients of their log-probabilities and of the entropy, and ``G`` the sum of ``g[y]``::

        d log p[y] / d z[v] = 1[v = y] - p[v]
        d H / d z[v]        = -p[v] (log p[v] + H)
        gradient of z[v]    = sum over y of g[y] 1[v = y] - p[v] (h log p[v] + h H + G)

    Args:
        ids: [tokens, n] int, where id 0 is the first of the first slice. The first one of a token may
            be among the others, which differ from each other.
        normalizer: [tokens] logarithm of the sum of exponentials.
        entropy: [tokens], used only with ``entropy_grad``.
        logprob_grads: [tokens, n], ``g`` above.
        entropy_grad: [tokens], ``h`` above, or None for 0.
        temperature: Divisor of the logits.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        normalizer: torch.Tensor,
        entropy: torch.Tensor,
        logprob_grads: torch.Tensor,
        entropy_grad: torch.Tensor | None,
        temperature: float,
    ) -> None:
        self._ids, self._scale, self._normalizer = ids, 1 / temperature, normalizer
        self._at_ids = logprob_grads
        self._slope: torch.Tensor | None = None
        self._offset = -logprob_grads.sum(dim=1)
        if entropy_grad is not None:
            self._slope = -entropy_grad
            self._offset = self._offset + self._slope * entropy

    def write(self, start: int, logits: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the gradient of the slice whose first id is ``start``.

        Args:
            start: First id.
            logits: [tokens, width]; may be ``out``.
            out: [tokens, width], in the dtype that the gradient shall have.
        """
        write_grads(
            logits, start, self._ids, self._scale, self._normalizer, self._offset, self._slope,
            self._at_ids, out,
        )  # fmt: skip
