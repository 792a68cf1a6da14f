# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The loss family: pure functions, one idea a file; formulas and papers in docs/losses.md.

Numbers of samples, in the order in which they are used: `reward_shaping`, `advantages`,
`aggregation`. Tensors of tokens: `objective` puts together `policy_terms` (or the user's,
`policy_function`), `mismatch` and `kl`, on top of `sequences` and `ratios`. Logprobs come
from `linear_logprobs`.
"""
