# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The servers of a run, and which of them generates which completion.

In reading order: `dispatcher` (all servers and all completions in flight), `server_state` (one
server), `concurrency` (how many completions a server gets), `placement` (which server gets
them), `attempts` (one request), `hedging` (a second request for a stalled one), `load_watch`
(the servers' own load reports), `requests`; then `fleet` and `supervisor`, which start servers
and follow those that join and leave.
"""
