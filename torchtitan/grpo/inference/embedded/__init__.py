# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The embedded inference server: continuous batching over Hugging Face transformers.

It has SGLang's HTTP routes, as far as this project's clients use them. A reader may begin with
request.py and step_layout.py, and go on with model.py (one step) and engine.py (all steps).
"""
