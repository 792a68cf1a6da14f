# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the parts of the training loop that compute with the trained model.

These are the learner, the probe that attests servers, and the held-out loss. Each function reads
the settings and the model from the trainer.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from torchtitan.grpo.attestation import attested_tokens
from torchtitan.grpo.models.packed_model import PackedModel
from torchtitan.grpo.training.gradient_norm import GradientClipper
from torchtitan.grpo.training.held_out_loss import HeldOutLoss, held_out_plan
from torchtitan.grpo.training.learner import Learner
from torchtitan.grpo.training.model_spec import choose_reference
from torchtitan.grpo.training.policy_probe import PolicyProbe, probe_shape
from torchtitan.grpo.training.utilization import Utilization
from torchtitan.grpo.upstream.tools import utils

if TYPE_CHECKING:
    from torchtitan.grpo_train import GRPOTrainer


def build_learner(trainer: "GRPOTrainer", await_readers: Callable[[], None]) -> Learner:
    """Returns the learner. Its reference model, if there is one, is added to the checkpoints.

    Args:
        trainer: The trainer, which has built the model, the optimizers and the feed.
        await_readers: See :class:`Learner`.
    """
    config, reference = trainer.config, None
    if config.grpo.kl_coef > 0:
        reference = choose_reference(trainer, trainer.runner)
        trainer.checkpointer.states.update(reference.checkpoint_state())
    return Learner(
        config=config.grpo,
        runner=trainer.runner,
        reference=reference,
        optimizers=trainer.optimizers,
        clipper=GradientClipper(
            trainer.model_parts, trainer.parallel_dims, config.training.max_norm
        ),
        guards=trainer.guards,
        feed=trainer.feed,
        role=trainer.role,
        device=trainer.device,
        enter=trainer.enter,
        await_readers=await_readers,
        teacher=config.teacher if config.may_be_taught else None,
    )


def build_probe(trainer: "GRPOTrainer") -> PolicyProbe:
    """Returns the probe, which computes the log-probabilities that servers are compared with."""
    tokens = attested_tokens(trainer.config, trainer.hf_model.vocab_size)
    attention = cast(PackedModel, trainer.model_parts[0]).settings.attention
    shape = probe_shape(trainer.config, trainer.parallel_dims, len(tokens), attention)
    is_speaker = trainer.role.is_counted and trainer.role.batch_rank == 0
    return PolicyProbe(
        trainer.runner, trainer.model_parts, trainer.feed, tokens, shape, trainer.device, is_speaker
    )


def build_utilization(trainer: "GRPOTrainer") -> Utilization | None:
    """Returns what measures the utilization of the devices; None on CPU, whose peak is not known."""
    if trainer.device.type == "cpu":
        return None
    peak = utils.get_peak_flops(trainer.metrics_processor.device_memory_monitor.device_name)
    return Utilization(trainer.config, trainer.hf_model, dist.get_world_size(), peak)


def open_held_out(trainer: "GRPOTrainer") -> HeldOutLoss | None:
    """Sends each rank its rows of the held-out examples.

    Collective over all ranks. Returns ``None`` if there are no held-out examples.
    """
    if trainer.config.sft.held_out_path is None:
        return None
    plan = None
    if trainer.source is not None:
        with trainer.rank_zero.releasing_others():
            num_ranks, date = trainer.role.num_batch_ranks, trainer.begins.record.date
            plan = held_out_plan(trainer.config, trainer.hf_model, num_ranks, date)
    return HeldOutLoss(
        trainer.runner, trainer.feed, trainer.device, plan, is_counted=trainer.role.is_counted
    )
