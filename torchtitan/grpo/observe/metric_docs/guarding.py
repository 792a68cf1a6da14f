# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Descriptions of the metrics of guards, and of those that ``/metrics`` alone has."""

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section

GUARDS = Section(
    "Guards",
    "How often each guard of `[guards]` has acted since this start of the run "
    "([guards](how-to/guards.md)). The console has one line for each, with numbers and setting.",
    (
        Metric(
            "guards/skipped", "optimizer steps", "Optimizer steps that were not taken.", "0",
            "The guards below say why; `guards.max_skipped_steps` in a row end the run.",
        ),
        Metric(
            "guards/nonfinite", "optimizer steps", "Loss or gradient norm was NaN or infinite.", "0",
            "Lower `optimizer.lr`; look for huge rewards, and for a policy loss that divides by 0.",
        ),
        Metric(
            "guards/grad_norm", "optimizer steps", "The gradient norm was far above its median, or above its limit.",
            "0 to few", "Lower `optimizer.lr`, or let `guards.grad_norm` skip such steps.",
        ),
        Metric(
            "guards/entropy", "optimizer steps", "The entropy was below `guards.entropy_floor`.", "0",
            "As for `policy/entropy`.",
        ),
        Metric(
            "guards/equal_rewards", "batches",
            "Batches at the end of `observe.equal_rewards_steps` or more without two different rewards in any group.",
            "0", "As for `reward/equal_groups_fraction`.",
        ),
        Metric(
            "guards/mismatch_kl", "optimizer steps", "`mismatch/kl` was above its limit.", "0",
            "As for `mismatch/kl`.",
        ),
        Metric(
            "guards/reference_kl", "optimizer steps", "`loss/reference_kl` was above its limit.", "0",
            "As for `loss/reference_kl`.",
        ),
        Metric(
            "guards/servers_lost", "outages", "No server could take work for `guards.servers_lost_seconds`.", "0",
            "Read the servers' logs; `weight_sync/lost_servers` counts them.",
        ),
    ),
)  # fmt: skip

MONITOR = Section(
    "What /metrics alone has",
    "Prometheus reads the metrics above from rank 0, under names such as `grpo_policy_entropy`, and these "
    "from rank 0, the rollout process and embedded servers ([monitor](how-to/monitor.md)).",
    (
        Metric("monitor/step", "batches", "Rank 0: last completed step.", "rises", ""),
        Metric(
            "monitor/since_step_seconds", "s", "Rank 0: time since that step.", "about a step",
            "`/healthz` names the phase.",
        ),
        Metric(
            "monitor/phase_seconds", "s", "Rank 0: time since the present phase began.", "below a step",
            "Beyond `observe.stuck_seconds`, `/healthz` answers 503.",
        ),
        Metric("monitor/tokens_total", "tokens", "Rollout process: generated tokens.", "rises", ""),
        Metric(
            "monitor/failed_requests_total", "requests", "Rollout process: requests that failed.", "near 0",
            "As for `rollout/failed_requests`.",
        ),
        Metric(
            "monitor/dropped_total", "drops", "Rollout process: all that was dropped.", "near 0",
            "The console names each kind.",
        ),
        Metric(
            "monitor/ready_servers", "servers", "Rollout process: servers that take work.", "all",
            "`/healthz` has the state of each.",
        ),
        Metric("server/running", "requests", "Embedded server: requests that generate.", "above 0", ""),
        Metric("server/waiting", "requests", "Embedded server: requests that wait for a row.", "0", "As for `servers/{server}/waiting`."),
        Metric("server/kv_use", "fraction", "Embedded server: used part of the memory for keys and values.", "below 1", ""),
        Metric("server/is_paused", "0 or 1", "Embedded server: whether generation is paused for new weights.", "mostly 0", ""),
        Metric("server/tokens_total", "tokens", "Embedded server: generated tokens.", "rises", ""),
        Metric("server/steps_total", "steps", "Embedded server: steps of the engine.", "rises", ""),
        Metric(
            "server/recomputed_total", "tokens", "Embedded server: tokens that were computed again after new weights.",
            "any", "",
        ),
        Metric("server/swaps_total", "versions", "Embedded server: versions that were taken into use.", "rises", ""),
    ),
)  # fmt: skip

GUARDING = (GUARDS, MONITOR)
