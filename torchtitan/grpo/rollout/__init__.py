# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rollout process, which turns prompts into scored groups.

In reading order: `link` (rank 0's end of the connection), `process` (the other end), `session`
(how the process is built from the configuration) with `inputs`, `producer` (the main loop),
`admission` (the staleness bound), `ledger` (what happened to each prompt), `serving/` (the servers
and the choice among them), `trajectory`, `judging`, `scoring`, `prompts/` over `tables/`,
`evaluator`.
"""
