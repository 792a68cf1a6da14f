# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Losses as pure functions, one idea in each file; docs/losses.md has formulas and papers.

`advantages` (with shaped rewards) and `aggregation` (weights) compute numbers for each sample, and the
other modules numbers for each token: `objective` combines `policy_terms` (or the user's `policy_function`),
`mismatch` and `kl`, which use `sequences`. `loss_metrics` combines their metrics. Logprobs come
from `linear_logprobs`.
"""
