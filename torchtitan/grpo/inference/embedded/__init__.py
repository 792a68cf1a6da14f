# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The embedded inference server: continuous batching over Hugging Face transformers.

It has SGLang's HTTP routes, as far as this project's clients use them. In reading order:

    request.py       one completion
    step_layout.py   the tokens of one forward
    kv_cache.py      keys and values of all running requests, one slot for each
    attention.py     attention over the slots
    model.py         the transformers model: prompts and decoding over the slots
    decode_graph.py  decoding steps as CUDA graphs
    sampling.py      sampling parameters, and a vectorised sampler
    prefill.py       which prompts a step computes
    engine.py        the thread that schedules, samples, pauses and swaps weights
    weights.py       the parameters by name
    updates.py       weight updates (weight_wire/session.py), and their commit
    server.py        the HTTP routes, whose JSON is in bodies.py
    client.py        the client, and the launcher of this kind
"""
