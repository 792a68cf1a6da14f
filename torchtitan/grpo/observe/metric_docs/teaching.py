# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Descriptions of the metrics of teachers and of supervised training."""

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section

TEACHERS = Section(
    "Teachers",
    "With `teacher.urls`; the first two also in a replay of rollouts that were rated.",
    (
        Metric(
            "teacher/reverse_kl", "nats/token",
            "Mean over trained tokens of the student's log-probability minus the teacher's, at sampling time.",
            "falls towards 0",
            "If it does not fall, raise `optimizer.lr` or `teacher.coef`. Below 0 in the mean of many steps, "
            "tokens are not drawn from the student's own distribution: read `mismatch/kl`.",
        ),
        Metric(
            "teacher/top_k_kl", "nats/token",
            "With `teacher.top_k`: mean over rated trained tokens of the reverse KL divergence over the teacher's "
            "most likely tokens and the rest as one outcome, under the current policy. At least 0, and at most "
            "the divergence over the vocabulary.",
            "falls towards 0", "As above.",
        ),
        Metric(
            "teacher/rating_seconds", "s",
            "Mean time from rewards to the ratings of a request's rollouts, in the queue and on the server.",
            "below a step", "Serve the teacher on more GPUs, or name more `teacher.urls`.",
        ),
        Metric(
            "teacher/waiting_rollouts", "rollouts", "Rollouts that wait for their rating now.",
            "less than a batch", "As above; at all of them no teacher answers.",
        ),
        Metric(
            "rollout/failed_ratings", "requests",
            "Ratings that a teacher did not give. They are asked for again, and nothing is lost.", "0",
            "Read the teacher's log; raise `teacher.request_timeout_seconds` if it is slow.",
        ),
        Metric(
            "rollout/unrated_groups", "groups",
            "Groups that were dropped because no teacher rated them within `teacher.wait_seconds`.", "0",
            "Start the teacher again. Nothing was trained on them.",
        ),
    ),
)  # fmt: skip

SUPERVISED = Section(
    "Supervised training",
    "With `sft.path`. `loss/total` and `loss/ptx` are then the mean negative log-likelihood, and metrics of "
    "rollouts are absent or 0.",
    (
        Metric("sft/epoch", "epochs", "Examples read so far, divided by the number of examples.", "as you intend"),
        Metric("sft/example_tokens_mean", "tokens", "Mean length of an example, prompt and completion."),
        Metric(
            "sft/too_long_examples", "examples", "Examples that were left out so far because they are too long.",
            "few", "Raise `sft.max_example_tokens` or `training.seq_len`.",
        ),
        Metric(
            "evaluation/loss", "nats/token",
            "Mean negative log-likelihood of the held-out examples (`sft.held_out_path`), in `evaluations.jsonl`.",
            "falls", "If it rises while `loss/total` falls, the examples are learned by heart: take fewer steps.",
        ),
    ),
)  # fmt: skip

TEACHING = (TEACHERS, SUPERVISED)
