# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The teachers of a run (``[teacher]``): servers that rate what the trained model has sampled.

`teacher_check.py` decides whether a server can be a teacher, and `teacher_pool.py` rates groups, with
teachers that may be slow, lost or restarted.
"""

from torchtitan.grpo.rollout.teachers.teacher_check import TeacherNeeds
from torchtitan.grpo.rollout.teachers.teacher_pool import (
    GroupRater,
    NotRated,
    TeacherPool,
    TeachersFailing,
    Unrated,
)

__all__ = ["GroupRater", "NotRated", "TeacherNeeds", "TeacherPool", "TeachersFailing", "Unrated"]
