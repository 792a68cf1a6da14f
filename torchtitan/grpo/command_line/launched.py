# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How the ranks learn what started them."""

LAUNCH_VARIABLE = "TORCHTITAN_GRPO_LAUNCH"
"""Variable in which `scripts/launch_multinode.sh` leaves its command, up to the settings of the run."""

LAUNCH_ID_VARIABLE = "TORCHTITAN_GRPO_LAUNCH_ID"
"""Variable in which a scheduler that starts whole runs again names the run, the same each time."""
