# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The base of trainers: does on each rank what torchtitan's own trainer does before its first step.

Torchtitan's own trainer is a different class in each release, and builds dataloaders, tokenizers and
losses that training on rollouts does not need.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor._random import manual_seed

from torchtitan.grpo.config.frame import Comm, Debug
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.hf_names import StateDictAdapter
from torchtitan.grpo.observe.metrics_processor import GRPOMetricsProcessor
from torchtitan.grpo.observe.phases import Phases
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.training.lr_schedule import Schedules, build_lr_schedulers
from torchtitan.grpo.training.optimizers import Optimizers, build_optimizers
from torchtitan.grpo.upstream.checkpoint import CheckpointManager
from torchtitan.grpo.upstream.parallelism import (
    GarbageCollection,
    ParallelDims,
    parallel_dims,
    utils,
)


@dataclass(frozen=True)
class ModelSpec:
    """How to build a model on the meta device, parallelize it, and name its parameters in files.

    Attributes:
        model_args: The arguments of ``model_cls``.
        state_dict_adapter: (model arguments, path of a Hugging Face directory) -> adapter.
        parallelize_fn: (model, meshes, configuration) -> model, for all layouts except pipelines.
        pipelining_fn: (model, meshes, configuration, device) -> schedule, its loss, and this rank's
            parts.
        schedule_steps: Length of the learning-rate schedule; None for the configured length.
    """

    model_args: Any
    model_cls: Callable[[Any], nn.Module]
    state_dict_adapter: Callable[[Any, str | None], StateDictAdapter]
    parallelize_fn: Callable[[nn.Module, ParallelDims, JobConfig], nn.Module]
    pipelining_fn: Callable[..., tuple[Any, Any, list[nn.Module]]]
    schedule_steps: int | None = None


class Trainer(Stateful):
    """Holds a rank's device, meshes, model, optimizer, schedule and metrics.

    A subclass sets ``train_spec`` in :meth:`init_distributed`, makes the ``checkpointer``, and implements
    :meth:`train`. Collective over all ranks.
    """

    train_spec: ModelSpec
    checkpointer: CheckpointManager
    pp_schedule: Any = None
    stage_loss: Any = None

    def __init__(self, job_config: JobConfig) -> None:
        self.job_config = job_config
        # Connecting the ranks and reading a checkpoint are a part of the run's time.
        self.phases = Phases(job_config.observe.stuck_seconds)
        logger.info(f"Starting job: {job_config.job.description}")
        self.device = _take_device()
        self.parallel_dims = self.init_distributed()
        if job_config.job.print_config:
            logger.info(f"Settings: {strict_json.dumps(job_config.to_dict(), indent=2)}")
        self.gc_handler = GarbageCollection(job_config.training.gc_freq)
        set_seeds(self.parallel_dims, self.device, job_config.debug)
        self.model_args = self.train_spec.model_args
        self.model_args.update_from_config(job_config)
        self.metrics_processor = GRPOMetricsProcessor(job_config, self.phases)
        self.model_parts = self._build_model()
        self.optimizers: Optimizers = build_optimizers(self.model_parts, job_config.optimizer)
        self.lr_schedulers: Schedules = build_lr_schedulers(
            self.optimizers,
            job_config.lr_scheduler,
            job_config.training.steps,
            num_steps=self.train_spec.schedule_steps,
        )
        self.step = 0
        self.ntokens_seen = 0

    def init_distributed(self) -> ParallelDims:
        join_ranks(self.job_config.comm, self.job_config.job.dump_folder)
        return parallel_dims(self.job_config.parallelism, dist.get_world_size())

    def _build_model(self) -> list[nn.Module]:
        """Returns this rank's parts, with memory but without weights."""
        config, dims, spec = self.job_config, self.parallel_dims, self.train_spec
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
            model = spec.model_cls(self.model_args)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        logger.info(f"Built {config.model.hf_assets_path}: {num_parameters:,} parameters")
        if dims.pp_enabled:
            made = spec.pipelining_fn(model, dims, config, self.device)
            self.pp_schedule, self.stage_loss, parts = made
        else:
            parts = [spec.parallelize_fn(model, dims, config)]
        for part in parts:
            part.to_empty(device=self.device.type)
            with torch.no_grad():
                part.init_weights()  # pyright: ignore[reportCallIssue]
            part.train()
        return parts

    def train(self) -> None:
        raise NotImplementedError

    def should_continue_training(self) -> bool:
        return self.step < self.job_config.training.steps

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"]

    def close(self) -> None:
        if hasattr(self, "metrics_processor"):
            self.metrics_processor.close()


def _take_device() -> torch.device:
    device = torch.device(f"{utils.device_type}:{int(os.environ['LOCAL_RANK'])}")
    utils.device_module.set_device(device)
    return device


def join_ranks(settings: Comm, dump_folder: str) -> None:
    """Makes the process group of all ranks, whose collectives NCCL's flight recorder remembers."""
    if dist.is_initialized():
        return
    # The recorder writes its files only if the watchdog leaves the communicator as it is:
    # https://github.com/pytorch/pytorch/issues/121055
    variables = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_FR_BUFFER_SIZE": str(settings.trace_buf_size),
    }
    if settings.trace_buf_size > 0:
        folder = Path(dump_folder, settings.save_traces_folder)
        folder.mkdir(parents=True, exist_ok=True)
        variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
        variables["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / settings.save_traces_file_prefix)
    os.environ.update(variables)
    backend = dist.Backend.default_device_backend_map.get(utils.device_type, "nccl")
    dist.init_process_group(backend, timeout=timedelta(seconds=settings.init_timeout_seconds))


def set_seeds(dims: ParallelDims, device: torch.device, settings: Debug) -> None:
    """Seeds all ranks: stages of a pipeline differently, the ranks of one stage alike.

    Without ``debug.seed``, rank 0 draws the seed. Collective over all ranks.
    """
    if settings.deterministic:
        logger.info("Only kernels are used whose results repeat: training may be slower.")
        torch.use_deterministic_algorithms(True, warn_only=settings.deterministic_warn_only)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    seed = settings.seed
    if seed is None:
        if dims.world_size == 1:
            return
        drawn = torch.tensor([torch.initial_seed() % 2**63], device=device)
        dist.broadcast(drawn, src=0)
        seed = int(drawn.item())
    pipeline = dims.get_optional_mesh("pp")
    seed = (seed + (pipeline.get_local_rank() if pipeline is not None else 0)) % 2**64
    torch.manual_seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed % 2**32)
    if dims.world_size > dims.pp:
        manual_seed(seed, dims.world_mesh)
