# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo check-gpu``: measures on a GPU what tests without one cannot tell."""
