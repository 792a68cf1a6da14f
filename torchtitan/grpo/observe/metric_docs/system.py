# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Descriptions of the metrics of time, memory and weight synchronization."""

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section

TIME = Section(
    "Time and memory",
    "A step lasts from the end of the previous step to its own end. An evaluation that the run waits for is not included.",
    (
        Metric(
            "time/step_seconds", "s", "Duration of the step.", "steady",
            "Check the other times in this table, which are parts of the step.",
        ),
        Metric(
            "time/elapsed_seconds", "s", "Time since the trainer of this process was constructed.", "any",
            "A resumed run starts at 0 again.",
        ),
        Metric(
            "time/wait_data_seconds", "s", "Part of the step in which the trainer waits for its batch.",
            "a small part of the step", "Take the same measures as for `time/wait_data_fraction`.",
        ),
        Metric(
            "time/wait_data_fraction", "fraction",
            "Fraction of the step in which the trainer waits for its batch, and is therefore idle.",
            "below 0.2",
            "Generation is the bottleneck: add servers, raise `rollout.max_concurrent_rollouts` or "
            "`rollout.max_head_offpolicyness`, or set `rollout.longest_first`.",
        ),
        Metric(
            "time/boundary_stall_seconds", "s",
            "Part of the step in which weight synchronization blocks the training thread, including the fence.",
            "below 1% of the step",
            "With `grpo.async_weight_update = false`, it includes the whole push; otherwise see "
            "[weight_sync.md](weight_sync.md).",
        ),
        Metric(
            "time/fence_seconds", "s",
            "Part of `time/boundary_stall_seconds` in which the training thread waits for the copy of the latest weights. "
            "On GPUs, the thread never waits; `weight_sync/fence_seconds` measures how long the GPU waits.",
            "near 0", "The copy is slower than a step: check `weight_sync/gather_seconds`.",
        ),
        Metric(
            "time/tokens_per_second", "tokens/s",
            "Throughput: prompt and completion tokens of the batch, including supervised ones, per second of the step.",
            "steady", "Check `data/padding_fraction` and `time/wait_data_fraction`.",
        ),
        Metric(
            "time/trained_tokens_per_second", "tokens/s",
            "Trained tokens per second of the step. It can be compared with `rollout/tokens_per_second`.",
            "equal to `rollout/tokens_per_second` over many steps",
            "If generation stays faster, groups are being filtered or dropped; check the counts of dropped groups.",
        ),
        Metric(
            "time/mfu", "fraction",
            "Model FLOPs utilization: FLOPs of the model in the step, divided by the duration of the step, the number "
            "of training ranks and the peak FLOP/s of a device in bfloat16, which torchtitan's `get_peak_flops` knows. "
            "A forward pass over T tokens, S of them scored, counts `2 N T + 2 V d S + 4 L H P`: N weights besides the "
            "embedding and the output layer (of experts, those of a token), V the vocabulary, d the hidden size, L the "
            "layers, H the channels of all heads, and P the pairs of a query and a key, causal and within sequences. "
            "Each epoch counts as 3 forward passes (with LoRA, 2 in the products with weights), and the passes of the "
            "old policy and of the reference as 1 each. Padding and recomputation do not count. The step includes "
            "waiting for rollouts. Absent on CPU. The peak of an H100 SXM is 989 TFLOP/s; for a GPU that it does not "
            "know, torchtitan takes that of an A100 (312 TFLOP/s) and warns.",
            "0.3 to 0.5, after division by 1 - `time/wait_data_fraction`; less for models below 1 B parameters",
            "Fill microbatches (`training.local_batch_size`), set `compile.enable`, and choose the cheapest "
            "`activation_checkpoint.mode` that fits; `--dry-run` shows what fits.",
        ),
        Metric(
            "memory/peak_gib", "GiB", "Peak reserved device memory on rank 0 during the step; on CPU, the process's peak in host memory.",
            "at least a tenth below the device's memory", "Lower `training.local_batch_size` or `training.seq_len`.",
        ),
        Metric(
            "pipeline/gap_microbatches", "microbatches",
            "Forward passes of later minibatches, or of the reference, that ran in the idle time of rank 0's training passes "
            "(`grpo.pipeline_fill_gaps`). Present in a pipeline in which such passes waited.",
            "above 0",
            "The gaps are too short for another pass: nothing needs to be done. [schedules.md](schedules.md) shows the gaps.",
        ),
        Metric(
            "pipeline/offload_gib", "GiB",
            "Activations that rank 0 moved to host memory, and back, in the step. Present with `grpo.pipeline_offload`.",
            "as much as memory requires",
            "0 means that nothing is kept long enough, or that tensors are below 64 KiB. If steps take longer than without it, "
            "lower `grpo.pipeline_offload`, or set -1 (auto).",
        ),
        Metric(
            "pipeline/offload_peak_gib", "GiB",
            "Most activations of rank 0 that were in host memory at the same time, since the start of the process. Present with "
            "`grpo.pipeline_offload`.",
            "well below the host's memory divided by its ranks", "Lower `grpo.pipeline_offload`.",
        ),
    ),
)  # fmt: skip

