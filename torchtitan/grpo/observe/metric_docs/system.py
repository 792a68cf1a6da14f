# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Descriptions of the metrics of time, memory and weight synchronisation."""

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section

TIME = Section(
    "Time and memory",
    "A step lasts from the end of the step before to its own end; an evaluation that the run waits for is not counted.",
    (
        Metric("time/step_seconds", "s", "Duration of the step.", "steady", "Read the parts below."),
        Metric(
            "time/elapsed_seconds", "s", "Time since this process's trainer was constructed.", "any",
            "A resumed run begins at 0 again.",
        ),
        Metric(
            "time/wait_data_seconds", "s", "Part of the step in which the trainer waits for its batch.",
            "a small part of the step", "As for `time/wait_data_fraction`.",
        ),
        Metric(
            "time/wait_data_fraction", "fraction", "The same as a share of the step: the trainer's idle share.",
            "below 0.2",
            "Generation is the bottleneck: add servers, raise `rollout.max_concurrent_rollouts` or "
            "`rollout.max_head_offpolicyness`, or set `rollout.longest_first`.",
        ),
        Metric(
            "time/boundary_stall_seconds", "s",
            "Part in which weight synchronisation holds up the training thread, the fence included.",
            "below 1% of the step",
            "With `grpo.async_weight_update = false` it is the whole push; else see [weight_sync.md](weight_sync.md).",
        ),
        Metric(
            "time/fence_seconds", "s",
            "Part of that in which the training thread waits for the copy of the last weights. On GPUs the "
            "thread never waits; `weight_sync/fence_seconds` has the time of the GPU.",
            "near 0", "The copy is slower than a step: read `weight_sync/gather_seconds`.",
        ),
        Metric(
            "time/tokens_per_second", "tokens/s",
            "Prompt and completion tokens of the batch, supervised ones included, per second of the step.",
            "steady", "Read `data/padding_fraction` and `time/wait_data_fraction`.",
        ),
        Metric(
            "time/trained_tokens_per_second", "tokens/s",
            "Trained tokens per second of the step; comparable with `rollout/tokens_per_second`.",
            "equal to `rollout/tokens_per_second` over many steps",
            "If generation is faster for long, groups are left out or thrown away; read the counts.",
        ),
        Metric(
            "memory/peak_gib", "GiB", "Most device memory reserved on rank 0 during the step; 0 on a CPU.",
            "below the device's memory by a tenth", "Lower `training.local_batch_size` or `training.seq_len`.",
        ),
    ),
)  # fmt: skip

PUSH = Section(
    "Weight synchronisation",
    "Absent in a replay, which has no servers. Times are those of the last push. Counts cover the run.",
    (
        Metric(
            "weight_sync/server_version", "batches", "Lowest version that a server serves; -1 without one.",
            "`policy_version` minus 1 or 2", "If it stays behind, read `weight_sync/push_seconds` and the lags.",
        ),
        Metric("weight_sync/servers", "servers", "Servers that the trainer knows.", "as you started", ""),
        Metric(
            "weight_sync/lost_servers", "servers", "Those of them that are lost.", "0",
            "The console names the reason; the trainer connects again by itself.",
        ),
        Metric("weight_sync/pushes", "pushes", "Finished pushes to a server.", "rises in each step", ""),
        Metric(
            "weight_sync/attested", "attestations", "Pushes after which the server proved what it serves.",
            "rises, by `weight_sync.attest_every`", "",
        ),
        Metric(
            "weight_sync/failures", "losses", "How often a server was lost, or could not be joined again.", "0",
            "The console names the reason.",
        ),
        Metric(
            "weight_sync/superseded", "versions", "Versions that a newer one replaced before they were sent.",
            "0 to some", "Pushes are slower than steps: harmless, but staleness grows.",
        ),
        Metric(
            "weight_sync/versions_alive", "versions", "Versions that are kept in memory.", "1 or 2",
            "A slow server keeps versions alive; each takes the memory of the model.",
        ),
        Metric(
            "weight_sync/fence_seconds", "s",
            "Time for which the GPU of rank 0 stood still before an optimizer step, until the last weights were "
            "copied; measured by events, and 0 on CPU.",
            "near 0", "The copy is slower than a step: the host's memory or PCIe is busy.",
        ),
        Metric("weight_sync/gather_seconds", "s", "Time to gather the version from the ranks.", "below a step", ""),
        Metric(
            "weight_sync/push_seconds", "s", "Duration of the slowest server's push.", "below a step",
            "Check the network, or use several buckets of another size (`weight_sync.bucket_bytes`).",
        ),
        Metric(
            "weight_sync/pause_seconds", "s", "Longest pause of generation on a server for the new weights.",
            "far below a step", "See [weight_sync.md](weight_sync.md).",
        ),
        Metric("weight_sync/push_bytes", "bytes", "Bytes of the largest push.", "the size of the model, or of a delta", ""),
        Metric(
            "weight_sync/server{number}/state", "code",
            "State of the server's lane: 0 joining, 1 syncing, 2 attesting, 3 ready, 4 lost, 5 closed.", "1 to 3",
            "At 4 the console names the reason.",
        ),
        Metric("weight_sync/server{number}/version", "batches", "Version that the server serves.", "as above", ""),
        Metric(
            "weight_sync/server{number}/lag", "versions", "Versions that it is behind the newest one.", "0 to 2",
            "Read its `push_seconds`.",
        ),
        Metric("weight_sync/server{number}/failures", "losses", "The same of one server.", "0", "As above."),
        Metric("weight_sync/server{number}/push_seconds", "s", "Duration of its last push.", "below a step", ""),
        Metric("weight_sync/server{number}/pause_ms", "ms", "Pause of its generation for the last push.", "as above", ""),
        Metric("weight_sync/server{number}/gb_per_second", "GB/s", "Rate of the last transfer to it.", "near the network's", ""),
    ),
)  # fmt: skip

SYSTEM = (TIME, PUSH)
