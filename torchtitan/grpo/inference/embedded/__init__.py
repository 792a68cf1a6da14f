# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The embedded inference server: continuous batching over Hugging Face transformers.

It speaks SGLang's HTTP dialect, so one client serves both. Files in reading order:

    request.py   one completion in the making
    kv_cache.py  keys and values of all running requests, a slot each
    model.py     the transformers model: prefill and decode over the slots
    sampling.py  sampling parameters, and a vectorised sampler
    engine.py    the thread that schedules, samples, pauses and swaps weights
    weights.py   the parameters by name
    updates.py   update sessions: staging (weight_wire/staging.py), and the one commit
    generate_json.py  JSON of /generate, both ways
    update_json.py  JSON of a weight update
    responses.py  JSON requests and answers
    daemon_thread.py  blocking calls, each on a thread of its own
    auth.py      which key a route needs
    server.py    the HTTP routes
"""
