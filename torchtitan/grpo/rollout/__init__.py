# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rollout process, which turns prompts into scored groups.

In reading order: `link` (rank 0's end), `process` (the other end), `session` (what it is
made of), `producer` (the loop), `admission` (the staleness bound), `serving` (servers),
`scoring`, `prompts`, `evaluation`.
"""
