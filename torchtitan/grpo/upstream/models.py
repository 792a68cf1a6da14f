# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Qwen3 and its mixture of experts, which carry all families here, and how they are parallelized.

0.3.0 has a new Qwen3 (`models.qwen3.model`) and mixture of experts (`models.common.moe`) with other
arguments. It has no Llama 4, whose `apply_*` functions shard and compile our models, and turned
`apply_ac` into classes. A move would copy this file's names, or port `grpo/models/` to `ModelSpec`.
"""

from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama4.infra.parallelize import apply_compile, apply_fsdp, apply_moe_ep_tp
from torchtitan.models.moe import MoEArgs
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.kernels import generate_permute_indices
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.models.moe.moe import _run_experts_grouped_mm as run_experts_grouped_mm
from torchtitan.models.moe.utils import indices_padding_wrapper
from torchtitan.models.qwen3 import get_train_spec as qwen3_train_spec
from torchtitan.models.qwen3.infra.parallelize import _op_sac_save_list as op_sac_save_list
from torchtitan.models.qwen3.infra.parallelize import apply_non_moe_tp as apply_tp
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import (
    Attention,
    Qwen3Model,
    TransformerBlock,
    apply_rotary_emb,
)
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter
