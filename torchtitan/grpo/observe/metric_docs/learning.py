# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Descriptions of the metrics of the loss, the policy and the batch."""

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section

LOSS = Section(
    "Loss",
    "What was minimised, averaged over the optimizer steps of the batch; fractions and means count each trained token "
    "once. [losses.md](losses.md) has the formulas. All are 0 if the batch has no trained token.",
    (
        Metric(
            "loss/total", "loss", "The whole loss: policy, KL penalty, entropy bonus, supervised examples.",
            "small, around 0; it need not fall",
            "The step of a loss that is not finite is skipped (`guards.nonfinite`): lower `optimizer.lr`, and read `mismatch/kl`.",
        ),
        Metric(
            "loss/policy", "loss", "The policy's part of it.", "small, around 0",
            "Advantages have a mean of 0, so that its value says little; its gradient is what counts.",
        ),
        Metric(
            "loss/ptx", "loss", "The part of supervised examples (`grpo.ptx_path`); 0 without them.",
            "falls slowly", "If it rises, raise `grpo.ptx_coef`.",
        ),
        Metric(
            "loss/reference_kl", "nats/token",
            "KL divergence of the policy from the reference, by `grpo.kl_estimator`; 0 without a reference.",
            "0 in the first step, then rises to less than about 0.1",
            "Raise `grpo.kl_coef` or lower `optimizer.lr`.",
        ),
        Metric(
            "loss/clipped_fraction", "fraction", "Trained tokens whose ratio is clipped.",
            "0 with one optimizer step per batch and `grpo.old_policy = \"step_start\"`; else below 0.2",
            "Fewer optimizer steps per batch, a lower `optimizer.lr`, or less staleness.",
        ),
        Metric(
            "loss/dual_clipped_fraction", "fraction",
            "Trained tokens whose loss is bounded by `grpo.dual_clip`.", "near 0", "As above.",
        ),
    ),
)  # fmt: skip

POLICY = Section(
    "Policy",
    "Means over trained tokens.",
    (
        Metric(
            "policy/entropy", "nats/token",
            "Entropy of the policy's distribution. Absent with `grpo.log_entropy = false` and no entropy bonus.",
            "falls slowly and stays above 0",
            "A collapse ends exploration: use `grpo.entropy_coef`, a larger `grpo.clip_high`, or a lower "
            "`optimizer.lr`. A rise to large values means that the policy falls apart: lower `optimizer.lr`.",
        ),
        Metric(
            "policy/nll", "nats/token", "Negative log-probability of the sampled tokens.",
            "close to `policy/entropy` at a temperature of 1",
            "If it is far above, trainer and server differ; read `mismatch/kl`.",
        ),
        Metric(
            "policy/approx_kl", "nats/token",
            "k3 estimate of the divergence from the policy that the ratio is taken against.",
            "0 with one optimizer step per batch; else below 0.05", "As for `loss/clipped_fraction`.",
        ),
        Metric(
            "grad_norm", "norm", "Norm of the whole gradient before clipping, mean of the optimizer steps.",
            "finite, above 0, without jumps",
            "At 0 nothing is learned: read `reward/equal_groups_fraction` and `data/trained_tokens`. With jumps, "
            "lower `optimizer.lr`.",
        ),
        Metric(
            "lr", "1", "Learning rate of the step.", "as `[optimizer]` and `[lr_scheduler]` say", "",
        ),
        Metric(
            "policy_version", "batches", "Batches trained on so far, this one included.", "equals the step", "",
        ),
    ),
)  # fmt: skip

MISMATCH = Section(
    "Trainer and server",
    "How far the trainer's log-probabilities are from those of sampling time, and what `grpo.mismatch_correction` did.",
    (
        Metric(
            "mismatch/kl", "nats/token",
            "k3 estimate of the divergence between the sampling-time policy and the trainer's.",
            "synchronous: about 1e-13 in float32, at most 1e-3 in bfloat16; asynchronous: below about 0.03; the first step as if synchronous",
            "Compare dtype, `rollout.temperature`, `rollout.top_p`, `rollout.top_k` and chat template; see "
            "[debugging.md](debugging.md).",
        ),
        Metric(
            "mismatch/effective_sample_size", "fraction",
            "Effective share of samples under the importance weights; 1 means that all weights are equal.",
            "above 0.9", "Less staleness, or a lower `optimizer.lr`.",
        ),
        Metric(
            "mismatch/capped_fraction", "fraction",
            "Trained tokens whose weight was cut to `grpo.importance_cap`.", "below 0.05", "As above.",
        ),
        Metric(
            "mismatch/masked_fraction", "fraction",
            "Trained tokens left out, for whatever reason: those of the following rows, and those whose "
            "weight is outside of the range of `grpo.mismatch_correction = \"mask\"`.", "below 0.05",
            "As above.",
        ),
        Metric(
            "mismatch/vetoed_fraction", "fraction",
            "Sequences left out because one token is too unlikely (`grpo.mismatch_veto`).", "near 0",
            "As above.",
        ),
        Metric(
            "mismatch/rejected_fraction", "fraction",
            "Sequences left out because they are too far from the sampling-time policy (`grpo.mismatch_max_k1`, "
            "`grpo.mismatch_max_k3`, `grpo.mismatch_max_tv`, `grpo.mismatch_max_ratio`).", "below 0.05",
            "As above; or raise the bound, which may be too low for the servers' precision.",
        ),
        Metric(
            "mismatch/off_policy_fraction", "fraction",
            "Sequences with a negative advantage left out because the policy hardly writes them any more "
            "(`grpo.off_policy_mask_threshold`).", "below 0.05", "As above.",
        ),
    ),
)  # fmt: skip

STALENESS = Section(
    "Staleness",
    "Ages of samples in batches, counted from the oldest trained token.",
    (
        Metric(
            "staleness/mean_steps", "batches", "Mean age.",
            "up to `rollout.max_head_offpolicyness`", "If learning suffers, lower that bound.",
        ),
        Metric(
            "staleness/max_steps", "batches", "Greatest age.",
            "never above `rollout.max_head_offpolicyness`", "",
        ),
        Metric(
            "staleness/mixed_version_fraction", "fraction",
            "Samples whose tokens were written by more than one version of the policy.",
            "any; high with long answers", "",
        ),
    ),
)  # fmt: skip

DATA = Section(
    "Batch",
    "How the batch was laid out in rows ([data_plane.md](data_plane.md#balance-and-packing)).",
    (
        Metric(
            "data/trained_tokens", "tokens", "Tokens of rollouts that have a loss.", "above 0",
            "At 0 all groups were left out; read `reward/equal_groups_fraction`.",
        ),
        Metric(
            "data/filtered_groups_fraction", "fraction",
            "Groups left out of the batch by `grpo.filter_zero_advantage`.", "below 0.5",
            "As for `reward/equal_groups_fraction`.",
        ),
        Metric(
            "data/padding_fraction", "fraction", "Part of the rows that is padding.", "below 0.2",
            "Choose `training.seq_len` several times longer than a sequence, or larger batches.",
        ),
        Metric(
            "data/rows_per_rank", "rows", "Rows of `training.seq_len` tokens on each data-parallel rank.",
            "a multiple of `training.local_batch_size`", "",
        ),
        Metric(
            "data/max_over_mean_cost", "ratio",
            "Estimated work of the rank with most work, divided by the mean of the ranks.", "below 1.1",
            "Set `prompts.balance_batch = true`, or use larger batches.",
        ),
    ),
)  # fmt: skip

LEARNING = (LOSS, POLICY, MISMATCH, STALENESS, DATA)
