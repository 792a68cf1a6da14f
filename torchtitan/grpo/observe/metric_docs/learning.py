# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Descriptions of the metrics of the loss, the policy and the batch."""

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section

LOSS = Section(
    "Loss",
    "The loss terms (`loss/total`, `loss/policy`, `loss/ptx`) are averaged over the optimizer steps of the batch. "
    "Fractions and means count each trained token once. [losses.md](losses.md) has the formulas. All values are 0 "
    "if the batch has neither trained tokens nor supervised examples.",
    (
        Metric(
            "loss/total", "loss",
            "The total loss: policy loss, KL penalty, entropy bonus, supervised examples, and the divergence from the "
            "teacher (`teacher.top_k`).",
            "small, around 0; it need not fall",
            "If the loss is not finite, the optimizer step is skipped (`guards.nonfinite`). Lower `optimizer.lr`, and "
            "check `mismatch/kl`.",
        ),
        Metric(
            "loss/policy", "loss", "The policy loss.", "small, around 0",
            "Because advantages have a mean of 0, the value says little; only its gradient matters.",
        ),
        Metric(
            "loss/ptx", "loss", "The loss on the supervised examples (`grpo.ptx_path`), or 0 without them.",
            "falls slowly", "If it rises, raise `grpo.ptx_coef`.",
        ),
        Metric(
            "loss/reference_kl", "nats/token",
            "KL divergence of the policy from the reference model, estimated with `grpo.kl_estimator`; 0 without a "
            "reference model.",
            "0 in the first step, then rises to less than about 0.1",
            "Raise `grpo.kl_coef` or lower `optimizer.lr`.",
        ),
        Metric(
            "loss/clipped_fraction", "fraction", "Fraction of trained tokens whose ratio is clipped.",
            "0 with one optimizer step per batch and `grpo.old_policy = \"step_start\"`; otherwise below 0.2",
            "Take fewer optimizer steps per batch, lower `optimizer.lr`, or reduce staleness.",
        ),
        Metric(
            "loss/dual_clipped_fraction", "fraction",
            "Fraction of trained tokens whose loss is bounded by `grpo.dual_clip`.", "near 0",
            "Take the same measures as for `loss/clipped_fraction`.",
        ),
    ),
)  # fmt: skip

POLICY = Section(
    "Policy",
    "Entropy, negative log-likelihood, and KL divergence are means over the trained tokens.",
    (
        Metric(
            "policy/entropy", "nats/token",
            "Entropy of the policy's next-token distribution. Absent if `grpo.log_entropy = false` and there is no "
            "entropy bonus.",
            "falls slowly and stays above 0",
            "An entropy collapse ends exploration: set `grpo.entropy_coef`, raise `grpo.clip_high`, or lower "
            "`optimizer.lr`. A rise to large values means that the policy is degenerating: lower `optimizer.lr`.",
        ),
        Metric(
            "policy/nll", "nats/token", "Negative log-probability of the sampled tokens.",
            "close to `policy/entropy` at a temperature of 1",
            "If it is far above `policy/entropy`, the trainer and the server disagree; check `mismatch/kl`.",
        ),
        Metric(
            "policy/approx_kl", "nats/token",
            "k3 estimate of the KL divergence from the policy in the denominator of the ratio.",
            "0 with one optimizer step per batch; otherwise below 0.05",
            "Take the same measures as for `loss/clipped_fraction`.",
        ),
        Metric(
            "grad_norm", "norm",
            "Norm of the whole gradient before clipping, averaged over the optimizer steps of the batch.",
            "finite, above 0, without jumps",
            "If it is 0, nothing is learned: check `reward/equal_groups_fraction` and `data/trained_tokens`. If it "
            "jumps, lower `optimizer.lr`.",
        ),
        Metric(
            "lr", "1", "Learning rate of the step.", "follows `[optimizer]` and `[lr_scheduler]`", "",
        ),
        Metric(
            "policy_version", "batches", "Number of batches trained on so far, including this one.",
            "equals the step", "",
        ),
    ),
)  # fmt: skip

