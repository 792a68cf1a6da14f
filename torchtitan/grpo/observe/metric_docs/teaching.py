# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Descriptions of the metrics of teachers and of supervised training."""

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section

TEACHERS = Section(
    "Teachers",
    "These metrics are present with `teacher.urls`. The first two are also present in a replay of rollouts that a "
    "teacher has rated.",
    (
        Metric(
            "teacher/reverse_kl", "nats/token",
            "Mean over trained tokens of the student's log-probability at sampling time minus the teacher's.",
            "falls towards 0",
            "If it does not fall, raise `optimizer.lr` or `teacher.coef`. If its mean over many steps is below 0, the "
            "tokens are not sampled from the student's own distribution: check `mismatch/kl`.",
        ),
        Metric(
            "teacher/top_k_kl", "nats/token",
            "With `teacher.top_k`: mean over rated trained tokens of the reverse KL divergence under the current policy. "
            "Its outcomes are the teacher's most likely tokens, and one more outcome for all other tokens. The value is "
            "at least 0 and at most the divergence over the whole vocabulary.",
            "falls towards 0", "If it does not fall, raise `optimizer.lr` or `teacher.coef`.",
        ),
        Metric(
            "teacher/rating_seconds", "s",
            "Mean time from the rewards of a request's rollouts to their ratings, including the time in the queue and "
            "on the server.",
            "below a step", "Serve the teacher on more GPUs, or add servers to `teacher.urls`.",
        ),
        Metric(
            "teacher/waiting_rollouts", "rollouts", "Number of rollouts that are currently waiting for their rating.",
            "less than a batch",
            "Serve the teacher on more GPUs, or add servers to `teacher.urls`. If all rollouts are waiting, no teacher "
            "responds.",
        ),
        Metric(
            "rollout/failed_ratings", "requests",
            "Number of rating requests that a teacher did not answer. They are sent again, and nothing is lost.", "0",
            "Check the log of the teacher. If it is slow, raise `teacher.request_timeout_seconds`.",
        ),
        Metric(
            "rollout/unrated_groups", "groups",
            "Number of groups that were dropped because no teacher responded within `teacher.wait_seconds`.", "0",
            "Start the teacher again. The dropped groups were not trained on.",
        ),
    ),
)  # fmt: skip

SUPERVISED = Section(
    "Supervised training",
    "These metrics are present with `sft.path`. `loss/total` and `loss/ptx` are then the mean negative log-likelihood, "
    "and metrics of rollouts are absent or 0.",
    (
        Metric("sft/epoch", "epochs", "Number of examples read so far, divided by the number of examples.", "as you intend"),
        Metric("sft/example_tokens_mean", "tokens", "Mean length of an example, including its prompt and its completion."),
        Metric(
            "sft/too_long_examples", "examples", "Number of examples that have been left out so far because they are too long.",
            "few", "Raise `sft.max_example_tokens` or `training.seq_len`.",
        ),
        Metric(
            "sft/unusable_examples", "examples",
            "Number of rows that have been left out so far because they are no examples, in a data set that is too large "
            "to be checked in full before training.",
            "0", "The console names the first of them. Mend it.",
        ),
        Metric(
            "evaluation/loss", "nats/token",
            "Mean negative log-likelihood of the held-out examples (`sft.held_out_path`). It is written to "
            "`evaluations.jsonl`.",
            "falls", "If it rises while `loss/total` falls, the model overfits the examples: train for fewer steps.",
        ),
    ),
)  # fmt: skip

TEACHING = (TEACHERS, SUPERVISED)
