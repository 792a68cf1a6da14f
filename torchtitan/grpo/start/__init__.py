# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What ``torchtitan-grpo train`` does before the training ranks exist, and until they end."""
