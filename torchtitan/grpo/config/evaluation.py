# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[evaluation]`` table: scoring of held-out prompts, during a run and without one."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from torchtitan.grpo.config.bounds import above, at_least

ONE_SET = "heldout"
"""Name of the set of ``evaluation.path``."""


@dataclass
class EvaluationSet:
    """One set of held-out prompts, and how its completions are sampled and scored."""

    path: str | None = None
    """Held-out prompts, in the same form as ``prompts.path``. None evaluates nothing, unless
    ``sets`` names some."""

    name: str | None = None
    """Configuration of a Hugging Face data set that has several. Not used for files."""

    split: str = "test"
    """Split of a Hugging Face data set. Not used for files."""

    num_prompts: Annotated[int, at_least(1).or_value(0, "all rows")] = 256
    """Number of rows to evaluate, counted from the beginning of the set."""

    function: str = "exact_match"
    """Reward function, named as in ``reward.functions``, whose mean is reported as the score."""

    num_samples: Annotated[int, at_least(1)] = 1
    """Completions of each prompt. The score of a prompt is their mean. Several need a
    ``temperature`` above 0."""

    temperature: Annotated[float, at_least(0)] = 0.0
    """Sampling temperature. 0 decodes greedily."""

    top_p: Annotated[float, above(0).at_most(1)] = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability is sampled from."""

    top_k: Annotated[int, at_least(1).or_value(-1, "all tokens")] = -1
    """Number of most probable tokens that are sampled from."""

    max_new_tokens: Annotated[int, at_least(1).or_value(0, "rollout.max_new_tokens")] = 0
    """Longest completion, in tokens. Prompt and completion together have at most
    ``training.seq_len``."""

    pass_at: list[int] = field(default_factory=list)
    """Values of k for which pass@k is estimated, each at least 1 and at most ``num_samples``: the
    probability that at least one of k completions passes."""

    pass_score: float = 1.0
    """Score from which on a completion passes."""

    kept_samples: Annotated[int, at_least(0)] = 8
    """Number of prompts of which each evaluation writes all completions into
    ``evaluation_samples.jsonl``, counted from the beginning of the set."""


@dataclass
class Evaluation(EvaluationSet):
    """``[evaluation]``: held-out prompts, whose completions are sampled and scored."""

    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Several sets in place of ``path``, as tables ``[evaluation.sets.NAME]``. Each has a ``path``,
    and may set every other key from ``path`` to ``kept_samples`` for itself; where it does not, the
    value of ``[evaluation]`` holds."""

    interval: Annotated[int, at_least(1).or_value(0, "only at the start and the end")] = 0
    """Number of steps between two evaluations. They run beside training and never hold it up: one
    that is due while another one is running is left out. The run also evaluates before its first
    step and after its last one, and waits for these two. With ``rollout.deterministic``, and with
    ``grpo.async_weight_update = false``, it waits for each."""

    max_concurrent: Annotated[int, at_least(1).or_value(0, "rollout.max_concurrent_rollouts")] = 0
    """Most completions of evaluations in flight at once. Rollouts go first: evaluations take the
    places that rollouts leave free on the servers, and at least a sixteenth of this number, so that
    they come to an end."""

    pin: bool = True
    """During an evaluation beside training, leave one of the servers at the evaluated weights and
    evaluate on it alone. With a single server there is none to spare: completions may then contain
    tokens of newer weights, and ``evaluation/mixed_fraction`` tells how many do. If all other servers
    are lost, or take no new weights for long, the pinned server takes them, and the evaluation is
    begun again with them after the step (``evaluation/begun_again``)."""

    timeout_seconds: Annotated[float, above(0)] = 3600.0
    """Longest time for which an evaluation is waited for, where one is: before the first step, after
    the last one, and without a run; then the command ends with an error. A pinned server takes new
    weights again after this time."""


def evaluation_sets(evaluation: Evaluation) -> dict[str, EvaluationSet]:
    """Returns the sets of held-out prompts by name, each with all its settings.

    The settings must have been checked (`config_checks/evaluation.py`).
    """
    common = {f.name: getattr(evaluation, f.name) for f in fields(EvaluationSet)}
    if evaluation.path is not None:
        return {ONE_SET: EvaluationSet(**common)}
    return {
        name: replace(EvaluationSet(**common), **given) for name, given in evaluation.sets.items()
    }


def set_key(evaluation: Evaluation, name: str, setting: str) -> str:
    """Returns the TOML key of a setting of a set, for messages."""
    return f"evaluation.sets.{name}.{setting}" if evaluation.sets else f"evaluation.{setting}"


def longest_answer(evaluation: Evaluation, max_new_tokens: int) -> int:
    """Returns the longest completion of an evaluation or a rollout, in tokens.

    Args:
        evaluation: The table.
        max_new_tokens: ``rollout.max_new_tokens``.
    """
    of_sets = [s.max_new_tokens for s in evaluation_sets(evaluation).values()]
    return max([max_new_tokens, *of_sets])
