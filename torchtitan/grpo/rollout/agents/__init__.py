# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Trains a model on the conversations of agent programs, which call the model over OpenAI's API.

In reading order: `writer` (one completion is one episode of a program), `programs` (how they run),
`endpoint` (where they reach the model) with the bodies of its routes, `episode` (from a request to an
answer), `transcript` (from messages to tokens), and `rows` (the training rows).
"""
