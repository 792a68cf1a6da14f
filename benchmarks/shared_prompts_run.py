# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The process of `shared_prompts.py` that plans and trains."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "programs"))

from build_model import build

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.cost import flops_cost
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.data.step_plan import StepPlan, plan_step
from torchtitan.grpo.training.runner import WholeModelRunner
from torchtitan.grpo.types import Rollout, RolloutGroup, VersionSegment


def groups_of(job: dict[str, Any], prompt_tokens: int) -> list[RolloutGroup]:
    random, mean = np.random.default_rng(0), job["completion"]

    def rollout(prompt: np.ndarray) -> Rollout:
        length = int(random.integers(mean - mean // 4, mean + mean // 4 + 1))
        return Rollout(
            prompt_ids=prompt, token_ids=random.integers(1, 500, length).astype(np.int32),
            logprobs=np.full(length, -1.0, np.float32), segments=(VersionSegment(0, 0, length),),
            finish_reason="stop", completion="", reward=float(random.normal()),
        )  # fmt: skip

    groups = []
    for number in range(job["groups"]):
        prompt = random.integers(1, 500, prompt_tokens).astype(np.int32)
        rollouts = tuple(rollout(prompt) for _ in range(job["group_size"]))
        groups.append(RolloutGroup(number, "", rollouts, ""))
    return groups


def plan(job: dict[str, Any], groups: list[RolloutGroup], shares_contexts: bool) -> StepPlan:
    return plan_step(
        groups, GRPO(), num_ranks=job["ranks"], row_len=job["row_len"], local_batch_size=1,
        max_new_tokens=2 * job["completion"], balance=True, row_bucket=1,
        cost=flops_cost(json.loads((Path(job["model"]) / "config.json").read_text())),
        shares_contexts=shares_contexts,
    )  # fmt: skip


def seconds_of(runner: WholeModelRunner, rows: TrainRows) -> float:
    begin = time.perf_counter()
    runner.forward_backward(
        rows, lambda output, which: (output[..., 0] * rows.loss_weights[which]).sum()
    )
    seconds = time.perf_counter() - begin
    runner.model.zero_grad()
    return seconds


def main() -> None:
    job, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    built = build(job["model"], job["row_len"], local_batch_size=1)
    runner = WholeModelRunner(built.parts[0], rows_at_once=1)
    cases = []
    for prompt in job["prompts"]:
        groups = groups_of(job, int(prompt * job["completion"]))
        plans = {"alone": plan(job, groups, False), "shared": plan(job, groups, True)}
        case = {
            name: {"tokens": of.num_computed, "rows": len(of.layout[0]), "seconds": []}
            for name, of in plans.items()
        }
        seconds_of(runner, plans["shared"].rows_of_rank[0].select(slice(0, 1)))
        for number in range(job["rounds"]):
            for name in sorted(plans, reverse=number % 2 == 1):
                case[name]["seconds"].append(seconds_of(runner, plans[name].rows_of_rank[0]))
        cases.append(case)
    large = job | job["large"]
    groups = groups_of(large, job["completion"])
    counted = {str(shares): plan(large, groups, shares).num_computed for shares in (False, True)}
    found = {"cases": cases, "counted": counted["True"] / counted["False"]}
    result.write_text(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main()
