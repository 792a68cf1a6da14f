# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Metrics, records and printed lines of an evaluation, whether it is part of a training run or not."""

from collections.abc import Iterator
from typing import Any

from torchtitan.grpo.rollout.results import EvaluationResult

_OF_SET = ["score", "length_mean", "length_max", "cut_fraction", "num_prompts", "num_completions"]


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    metrics = {
        "evaluation/score": result.score,
        "evaluation/seconds": result.seconds,
        "evaluation/newest_version": float(result.newest_version),
        "evaluation/mixed_fraction": result.mixed_fraction,
    }
    for of_set in result.sets:
        for name in _OF_SET:
            metrics[f"evaluation/{of_set.name}/{name}"] = float(getattr(of_set, name))
        for k, value in of_set.pass_at.items():
            metrics[f"evaluation/{of_set.name}/pass_at_{k}"] = float(value)
    return metrics


def sample_records(result: EvaluationResult) -> Iterator[dict[str, Any]]:
    """Yields the records of ``evaluation_samples.jsonl``: one for each prompt that was kept as a sample."""
    for of_set in result.sets:
        for prompt in of_set.samples:
            yield {
                "step": result.version,
                "set": of_set.name,
                "row": prompt.index,
                "prompt": prompt.prompt,
                "completions": [
                    {
                        "text": completion.text,
                        "score": completion.score,
                        "num_tokens": completion.num_tokens,
                        "finish_reason": completion.finish_reason,
                        "versions": sorted({completion.oldest_version, completion.newest_version}),
                    }
                    for completion in prompt.completions
                ],
            }


def evaluation_lines(result: EvaluationResult) -> Iterator[str]:
    for of_set in result.sets:
        name = "" if len(result.sets) == 1 else f" {of_set.name},"
        passed = "".join(f", pass@{k} {value:.3f}" for k, value in of_set.pass_at.items())
        yield (
            f"held-out{name} {of_set.function} at step {result.version}: {of_set.score:.3f}{passed} "
            f"({of_set.num_prompts} prompts, {of_set.cut_fraction:.0%} of the completions cut, "
            f"{result.seconds:.1f} s)"
        )
    if result.mixed_fraction > 0:
        yield (
            f"{result.mixed_fraction:.0%} of these completions have tokens of newer weights, of up "
            f"to step {result.newest_version}, which the servers took meanwhile"
        )
