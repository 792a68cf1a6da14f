# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tables ``[observe]`` and ``[guards]``."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class Observe:
    """``[observe]``: what a run prints and writes, in addition to torchtitan's ``[metrics]``."""

    samples_per_step: Annotated[int, at_least(0)] = 4
    """Number of prompts in each step, the first of its batch, whose completions are written to
    ``samples.jsonl``, also those without a reward. With 0, the file is not written."""

    print_samples: Annotated[int, at_least(0)] = 0
    """Number of the prompts of ``samples.jsonl`` that are also printed in each step with their
    completions as the model saw them: special tokens, turns, trained tokens, advantages and rewards.
    At most ``samples_per_step``."""

    equal_rewards_steps: Annotated[int, at_least(1).or_value(0, "off")] = 5
    """Experimental: Number of steps in a row without two different rewards in any group after
    which a warning reports that nothing is learned, with the likely causes. The number of steps
    doubles for each further warning."""

    monitor: bool = True
    """Serve ``/healthz`` and ``/metrics`` (Prometheus) on rank 0 and in the rollout process. Their
    addresses are written to ``<dump_folder>/monitoring``; docs/how-to/monitor.md describes them."""

    monitor_host: str = "127.0.0.1"
    """Address on which ``/healthz`` and ``/metrics`` are served. An address other than loopback
    needs a key in the environment variable ``TORCHTITAN_GRPO_MONITOR_KEY``, which clients send as
    ``Authorization: Bearer KEY``."""

    monitor_port: Annotated[int, at_least(1).at_most(65534).or_value(0, "free ports")] = 0
    """Port of ``/healthz`` and ``/metrics`` on rank 0. The rollout process uses the next port."""

    stuck_seconds: Annotated[float, above(0)] = 600.0
    """Time without progress after which ``/healthz`` responds with 503. On rank 0, this happens if
    a phase takes longer than this and longer than three times the longest earlier phase of the same
    kind. In the rollout process, it happens if for this time no server could accept requests, or
    rank 0 has waited for a batch and no completion has finished."""

    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """How progress is shown: a live ``bar``, a line for each step (``lines``), or nothing.
    ``auto`` shows the bar on a terminal and lines elsewhere."""

    timeline: bool = False
    """Write what each process does, and when, to ``<dump_folder>/timeline``. ``torchtitan-grpo timeline``
    makes a trace of it for Perfetto; docs/how-to/monitor.md describes it."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """Minimum level of the log messages that rank 0 prints. Other ranks only print warnings and
    errors."""


Action = Literal["skip", "stop", "warn", "off"]


@dataclass
class Guards:
    """``[guards]``: what happens when a run goes wrong.

    docs/how-to/monitor.md explains each guard. Guards judge a gradient before its optimizer step,
    with the same result on every rank. With ``skip``, the optimizer step is skipped: weights and
    optimizer state do not change, whereas the policy version and the learning-rate schedule
    advance. With ``stop``, the run ends before the optimizer step with exit status 3 and, with
    ``checkpoint.enable``, a checkpoint. With ``warn``, the step is taken and a warning is logged;
    the warning is repeated after 2, 4, 8, ... such steps in a row. With ``off``, nothing is judged.
    All actions except ``off`` are counted (``guards/...``).
    """

    nonfinite: Action = "skip"
    """What happens if the loss, the gradient norm, or another metric of the loss, such as
    ``mismatch/kl``, is NaN or infinite. An optimizer step with such a gradient would destroy all
    weights, and such a divergence means that logprobs are wrong."""

    grad_norm: Action = "warn"
    """What happens if the gradient explodes: its norm is above both
    ``training.max_norm`` and ``grad_norm_factor`` times its running median. The norm of a critic's
    gradient is compared with a running median of its own."""

    grad_norm_factor: Annotated[float, above(1).or_value(0, "off")] = 20.0
    """Experimental: ``grad_norm`` acts if the gradient norm is above this many times the median
    of the last ``grad_norm_window`` norms. It does not act on a norm that is at most
    ``training.max_norm``."""

    grad_norm_window: Annotated[int, at_least(2)] = 20
    """Experimental: Number of optimizer steps over which the median is computed. Until this
    start of the run has taken that many, ``grad_norm_factor`` has no effect and no step counts
    as a spike."""

    entropy: Action = "warn"
    """Experimental: What happens if the policy's mean entropy is below ``entropy_floor``, which
    means that the policy has stopped exploring."""

    entropy_floor: Annotated[float, at_least(0)] = 1e-3
    """Experimental: Mean entropy, in nats per trained token, below which ``entropy`` acts."""

    equal_rewards: Action = "warn"
    """Experimental: What happens if no group had two different rewards for
    ``observe.equal_rewards_steps`` batches in a row, so that nothing is learned from rewards.
    The optimizer then only follows its momentum. A replay without ``reward.functions`` is not
    judged, because its rollouts may have been rated by a teacher only."""

    mismatch_kl: Action = "warn"
    """What happens if ``mismatch/kl``, the divergence between the trainer's policy and the policy
    that sampled the tokens, is above ``mismatch_kl_limit``."""

    mismatch_kl_limit: Annotated[float, above(0)] = 0.5
    """Divergence, in nats per trained token, above which ``mismatch_kl`` acts."""

    servers_lost: Literal["stop", "warn", "off"] = "warn"
    """What happens if rank 0 waits for rollouts and no server has been able to accept requests for
    60 s. There is no optimizer step to skip in this case. Without ``stop``, the
    run continues to wait for at most ``rollout.batch_timeout_seconds``, and then ends with an error
    and without another checkpoint."""

    unscored: Literal["stop", "warn", "off"] = "warn"
    """What happens if more than ``unscored_limit`` of the completions since the last batch are left out
    because they have no reward. ``stop`` ends the run before the batch is trained on."""

    unscored_limit: Annotated[float, at_least(0).at_most(1)] = 0.1
    """Fraction of completions (``rollout/unscored_fraction``) above which ``unscored`` acts."""