MISMATCH = Section(
    "Trainer and server",
    "How far the trainer's log-probabilities are from those recorded at sampling time, and what "
    "`grpo.mismatch_correction` did about it.",
    (
        Metric(
            "mismatch/kl", "nats/token",
            "k3 estimate of the KL divergence between the sampling-time policy and the trainer's policy.",
            "synchronous: about 1e-13 in float32, at most 1e-3 in bfloat16; asynchronous: below about 0.03, and in the "
            "first step as in synchronous training",
            "Compare dtype, `rollout.temperature`, `rollout.top_p`, `rollout.top_k` and the chat template; see "
            "[debugging.md](debugging.md).",
        ),
        Metric(
            "mismatch/effective_sample_size", "fraction",
            "Effective sample size under the importance weights, as a fraction of the trained tokens; 1 means that all "
            "weights are equal.",
            "above 0.9", "Reduce staleness, or lower `optimizer.lr`.",
        ),
        Metric(
            "mismatch/capped_fraction", "fraction",
            "Fraction of trained tokens whose importance weight was clamped to `grpo.importance_cap` or "
            "`grpo.importance_floor`.", "below 0.05",
            "Reduce staleness, or lower `optimizer.lr`.",
        ),
        Metric(
            "mismatch/masked_fraction", "fraction",
            "Fraction of trained tokens that were left out of the loss for any reason: the tokens of the sequences that "
            "the next three metrics count, and tokens whose importance ratio is outside the bounds of "
            "`grpo.mismatch_correction = \"mask\"`.", "below 0.05",
            "Reduce staleness, or lower `optimizer.lr`.",
        ),
        Metric(
            "mismatch/vetoed_fraction", "fraction",
            "Fraction of sequences that were left out because one of their tokens is too unlikely "
            "(`grpo.mismatch_veto`).", "near 0",
            "Reduce staleness, or lower `optimizer.lr`.",
        ),
        Metric(
            "mismatch/rejected_fraction", "fraction",
            "Fraction of sequences that were left out because they are too far from the sampling-time policy "
            "(`grpo.mismatch_max_k1`, `grpo.mismatch_max_k3`, `grpo.mismatch_max_tv`, `grpo.mismatch_max_ratio`).",
            "below 0.05",
            "Reduce staleness, lower `optimizer.lr`, or raise the bound, which may be too low for the numerical "
            "precision of the servers.",
        ),
        Metric(
            "mismatch/off_policy_fraction", "fraction",
            "Fraction of sequences that were left out because they have a negative advantage and have become unlikely "
            "under the current policy (`grpo.off_policy_mask_threshold`).", "below 0.05",
            "Reduce staleness, or lower `optimizer.lr`.",
        ),
    ),
)  # fmt: skip

STALENESS = Section(
    "Staleness",
    "The age of a sample is the number of batches trained on since its oldest trained token was generated.",
    (
        Metric(
            "staleness/mean_steps", "batches", "Mean age of the samples.",
            "up to `rollout.max_head_offpolicyness`", "If learning suffers, lower `rollout.max_head_offpolicyness`.",
        ),
        Metric(
            "staleness/max_steps", "batches", "Age of the oldest sample.",
            "never above `rollout.max_head_offpolicyness`", "",
        ),
        Metric(
            "staleness/mixed_version_fraction", "fraction",
            "Fraction of samples whose tokens were generated by more than one version of the policy.",
            "any; high with long completions", "",
        ),
    ),
)  # fmt: skip

DATA = Section(
    "Batch",
    "How the batch was packed into rows ([data_plane.md](data_plane.md#balance-and-packing)).",
    (
        Metric(
            "data/trained_tokens", "tokens", "Number of rollout tokens that contribute to the loss.", "above 0",
            "If it is 0, all groups were left out; check `reward/equal_groups_fraction`.",
        ),
        Metric(
            "data/filtered_groups_fraction", "fraction",
            "Fraction of groups that `grpo.filter_zero_advantage` left out of the batch.", "below 0.5",
            "Take the same measures as for `reward/equal_groups_fraction`.",
        ),
        Metric(
            "data/padding_fraction", "fraction", "Fraction of the tokens in the rows that are padding.", "below 0.2",
            "Make `training.seq_len` several times longer than a sequence, or use larger batches.",
        ),
        Metric(
            "data/rows_per_rank", "rows", "Rows of `training.seq_len` tokens on each data-parallel rank.",
            "a multiple of `training.local_batch_size`", "",
        ),
        Metric(
            "data/max_over_mean_cost", "ratio",
            "Estimated work of the most heavily loaded rank, divided by the mean over the ranks.", "below 1.1",
            "Set `prompts.balance_batch = true`, or use larger batches.",
        ),
    ),
)  # fmt: skip

LEARNING = (LOSS, POLICY, MISMATCH, STALENESS, DATA)
