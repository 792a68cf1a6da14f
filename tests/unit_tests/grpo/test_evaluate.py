# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What ``torchtitan-grpo evaluate`` prints."""

from torchtitan.grpo.evaluate import print_table
from torchtitan.grpo.rollout.results import EvaluationResult, SetResult


def test_the_table_is_whole_where_no_terminal_is(capsys):
    of_set = SetResult(
        name="held-out-problems-of-the-competition",
        function="rewards/competition_answers.py:has_equal_answer",
        score=0.625,
        num_prompts=16,
        num_completions=128,
        pass_at={1: 0.625, 4: 0.875, 8: 1.0},
        length_mean=7.0,
        length_max=8,
        cut_fraction=0.25,
        samples=(),
    )
    print_table(EvaluationResult((of_set,), 3, 3, 0.0, 1.5))
    head, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:6] == ["set", "function", "score", "pass@1", "pass@4", "pass@8"]
    assert head[6:] == ["tokens", "longest", "cut", "prompts", "n"]
    assert row[:4] == [of_set.name, of_set.function, "0.6250", "0.6250"]
    assert row[4:] == ["0.8750", "1.0000", "7.0", "8", "25.0%", "16", "8"]
