"""Loads a Hugging Face directory into a sharded model; scores, gathers and exports it."""

from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from torchtitan.grpo.config_manager import JobConfig
from torchtitan.grpo.data.rows import Sample, build_rows
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.models.hf_weights import (
    export_hf,
    full_hf_tensors,
    load_hf_weights,
    named_parameters,
)
from torchtitan.grpo.models.spec import (
    build_reference,
    hf_train_spec,
    prepare_model_parts,
    register_hf_model,
)
from torchtitan.grpo.step import Scorer
from torchtitan.grpo.weight_sync.gather import Gatherer, plan_buckets
from torchtitan.grpo.weight_sync.snapshot import Snapshots


def build(arguments):
    config = JobConfig()
    config.model.hf_assets_path = arguments["model"]
    config.training.seq_len = arguments["seq_len"]
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = arguments.get("ac", "none")
    dist_utils.init_distributed(config.comm)
    replicate = arguments.get("replicate", 1)
    dims = ParallelDims(replicate, -1, 1, 1, 1, 1, 1, dist.get_world_size())
    hf_model = read_hf_model(arguments["model"])
    hf_model.model_args.update_from_config(config)
    spec = hf_train_spec(hf_model, "directory")
    with torch.device("meta"):
        model = spec.model_cls(hf_model.model_args)
    model = spec.parallelize_fn(model, dims, config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    prepare_model_parts([model], "sdpa", "cpu")
    adapter = hf_model.train_spec.state_dict_adapter(hf_model.model_args, arguments["model"])
    load_hf_weights([model], adapter, arguments["model"])
    register_hf_model(hf_model, config)
    reference = build_reference(hf_model, config, dims, torch.device("cpu"), "sdpa")
    return model, reference, adapter, hf_model


def main(arguments):
    model, reference, adapter, hf_model = build(arguments)
    sequences = arguments["sequences"]
    samples = [
        Sample(
            torch.tensor(ids[:2], dtype=torch.int32).numpy(),
            torch.tensor(ids[2:], dtype=torch.int32).numpy(),
            torch.zeros(len(ids) - 2).numpy(),
            1.0,
        )
        for ids in sequences
    ]
    rows = build_rows(samples, arguments["rows"], arguments["seq_len"])
    logprobs = Scorer("sdpa", 1.0)(model, rows)
    reference_logprobs = Scorer("sdpa", 1.0)(reference, rows)
    (logprobs * rows.loss_mask).sum().backward()
    grad_norm = dist_utils.clip_grad_norm_(model.parameters(), 1e9, foreach=True)

    parameters = dict(named_parameters([model]))
    snapshots = Snapshots(parameters, 2, torch.float32, torch.device("cpu"))
    snapshots.copy_into(1)
    plans = plan_buckets(parameters, adapter, torch.float32, arguments["bucket_bytes"])
    cpu = torch.device("cpu")
    gatherer = Gatherer(parameters, adapter, plans, "gloo", 60.0, cpu, cpu)
    buffers = gatherer.new_buffers() if dist.get_rank() == 0 else None
    buckets = gatherer.gather(snapshots.read(1), buffers)
    gathered_equal = True
    full = dict(full_hf_tensors([model], adapter))
    for bucket in buckets:
        position = 0
        for name, shape in zip(bucket.spec.names, bucket.spec.shapes, strict=True):
            size = full[name].numel() * 4
            piece = bucket.payload[position : position + size].view(torch.float32).view(shape)
            gathered_equal &= torch.equal(piece, full.pop(name))
            position += size
        gathered_equal &= position == bucket.payload.numel()
    if dist.get_rank() == 0:
        gathered_equal &= not full

    export_hf(
        [model], adapter, hf_model.path, Path(arguments["export"]), torch.float32,
        is_writer=dist.get_rank() == 0, max_file_bytes=100_000,
    )  # fmt: skip
    return {
        "logprobs": logprobs.tolist(),
        "reference_equal": torch.equal(reference_logprobs, logprobs),
        "reference_trains": any(p.requires_grad for p in reference.parameters()),
        "mask": rows.loss_mask.tolist(),
        "labels": rows.labels.tolist(),
        "grad_norm": float(grad_norm),
        "gathered_equal": bool(gathered_equal),
        "num_buckets": len(plans),
    }
