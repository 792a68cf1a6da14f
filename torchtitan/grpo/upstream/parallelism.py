# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Meshes, collectives, and the split of a model into stages of a pipeline.

0.3.0 keeps `ParallelDims` and `dist_utils`. Its pipeline helpers are private; a move would copy both.
"""

from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.pipeline_parallel import (
    generate_llm_fqn_per_model_part,
    pipeline_module_split,
)
