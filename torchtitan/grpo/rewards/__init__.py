# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Holds the built-in reward functions, loads the user's, and scores in worker processes."""


class ScoreLater(Exception):
    """Raised by a reward function if what it needs, such as a judge's server, cannot be reached.

    The group is scored again after a pause, up to seven times within about ten minutes, before it
    counts as unscored. After only two attempts it does so if each took half of
    ``reward.timeout_seconds`` and other groups were scored meanwhile. The message is shown to the user.
    """
