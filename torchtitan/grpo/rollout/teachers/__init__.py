# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The teachers of a run (``[teacher]``): servers that rate what the trained model has sampled.

`teacher_check.py` decides whether a server can be a teacher, `teacher_pool.py` sends requests and deals
with teachers that are slow, lost or restarted, and `group_rater.py` rates whole groups.
"""

from torchtitan.grpo.rollout.teachers.group_rater import GroupRater, TeachersFailing, Unrated
from torchtitan.grpo.rollout.teachers.teacher_check import TeacherNeeds
from torchtitan.grpo.rollout.teachers.teacher_pool import NotRated, TeacherPool

__all__ = ["GroupRater", "NotRated", "TeacherNeeds", "TeacherPool", "TeachersFailing", "Unrated"]
