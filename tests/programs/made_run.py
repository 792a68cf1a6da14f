# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes the files of a run that never was, for reports: python made_run.py FOLDER STEPS [COMPLETIONS]."""

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SERVERS = ("10.0.0.1:8000", "10.0.0.2:8000")
WORDS = (
    "so",
    "we",
    "add",
    "the",
    "two",
    "and",
    "get",
    "a",
    "sum",
    "that",
    "is",
    "even",
    ".",
    "<eos>",
)
CONFIG = """\
# Configuration of a run as it was started after 0 steps.
# What differs from its default has a comment.

[job]
dump_folder = "outputs/made"  # default: "./outputs"
description = "A made run"  # default: "default job"

[model]
hf_assets_path = "Qwen/Qwen3-0.6B"  # default: ""

[training]
steps = {steps}  # default: 100
max_norm = 1.0

[optimizer]
lr = 1e-06

[rollout]
max_new_tokens = 512  # default: 1024
max_head_offpolicyness = 4  # default: 1
# segment_tokens is not set

[reward.judge]
max_concurrent = 8
# api_key is set; its value is not kept
"""


def metrics_of(step: int, steps: int, rng: random.Random) -> dict[str, Any]:
    part = step / steps
    reward = 0.2 + 0.6 * part + rng.gauss(0, 0.03)
    waits = {
        "judge": 3.0,
        "generation": 2.0 - part,
        "tail": 0.5,
        "slow_server": 0.2,
        "rewards": 0.1,
    }
    wall = {
        "rollouts": sum(waits.values()), "forward": 1.5, "backward": 2.5, "optimizer": 0.3,
        "publish": 0.2, "fence": 0.05, "other": 0.02, "checkpoint": 4.0 * (step % 50 == 0),
    }  # fmt: skip
    total = sum(wall.values())
    record = {
        "step": step, "loss/total": rng.gauss(0, 0.01), "loss/policy": rng.gauss(0, 0.01),
        "loss/clipped_fraction": 0.01, "mismatch/kl": 1e-3 * math.exp(rng.gauss(0, 0.5)),
        "mismatch/effective_sample_size": 0.98, "policy/entropy": 0.9 - 0.5 * part + rng.gauss(0, 0.02),
        "policy/nll": 0.9 - 0.5 * part, "grad_norm": math.exp(rng.gauss(-0.5, 0.4)), "lr": 1e-6,
        "data/trained_tokens": 60000.0, "time/tokens_per_second": 65000 / total, "policy_version": step,
        "time/trained_tokens_per_second": 60000 / total, "time/wait_data_seconds": wall["rollouts"],
        "time/step_seconds": total, "time/wait_data_fraction": wall["rollouts"] / total,
        "reward/mean": reward, "reward/std": 0.3, "reward/correct": reward - 0.1, "reward/format": 0.9,
        "reward/logged/judge_seconds": 3.0, "reward/equal_groups_fraction": 0.2 + 0.1 * part,
        "rollout/completion_tokens_mean": 200 + 50 * part + rng.gauss(0, 10),
        "rollout/completion_tokens_min": 20.0, "rollout/completion_tokens_max": 512.0,
        "rollout/length_fraction": 0.04, "rollout/tokens_per_second": 62000 / total,
        "rollout/unscored_fraction": 0.0, "rollout/unscored_by_policy": 0.0,
        "rollout/unscored_by_service": 0.0, "rollout/unscored_by_function": 0.0,
        "staleness/mean_steps": 1.2 + rng.random() / 3, "staleness/max_steps": 3.0,
        "weight_sync/failures": 0.0, "weight_sync/lost_servers": 0.0, "weight_sync/push_seconds": 0.8,
        "guards/skipped": 0.0, "guards/nonfinite": 0.0, "wall/total_seconds": total,
    }  # fmt: skip
    record |= {f"wall/{name}_seconds": value for name, value in wall.items() if value}
    record |= {f"wait/{name}_seconds": value for name, value in waits.items()}
    for i, server in enumerate(SERVERS):
        busy = 0.6 + 0.2 * i + 0.1 * math.sin(step / 20)
        record |= {
            f"servers/{server}/generating_fraction": busy, f"servers/{server}/prefill_fraction": 0.05,
            f"servers/{server}/paused_fraction": 0.02, f"servers/{server}/idle_fraction": 0.93 - busy,
            f"servers/{server}/version": step - 1, f"servers/{server}/kv_use": 0.5 + rng.random() / 10,
            f"servers/{server}/running": 30.0, f"servers/{server}/waiting": 0.0,
            f"servers/{server}/token_seconds": 0.02, f"weight_sync/server{i}/lag": 1.0,
        }  # fmt: skip
    return record | {f"rollout/other_{i}": rng.random() for i in range(60)}


