# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Holds the built-in reward functions, loads the user's, and scores in worker processes."""


class ScoreLater(Exception):
    """What a reward function needs, such as the server of a judge, is out of reach.

    The group is scored again after a pause, up to seven times within about ten minutes, and counts
    as unscored only then; after two times if each took half of ``reward.timeout_seconds``, and other
    groups were scored meanwhile. The message is shown to the user.
    """
