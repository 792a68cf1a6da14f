# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Descriptions of the metrics of guards, and of those that ``/metrics`` alone has."""

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section

GUARDS = Section(
    "Guards",
    "How often each guard of `[guards]` has acted since this start of the run ([guards](how-to/guards.md)). Whenever a "
    "guard acts, the console shows a line with the values and the setting.",
    (
        Metric(
            "guards/skipped", "optimizer steps", "Number of optimizer steps that were skipped.", "0",
            "The metrics below show which guard acted. After `guards.max_skipped_steps` skipped steps in a row, the run ends.",
        ),
        Metric(
            "nonfinite_values", "numbers",
            "How many numbers of this record are NaN or infinite, and null in `metrics.jsonl`. Absent if all are finite.",
            "absent", "Look at `guards/nonfinite`, and at which metrics are null.",
        ),
        Metric(
            "guards/nonfinite", "optimizer steps",
            "Optimizer steps whose loss, gradient norm, or another metric of the loss was NaN or infinite.", "0",
            "Lower `optimizer.lr`, and look for very large rewards and for a policy loss that divides by 0.",
        ),
        Metric(
            "guards/grad_norm", "optimizer steps",
            "Optimizer steps whose gradient norm was far above its median, or above its limit.",
            "0 or few", "Lower `optimizer.lr`, or set `guards.grad_norm` to skip such steps.",
        ),
        Metric(
            "guards/entropy", "optimizer steps", "Optimizer steps in which the entropy was below `guards.entropy_floor`.", "0",
            "Take the same measures as for `policy/entropy`.",
        ),
        Metric(
            "guards/equal_rewards", "batches",
            "Batches that were at least the `observe.equal_rewards_steps`-th in a row in which no group had two different "
            "rewards.",
            "0", "Take the same measures as for `reward/equal_groups_fraction`.",
        ),
        Metric(
            "guards/mismatch_kl", "optimizer steps",
            "Optimizer steps in which `mismatch/kl` was above `guards.mismatch_kl_limit`.", "0",
            "Take the same measures as for `mismatch/kl`.",
        ),
        Metric(
            "guards/reference_kl", "optimizer steps",
            "Optimizer steps in which `loss/reference_kl` was above `guards.reference_kl_limit`.", "0",
            "Take the same measures as for `loss/reference_kl`.",
        ),
        Metric(
            "guards/servers_lost", "outages",
            "Number of times that rank 0 waited for rollouts and no server could accept requests for "
            "`guards.servers_lost_seconds`.", "0",
            "Check the logs of the servers; `weight_sync/lost_servers` shows how many are lost.",
        ),
    ),
)  # fmt: skip

MONITOR = Section(
    "Metrics of /metrics only",
    "Prometheus reads the metrics above from rank 0, under names such as `grpo_policy_entropy`. The following metrics "
    "exist only there, and come from rank 0, the rollout process and the embedded servers ([monitor](how-to/monitor.md)).",
    (
        Metric("monitor/step", "batches", "Rank 0: last completed step.", "rises", ""),
        Metric(
            "monitor/since_step_seconds", "s", "Rank 0: time since the last step was completed.", "about a step",
            "`/healthz` names the current phase.",
        ),
        Metric(
            "monitor/phase_seconds", "s", "Rank 0: time since the current phase began.", "below a step",
            "If it exceeds `observe.stuck_seconds`, and three times the longest earlier phase of the same kind, `/healthz` "
            "responds with 503.",
        ),
        Metric("monitor/tokens_total", "tokens", "Rollout process: number of generated tokens.", "rises", ""),
        Metric(
            "monitor/failed_requests_total", "requests", "Rollout process: number of failed requests.", "near 0",
            "Take the same measures as for `rollout/failed_requests`.",
        ),
        Metric(
            "monitor/dropped_total", "drops", "Rollout process: number of everything that was dropped.", "near 0",
            "The console names each kind.",
        ),
        Metric(
            "monitor/ready_servers", "servers", "Rollout process: number of servers that accept requests.", "all servers",
            "`/healthz` shows the state of each server.",
        ),
        Metric("server/running", "requests", "Embedded server: number of requests that are being generated.", "above 0", ""),
        Metric(
            "server/waiting", "requests", "Embedded server: number of queued requests.", "0",
            "Take the same measures as for `servers/{address}/waiting`.",
        ),
        Metric("server/kv_use", "fraction", "Embedded server: fraction of the KV cache in use.", "below 1", ""),
        Metric("server/is_paused", "0 or 1", "Embedded server: whether generation is paused for new weights.", "mostly 0", ""),
        Metric("server/tokens_total", "tokens", "Embedded server: number of generated tokens.", "rises", ""),
        Metric("server/steps_total", "steps", "Embedded server: number of engine steps.", "rises", ""),
        Metric(
            "server/recomputed_total", "requests",
            "Embedded server: number of running requests whose KV cache was recomputed after new weights were loaded.",
            "any", "",
        ),
        Metric("server/swaps_total", "versions", "Embedded server: number of weight versions that were put into use.", "rises", ""),
    ),
)  # fmt: skip

GUARDING = (GUARDS, MONITOR)
