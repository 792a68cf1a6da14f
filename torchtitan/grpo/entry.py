# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From a command line to a trainer, and from whatever happens to an exit status.

What a user did wrong, and what failed outside, is said once, in one line, on rank 0; only a
mistake of ours shows a traceback.
"""

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torchtitan.tools.logging import logger

from torchtitan.grpo.checkpoint import CheckpointError
from torchtitan.grpo.config_checks import ConfigError, check_model
from torchtitan.grpo.config_manager import describe, is_dry_run, load_config
from torchtitan.grpo.data.feed import RankZeroFailed
from torchtitan.grpo.data.files import DataError
from torchtitan.grpo.inference.urls import named_urls
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel, ModelError, read_hf_model
from torchtitan.grpo.models.same_model import check_reference
from torchtitan.grpo.observe.console import init_console
from torchtitan.grpo.rollout.link import RolloutFailed
from torchtitan.grpo.system.device import keep_gloo_on_loopback
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo.weight_sync.publisher import PublisherFailed

# Longer than rank 0 takes to say what is wrong and to close.
_RANK_ZERO_PATIENCE_SECONDS = 15.0
# Longer than torchrun takes to stop all ranks when one of them has ended.
_AGENT_PATIENCE_SECONDS = 5.0


class RunnableTrainer(Protocol):
    """What is run here: `grpo_train.GRPOTrainer`."""

    def train(self) -> None: ...

    def close(self) -> None: ...


# What says by itself, in one message, what went wrong.
_EXPLAINED = (
    CheckpointError, DataError, ModelError, PublisherFailed, RolloutFailed, TimeoutError,
)  # fmt: skip

TrainerFactory = Callable[[JobConfig, HFModel, StopRequest], RunnableTrainer]


def run(make_trainer: TrainerFactory, args: Sequence[str]) -> int:
    """Checks the configuration, trains, and returns the process's exit status."""
    args = list(args)
    is_rank_zero = int(os.environ.get("RANK", "0")) == 0
    try:
        dry_run = is_dry_run(args)
        config = load_config(args)
        hf_model = read_hf_model(config.model.hf_assets_path)
        check_model(config, hf_model)
        if config.grpo.kl_coef > 0:
            check_reference(config)
    except (ConfigError, ModelError) as error:
        return _say(is_rank_zero, error, 2)
    if dry_run:
        if is_rank_zero:
            device = "CUDA" if torch.cuda.is_available() else "CPU"
            print(describe(config))
            print(f"  model: {hf_model.architecture} at {hf_model.path}, on {device}")
        return 0
    return _train(make_trainer, config, hf_model, is_rank_zero)


def _train(
    make_trainer: TrainerFactory, config: JobConfig, hf_model: HFModel, is_rank_zero: bool
) -> int:
    init_console(config.observe.log_level, is_rank_zero=is_rank_zero)
    keep_gloo_on_loopback(named_urls(config.inference))
    stop = StopRequest(config.grpo.stop_timeout_seconds)
    trainer: RunnableTrainer | None = None
    try:
        trainer = make_trainer(config, hf_model, stop)
        trainer.train()
    except RankZeroFailed:
        # Rank 0 speaks, and closes, first: torchrun ends everybody once one rank has ended.
        stop.wait(_RANK_ZERO_PATIENCE_SECONDS)
        return 1
    except _EXPLAINED as error:
        return _say(is_rank_zero, error, 1, stop.wait)
    except Exception as error:
        # A collective with a rank that is gone fails, and that is not what went wrong: then
        # torchrun is about to stop this rank, too.
        if not stop.wait(_AGENT_PATIENCE_SECONDS):
            raise
        name = signal.Signals(stop.exit_code - 128).name
        logger.warning(f"Stopped by {name}, during {type(error).__name__}: {error}")
    finally:
        if trainer is not None:
            trainer.close()
    if stop.requested:
        return stop.exit_code
    dist.destroy_process_group()
    return 0


def _say(
    is_rank_zero: bool,
    error: Exception,
    status: int,
    wait: Callable[[float], bool | None] = time.sleep,
) -> int:
    """The one message that a user needs; a traceback would hide it.

    As a rule all ranks meet the same error: rank 0 says it and ends, and the others wait
    for torchrun to end them. One that met it alone says so itself.
    """
    if is_rank_zero or not wait(_RANK_ZERO_PATIENCE_SECONDS):
        print(f"error: {error}", file=sys.stderr, flush=True)
    return status


def leave(main: Callable[[], int]) -> None:
    """Runs ``main``, which closes everything, and ends the process with its status.

    At once, for what may be left are threads that Python cannot end well. One may be inside
    a collective with a rank that is gone, or a broadcast to a server that is stopped. Gloo's
    may be about to drop the last hold of a tensor, for which it takes the interpreter's lock:
    where the interpreter is being torn down by then, that aborts the process
    (https://github.com/pytorch/pytorch/issues/190489).
    """
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
