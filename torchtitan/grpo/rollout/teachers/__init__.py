# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The teachers of a run (``[teacher]``): servers that rate what the trained model has sampled."""

from torchtitan.grpo.rollout.teachers.teacher_check import TeacherNeeds
from torchtitan.grpo.rollout.teachers.teacher_pool import (
    NotRated,
    TeacherPool,
    TeachersFailing,
    Unrated,
)

__all__ = ["NotRated", "TeacherNeeds", "TeacherPool", "TeachersFailing", "Unrated"]