def group_of(step: int, number: int, size: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    rewards = [round(rng.random(), 4) for _ in range(size)]
    row = (step * 7 + number) % 500
    for reward in rewards:
        words = [f" {rng.choice(WORDS)}" for _ in range(rng.randint(20, 120))]
        seen = [" [", "tool", "]", " 4", "2"]
        text, more = "".join(words), f" Step {step}, prompt {number}: done.<eos>".split(" ")[1:]
        ended = [f" {word}" for word in more]
        trained = [1] * len(words) + [0] * len(seen) + [1] * len(ended)
        prompt = f"<user>What is {row} + {number}?</user>"
        yield {
            "step": step, "number": number, "group_id": step * 64 + number, "row": f"train.jsonl:{row}",
            "prompt": prompt, "completion": text, "reward": reward,
            "reward_components": {"correct": reward, "format": 1.0}, "unscored": "", "left_out": False,
            "advantage": round(reward - sum(rewards) / size, 4), "group_rewards": rewards,
            "finish_reason": rng.choice(["stop", "stop", "stop", "length"]),
            "versions": [[step - 1, 0, len(trained)]], "server": f"http://{rng.choice(SERVERS)}",
            "is_chat": True, "columns": {"answer": "42"}, "logged": {"judge": "fine"},
            "context": [
                {"role": "prompt", "trained": False, "num_tokens": 12, "text": prompt},
                {"role": "model", "trained": True, "num_tokens": len(words), "text": text},
                {"role": "environment", "trained": False, "num_tokens": 5, "text": "".join(seen)},
                {"role": "model", "trained": True, "num_tokens": len(ended), "text": "".join(ended)},
            ],
            "tokens": {
                "text": words + seen + ended, "trained": trained,
                "logprob": [round(-rng.expovariate(2), 4) if t else None for t in trained],
                "ratio": [round(math.exp(rng.gauss(0, 0.05)), 4) if t else None for t in trained],
                "advantage": [round(reward - 0.5, 4) if t else None for t in trained],
            },
        }  # fmt: skip


def write_lines(file: Path, records: Iterator[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        # As `SampleLog` does: completions without blanks.
        blanks = (",", ":") if file.name == "samples.jsonl" else (", ", ": ")
        stream.writelines(json.dumps(record, separators=blanks) + "\n" for record in records)


def make_run(folder: Path, steps: int, groups: int = 8, size: int = 8, **changed: Any) -> Path:
    """Writes a healthy run. ``changed`` replaces metrics of all steps: a value, or a function of the step."""
    rng = random.Random(7)
    start = folder / "starts" / "1"
    start.mkdir(parents=True)

    def replaced(step: int, *, is_evaluation: bool) -> dict[str, Any]:
        of_kind = {k: v for k, v in changed.items() if k.startswith("evaluation/") == is_evaluation}
        return {key: value(step) if callable(value) else value for key, value in of_kind.items()}

    def metrics(step: int) -> dict[str, Any]:
        return metrics_of(step, steps, rng) | replaced(step, is_evaluation=False)

    def evaluation(step: int) -> dict[str, Any]:
        score = 0.3 + 0.5 * step / steps
        return {"step": step, "evaluation/score": score, "evaluation/heldout/score": score,
                "evaluation/heldout/pass_at_4": score + 0.1, "evaluation/heldout/length_mean": 210.0,
                "evaluation/heldout/cut_fraction": 0.02, **replaced(step, is_evaluation=True)}  # fmt: skip

    def evaluated(step: int, row: int) -> dict[str, Any]:
        answer = {"text": f"It is {row}.", "score": float(rng.random() < 0.5), "num_tokens": 4}
        answer |= {"finish_reason": "stop", "versions": [step]}
        return {
            "step": step,
            "set": "heldout",
            "row": row,
            "prompt": f"What is {row}?",
            "completions": [answer],
        }

    each = max(1, steps // 20)
    write_lines(folder / "metrics.jsonl", map(metrics, range(1, steps + 1)))
    write_lines(folder / "evaluations.jsonl", map(evaluation, range(0, steps + 1, each)))
    write_lines(
        folder / "evaluation_samples.jsonl",
        (evaluated(step, row) for step in range(0, steps + 1, each) for row in range(8)),
    )
    write_lines(
        folder / "samples.jsonl",
        (
            record
            for step in range(1, steps + 1)
            for number in range(1, groups + 1)
            for record in group_of(step, number, size, rng)
        ),
    )
    levels = ("warning", "warning", "error")
    write_lines(
        folder / "events.jsonl",
        ({"step": s, "time": 1.76e9 + 9 * s, "level": levels[s % 3], "text": f"Server late at step {s}"}
         for s in range(1, steps + 1, each)),
    )  # fmt: skip
    (start / "config.toml").write_text(CONFIG.replace("{steps}", str(steps)))
    environment = {"started": "2026-11-30T10:00:00+00:00", "first_step": 1, "num_ranks": 8, "host": "node1",
                   "packages": {"torch": "2.13.0"}, "devices": ["NVIDIA H200"] * 8, "commit": "0" * 40}  # fmt: skip
    (start / "environment.json").write_text(json.dumps(environment))
    causes = [{"cause": "judge", "fraction": 0.28, "seconds": 3.0 * steps, "setting": "reward.judge.max_concurrent",
               "text": "28 % of the time was waited for the judge; raise reward.judge.max_concurrent from 8"}]  # fmt: skip
    summary = {
        "steps": steps,
        "seconds": 10.0 * steps,
        "dropped": {"groups failed": 3},
        "causes": causes,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


if __name__ == "__main__":
    count = int(sys.argv[2])
    completions = int(sys.argv[3]) if len(sys.argv) > 3 else 64 * count
    make_run(Path(sys.argv[1]), count, groups=max(1, completions // count // 8))
