# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The device of the process, the peak of a GPU, and garbage collection."""

from torchtitan.tools import utils
from torchtitan.tools.utils import GarbageCollection