PUSH = Section(
    "Weight synchronization",
    "These metrics are absent in a replay, which has no servers. Times are those of the last push. Counts cover the whole "
    "run.",
    (
        Metric(
            "weight_sync/server_version", "batches",
            "Lowest version that any server serves, or -1 if there is no server.",
            "`policy_version` minus 1 or 2",
            "If it falls behind, check `weight_sync/push_seconds` and the `lag` of each server.",
        ),
        Metric("weight_sync/servers", "servers", "Number of servers that the trainer knows.", "the number that you started", ""),
        Metric(
            "weight_sync/lost_servers", "servers", "Number of servers that are lost.", "0",
            "The console shows the reason. The trainer reconnects automatically.",
        ),
        Metric("weight_sync/pushes", "pushes", "Number of completed pushes, counted for each server.", "rises in each step", ""),
        Metric(
            "weight_sync/attested", "attestations",
            "Number of pushes that were attested by comparing log-probabilities, counted for each server.",
            "rises, depending on `weight_sync.attest_every`", "",
        ),
        Metric(
            "weight_sync/failures", "losses",
            "Number of times that a server was lost, or that reconnecting to it failed.", "0",
            "The console shows the reason.",
        ),
        Metric(
            "weight_sync/superseded", "versions",
            "Number of versions that were never sent, because a newer version replaced them first.",
            "0 to some", "Pushes are slower than steps. This is harmless, but staleness grows.",
        ),
        Metric(
            "weight_sync/versions_alive", "versions", "Number of versions that are kept in memory.", "1 or 2",
            "A slow server keeps versions alive, and each version takes as much memory as the model.",
        ),
        Metric(
            "weight_sync/fence_seconds", "s",
            "Time for which the GPU of rank 0 waited before an optimizer step until the latest weights had been copied, "
            "measured with CUDA events; 0 on CPU.",
            "near 0", "The copy is slower than a step: host memory or PCIe is saturated.",
        ),
        Metric("weight_sync/gather_seconds", "s", "Time to gather the version from the ranks.", "below a step", ""),
        Metric(
            "weight_sync/push_seconds", "s", "Duration of the slowest server's last push.", "below a step",
            "Check the network, or change the size of the buckets (`weight_sync.bucket_bytes`).",
        ),
        Metric(
            "weight_sync/pause_seconds", "s", "Longest pause of generation on any server while it received new weights.",
            "far below a step", "See [weight_sync.md](weight_sync.md).",
        ),
        Metric("weight_sync/push_bytes", "bytes", "Number of bytes of the largest push.", "the size of the model, or of a delta", ""),
        Metric(
            "weight_sync/server{number}/state", "code",
            "State of the server's lane: 0 joining, 1 syncing, 2 attesting, 3 ready, 4 lost, 5 closed.", "1 to 3",
            "If it is 4, the console shows the reason.",
        ),
        Metric(
            "weight_sync/server{number}/version", "batches", "Version that the server serves.",
            "`policy_version` minus 1 or 2", "",
        ),
        Metric(
            "weight_sync/server{number}/lag", "versions", "Number of versions by which the server is behind the newest one.",
            "0 to 2", "Check the `push_seconds` of the server.",
        ),
        Metric(
            "weight_sync/server{number}/failures", "losses",
            "Number of times that this server was lost, or that reconnecting to it failed.", "0",
            "The console shows the reason.",
        ),
        Metric("weight_sync/server{number}/push_seconds", "s", "Duration of the last push to the server.", "below a step", ""),
        Metric(
            "weight_sync/server{number}/pause_ms", "ms", "Pause of generation on the server during the last push.",
            "far below a step", "",
        ),
        Metric(
            "weight_sync/server{number}/gb_per_second", "GB/s", "Throughput of the last transfer to the server.",
            "near the bandwidth of the network", "",
        ),
    ),
)  # fmt: skip

SYSTEM = (TIME, PUSH)
