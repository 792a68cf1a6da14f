# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From a TOML file and a command line to a configuration, and the pages of ``--help``.

Nothing here imports torch, so that a mistake in a file and ``--help`` are answered at once.
"""
