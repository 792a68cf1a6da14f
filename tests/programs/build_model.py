"""Builds a Hugging Face directory's model in any layout, as the trainer does."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from varlen_kernel import use_dense_varlen

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.decoder import is_tied
from torchtitan.grpo.models.hf_config import HFModel, read_hf_model
from torchtitan.grpo.models.hf_names import StateDictAdapter
from torchtitan.grpo.models.hf_weights import load_hf_weights
from torchtitan.grpo.models.parallelize import parallelize
from torchtitan.grpo.pipeline import auto
from torchtitan.grpo.pipeline.auto import resolve_schedule
from torchtitan.grpo.pipeline.build import split_model
from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.tables.actions import Costs
from torchtitan.grpo.training.frame import join_ranks
from torchtitan.grpo.training.model_spec import hf_train_spec
from torchtitan.grpo.upstream.parallelism import ParallelDims, parallel_dims


@dataclass
class Built:
    config: JobConfig
    hf_model: HFModel
    adapter: StateDictAdapter
    parts: list[nn.Module]
    dims: ParallelDims
    measured: Costs | None = None


def build(*arguments: Any, **settings: Any) -> Built:
    return build_stages(*arguments, **settings)[0]


_DEGREES = {
    "dp_replicate": "data_parallel_replicate",
    "dp_shard": "data_parallel_shard",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "ep": "expert_parallel",
}


def build_stages(
    model: str,
    seq_len: int,
    schedule: str = "1F1B",
    ac: str = "none",
    compiled: bool = False,
    local_batch_size: int = 4,
    precision: str = "float32",
    keeps_logits: bool = True,
    folder: str = "./outputs",
    early_blocks: int = 1,
    layers_per_stage: int | None = None,
    offload: float = 0.0,
    chunk_tokens: int = 0,
    lora: dict[str, Any] | None = None,
    microbatches: int = 0,
    edge_layers: int = 1,
    attention: Literal["auto", "varlen", "flex", "sdpa"] = "auto",
    kept: str = "free",
    **degrees: int,
) -> tuple[Built, list[LeanStage]]:
    """Returns a loaded model and the stages of a pipeline.

    ``degrees`` are those of ParallelDims, with 1 as the default. A stand-in computes ``varlen``.
    """
    if attention == "varlen":
        use_dense_varlen()
    config = JobConfig()
    config.model.hf_assets_path = model
    config.training.seq_len = seq_len
    config.job.dump_folder = folder
    config.training.local_batch_size = local_batch_size
    config.training.mixed_precision_param = precision
    config.activation_checkpoint.mode = ac.partition(" ")[0]
    config.activation_checkpoint.selective_ac_option = ac.partition(" ")[2] or "2"
    config.grpo.logprob_keep_logits = keeps_logits
    config.grpo.recompute_early_blocks = early_blocks
    config.grpo.pipeline_offload = offload
    config.grpo.pipeline_chunk_tokens = chunk_tokens
    config.compile.enable = compiled
    config.grpo.packed_attention = attention
    config.parallelism.fsdp_between_microbatches = kept
    for name, value in (lora or {}).items():
        setattr(config.lora, name, value)
    config.parallelism.pipeline_parallel_schedule = schedule
    auto.assumed_microbatches = lambda num_ranks: microbatches or 4 * num_ranks
    config.parallelism.pipeline_parallel_layers_per_stage = layers_per_stage
    config.parallelism.pipeline_parallel_first_stage_less_layers = edge_layers
    config.parallelism.pipeline_parallel_last_stage_less_layers = edge_layers
    for name, key in _DEGREES.items():
        setattr(config.parallelism, f"{key}_degree", degrees.get(name, 1))
    join_ranks(config.comm, folder)
    dims = parallel_dims(config.parallelism, dist.get_world_size())
    hf_model = read_hf_model(model)
    model_args: Any = hf_model.model_args
    model_args.update_from_config(config)
    spec = hf_train_spec(hf_model, config)
    with torch.device("meta"):
        whole = spec.model_cls(model_args)
    cpu, measured = torch.device("cpu"), None
    if dims.pp_enabled:
        measured = resolve_schedule(whole, dims, config, cpu)
        stages, parts = split_model(whole, dims, config, cpu)
    else:
        stages: list[LeanStage] = []
        parts = [parallelize(whole, dims, config)]
    for part in parts:
        if is_tied(part) and None not in (part.output, part.tok_embeddings):
            # Before weights are initialized, where upstream ties once more: two parameters would
            # by then be sharded, gathered and kept in memory twice.
            assert part.output.weight is part.tok_embeddings.weight
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights()
    adapter = spec.state_dict_adapter(model_args, model)
    load_hf_weights(parts, adapter, model)
    return Built(config, hf_model, adapter, parts, dims, measured), stages
