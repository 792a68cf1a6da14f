# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The commands of ``torchtitan-grpo``: `cli.py` lists them, and every other module here is one of them."""
