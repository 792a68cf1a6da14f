# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Descriptions of the metrics of evaluations."""

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section

_FEWER = "Lower `evaluation.num_prompts`, or raise `evaluation.interval`."

EVALUATION = Section(
    "Evaluation",
    "Records of `evaluations.jsonl`; its `step` is the oldest version that generated a token of the evaluation. "
    "`{set}` is the name of a set, `heldout` for that of `evaluation.path`. [How to evaluate](how-to/evaluate.md)",
    (
        Metric(
            "evaluation/score", "score", "Mean of the scores of all sets.",
            "rises", "If it falls while `reward/mean` rises, the reward is exploited: read samples.",
        ),
        Metric(
            "evaluation/{set}/score", "score",
            "Mean of the set's function, over its prompts, of the mean over the completions of each.", "rises", "As above.",
        ),
        Metric(
            "evaluation/{set}/pass_at_{number}", "probability",
            "Unbiased estimate of the probability that at least one of so many completions of a prompt reaches "
            "`evaluation.pass_score`.",
            "rises",
            "If only pass@1 rises, and pass@k falls, the policy has lost variety: raise `rollout.temperature` or add a KL penalty.",
        ),
        Metric(
            "evaluation/{set}/length_mean", "tokens", "Mean length of a completion, observations included.", "steady",
            "If it grows towards the longest allowed, read `cut_fraction`.",
        ),
        Metric("evaluation/{set}/length_max", "tokens", "Length of the longest completion.", "below the longest allowed", ""),
        Metric(
            "evaluation/{set}/cut_fraction", "fraction", "Share of completions that were cut at the longest allowed length.",
            "near 0", "Raise `evaluation.max_new_tokens`: a cut answer is usually scored as a wrong one.",
        ),
        Metric("evaluation/{set}/num_prompts", "prompts", "Prompts of the set that received a score.", "all of them", "`rollout_process.log` has the reasons."),
        Metric("evaluation/{set}/num_completions", "completions", "Completions of the set that received a score.", "all of them", "As above."),
        Metric("evaluation/seconds", "s", "Duration of the evaluation, from its request on.", "below `evaluation.interval` steps", _FEWER),
        Metric(
            "evaluation/newest_version", "batches", "Newest version that generated a token of it.", "`step`",
            "Above `step`, servers took newer weights meanwhile; see `evaluation.pin`.",
        ),
        Metric(
            "evaluation/mixed_fraction", "fraction", "Share of completions with tokens of weights newer than `step`.", "0",
            "With a second server, `evaluation.pin` keeps it at 0. With one, evaluate less, so that it ends within a step.",
        ),
        Metric("evaluation/left_out", "evaluations", "Evaluations of this process that were due while another one was running.", "0", _FEWER),
        Metric(
            "evaluation/begun_again", "evaluations",
            "Evaluations of this process that were begun again with newer weights, because their server, which `evaluation.pin` "
            "had left at older ones, was the last that could take new weights, or left the run.",
            "0", "Find out why servers are lost: `weight_sync/failures`, and the servers' logs.",
        ),
        Metric("num_prompts", "prompts", "Held-out prompts of all sets that received a score.", "all of them", "`rollout_process.log` has the reasons."),
    ),
)  # fmt: skip
