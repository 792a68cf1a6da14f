# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Notices that nothing is learned because the rewards of each group are all equal."""

from collections import deque
from collections.abc import Collection, Mapping

from torchtitan.grpo.config.environments import reward_functions
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.rewards.reward_loading import NAMES

_OFTEN_CUT = 0.9
"""Share of cut completions from which on the limit is a likely cause."""
_TAUGHT = "teacher/reverse_kl"
"""A metric of steps whose rollouts a teacher has rated."""


class EqualRewardsWatch:
    """Counts the latest steps in which no group had two different rewards.

    The first notice comes after ``observe.equal_rewards_steps`` such steps in a row, and each further
    notice after twice as many. Groups replaced by ``rollout.dynamic_sampling`` do not count.
    """

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        is_off = config.guards.equal_rewards == "off" or not config.has_rewards
        # A critic learns from groups whose rewards are equal.
        is_off = is_off or (config.has_critic and config.grpo.group_size > 1)
        self._first = self._due = 0 if is_off else config.observe.equal_rewards_steps
        self._num_steps = 0
        # The latest steps, from whose metrics the causes are ranked.
        self._steps: deque[Mapping[str, float]] = deque(maxlen=max(1, self._first))

    def update(self, metrics: Mapping[str, float], is_chat: bool | None) -> str | None:
        """Adds a step, and returns a notice if one is due. ``is_chat``: whether prompts are chats, if known."""
        # A replay learns from a teacher's ratings in its file without naming a teacher.
        is_taught = _TAUGHT in metrics and self._config.teacher.coef > 0
        if not self._first or (is_taught and not reward_functions(self._config)):
            return None
        if metrics["reward/equal_groups_fraction"] < 1:
            self._num_steps, self._due = 0, self._first
            self._steps.clear()
            return None
        self._num_steps += 1
        self._steps.append(metrics)
        if self._num_steps < self._due:
            return None
        self._due *= 2
        return self._notice(is_chat)

    def end(self, is_chat: bool | None) -> str | None:
        """Returns a notice at the end of a run that was too short for the first one."""
        is_early = self._due == self._first
        return self._notice(is_chat) if self._first and self._steps and is_early else None

    def _notice(self, is_chat: bool | None) -> str:
        count = self._num_steps
        steps = "step" if count == 1 else f"{count} steps"
        unit = "group" if self._config.grpo.group_size > 1 else "batch"
        grpo, teacher = self._config.grpo, self._config.teacher
        is_taught = any(_TAUGHT in step for step in self._steps) and teacher.coef > 0
        others = grpo.kl_coef > 0 or grpo.entropy_coef > 0 or grpo.ptx_path is not None
        others = others or is_taught or bool(teacher.urls)
        lost = "rewards teach nothing" if others else "nothing is learned"
        causes = likely_causes(self._config, self._steps, is_chat)
        return "\n".join(
            [
                f"No {unit} of the last {steps} had two different rewards; {lost} "
                "(reward/equal_groups_fraction is 1). Likely causes, the likeliest first:",
                *(f"  - {cause}" for cause in causes),
                "  samples.jsonl shows what was scored (observe.print_samples prints it); "
                "docs/how-to/rewards.md tries a reward without a run.",
            ]
        )


def likely_causes(
    config: JobConfig, steps: Collection[Mapping[str, float]], is_chat: bool | None
) -> list[str]:
    """Returns possible causes of equal rewards, the likeliest first as judged from the steps' metrics."""
    lowest = min(step["reward/mean"] for step in steps)
    highest = max(step["reward/mean"] for step in steps)
    is_constant = highest - lowest < 1e-9 and all(step["reward/std"] < 1e-9 for step in steps)
    cut = sum(step["rollout/length_fraction"] for step in steps) / len(steps)
    named = reward_functions(config)
    functions = ", ".join(named) or "none"
    value = f"{lowest:.4g}" if is_constant else f"{lowest:.4g} to {highest:.4g}"
    messages = (
        "reward.functions: completions are lists of messages, not strings, where prompts are chat "
        "messages"
        + (", as they are here" if is_chat else "")
        + ': the text is completion[-1]["content"].'
    )
    constant = (
        f"reward.functions ({functions}): the reward may not depend on the completion; reward/mean "
        f"is {value}" + (" for every sample." if is_constant else ".")
    )
    limit = (
        f"rollout.max_new_tokens ({config.rollout.max_new_tokens}): {100 * cut:.0f}% of the "
        "completions are cut off there (rollout/length_fraction), perhaps before their answer."
    )
    task = (
        f"The task may be too easy or too hard: reward/mean is {value}. Choose other prompts, give "
        "partial credit, raise grpo.group_size or rollout.temperature "
        f"({config.rollout.temperature:g}), or use rollout.dynamic_sampling."
    )
    ranked = [
        (3.0 if is_chat and is_constant else 1.5, messages),
        (2.0 if is_constant else 0.5, constant),
        # A completion without its end seldom earns the same as all others, unless that is nothing.
        ((1.0 if is_constant and lowest > 0 else 4.0) if cut >= _OFTEN_CUT else 0.1, limit),
        (0.2 if is_constant and lowest not in (0.0, 1.0) else 1.8, task),
    ]
    if is_chat is False or all(path in NAMES for path in named):
        ranked.pop(0)
    return [cause for _, cause in sorted(ranked, key=lambda entry: -entry[0])]
