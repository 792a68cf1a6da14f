# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Losses as pure functions, one idea in each file; docs/losses.md has formulas and papers.

`advantages` (with shaped rewards) and `aggregation` (weights) compute one number for each sample. The other
modules compute one for each token: `objective` combines `policy_terms` (or the user's `policy_function`),
`mismatch` and `kl`, all of which use `sequences`. `loss_metrics` combines the metrics of these terms.
Logprobs come from `linear_logprobs`.
"""
