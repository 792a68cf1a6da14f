# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The embedded inference server: continuous batching over Hugging Face transformers.

It has SGLang's HTTP routes, as far as this project's clients use them. A reader may begin with
request.py and step_layout.py, and go on with kv_cache.py, attention.py and model.py (one step over
the slots), engine.py (the thread of all steps), updates.py (weights) and server.py (routes).
"""
