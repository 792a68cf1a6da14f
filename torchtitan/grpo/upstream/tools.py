# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The device of the process, garbage collection and memory snapshots.

0.3.0 keeps them but `maybe_enable_memory_snapshot`, which became part of a profiler class.
"""

from torchtitan.tools import utils
from torchtitan.tools.profiling import maybe_enable_memory_snapshot
from torchtitan.tools.utils import GarbageCollection
