# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How the ranks learn which command of the user started them."""

LAUNCH_VARIABLE = "TORCHTITAN_GRPO_LAUNCH"
"""Variable in which `scripts/launch_multinode.sh` leaves its command, up to the settings of the run."""
