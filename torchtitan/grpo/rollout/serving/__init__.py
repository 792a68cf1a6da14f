# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The servers of a run, and the choice of the server that generates a completion.

In reading order: `dispatcher` (all servers and all completions in flight), `server_state` (one
server, and the choice among several), `concurrency` (how many completions a server gets),
`attempts` (one request), `requests`, `spare_slots` (places for evaluations), and then `fleet` and
`supervisor`, which start servers and track those that join and leave.
"""
