# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The unbiased estimator of pass@k: Chen et al. (2021), https://arxiv.org/abs/2107.03374."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimates the probability that at least one of ``k`` completions of a prompt passes.

    It is ``1 - C(n - c, k) / C(n, k)``: of all choices of ``k`` among the ``n`` completions, the
    share that contains one of the ``c`` that passed. The expected value is the probability itself,
    while that of ``1 - (1 - c / n)^k`` is below it. The binomials are not computed, because they
    overflow; the quotient is the product of ``1 - k / i`` for ``i`` from ``n - c + 1`` to ``n``.

    Example: of 4 completions 1 passed. Of the 6 pairs, 3 contain it, so pass@2 is 0.5.

    Args:
        num_samples: Number of completions, ``n``.
        num_passed: How many of them passed, ``c``.
        k: Number of attempts, from 1 to ``num_samples``.

    Raises:
        ValueError: If ``k`` or ``num_passed`` is out of range.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be from 1 to the number of samples, {num_samples}, got {k}.")
    if not 0 <= num_passed <= num_samples:
        raise ValueError(
            f"The number of samples that passed must be from 0 to {num_samples}, got {num_passed}."
        )
    num_failed = num_samples - num_passed
    if num_failed < k:
        return 1.0  # every choice of k contains one that passed
    all_fail = 1.0
    for i in range(num_failed + 1, num_samples + 1):
        all_fail *= 1.0 - k / i
    return 1.0 - all_fail
