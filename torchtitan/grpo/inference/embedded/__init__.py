# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The embedded inference server: continuous batching over Hugging Face transformers.

It has SGLang's HTTP routes, so that both kinds share most of their client. Inside the server, in
reading order:

    request.py   one running completion
    kv_cache.py  keys and values of all running requests, one slot for each
    model.py     the transformers model: prefill and decode over the slots
    sampling.py  sampling parameters, and a vectorised sampler
    engine.py    the thread that schedules, samples, pauses and swaps weights
    weights.py   the parameters by name
    updates.py   update sessions: staging (weight_wire/staging.py), and the commit
    generate_json.py  JSON of /generate, requests and answers
    update_json.py  JSON of a weight update
    responses.py  JSON requests and answers
    daemon_thread.py  blocking calls, each on a thread of its own
    connections.py  how many connections there may be, and how long they may send nothing
    repeat_limit.py  a log line that comes again and again is written a few times
    server.py    the HTTP routes
    __main__.py  the command line

Outside of it, `client.py` and `launch.py` are the client and the launcher of this kind.
"""
