"""A policy and a critic in one pass of a pipeline, with work in its gaps, compared with two passes."""

import torch
import torch.distributed as dist
from build_model import build_stages
from critic_layouts import critic_of, targets_of
from deferred_gradients import gathered
from sharded_model import picked_sum, rows_of, runner_of

from torchtitan.grpo.pipeline.fill import FillJob
from torchtitan.grpo.training.critic import CriticLoss
from torchtitan.grpo.training.runner import ForwardJob, TrainJob


class Units(FillJob):
    """Counts its units, which take no time."""

    count = 0

    def run(self) -> bool:
        self.count += 1
        return True


def run_case(arguments: dict, case: dict) -> dict:
    num_rows = case.pop("num_rows", None)
    built, stages = build_stages(arguments["policy"], arguments["seq_len"], **case)
    built.config.grpo.advantage = "gae"
    policy, critic = runner_of(built, stages), critic_of(built, arguments["critic"])
    rows = rows_of(arguments).select(slice(num_rows))
    weighted, models = picked_sum(rows), {"policy": built.parts, "critic": critic.parts}

    def gradients(*which: str) -> dict[str, torch.Tensor]:
        found = {}
        for model in which:
            for name, gradient in gathered(models[model]).items():
                found[f"{model} {name}"] = gradient.clone()
            for part in models[model]:
                part.zero_grad()
        return found

    expected_output = policy.forward(rows)
    runs: list[int] = []
    for runner in (policy, critic.runner):
        run = runner.schedule.run
        runner.schedule.run = lambda *a, run=run, **k: (runs.append(1), run(*a, **k))[1]
    units = Units("units")
    policy.fill([units])
    expected, different, numbers, done = None, [], [], []
    for _ in range(5):  # the first pass cannot train both, because it infers shapes
        runs.clear()
        job = ForwardJob(policy, rows)
        value_loss = CriticLoss(targets_of(rows), clip=0.0)
        policy.forward_backward(rows, weighted, [job], TrainJob(critic.runner, value_loss))
        done.append(rows.num_rows - job.waiting.num_rows)
        numbers.append(len(runs))
        found = gradients(*models)
        expected = expected or found
        different += [name for name in found if not torch.equal(found[name], expected[name])]
        logprobs = job.logprobs()
        if logprobs is not None and not torch.equal(logprobs, expected_output[..., 0]):
            different.append("old logprobs")
    critic.runner.forward_backward(rows, CriticLoss(targets_of(rows), clip=0.0))
    alone = gradients("critic")
    different += [n for n in alone if not torch.equal(alone[n], expected[n])]
    own = [*policy.schedule.stages, *critic.runner.schedule.stages]
    return {
        "passes": numbers,
        "done": done,
        "different": different,
        "compared": len(expected),
        "units": units.count,
        "first": [any(s.is_first for s in r.schedule.stages) for r in (policy, critic.runner)],
        "held": sum(len(s.args_recv_info) + len(s._leaving) for s in own),
        "losses": len(policy.schedule._losses) + len(critic.runner.schedule._losses),
    }


def main(arguments: dict) -> dict:
    results = [run_case(arguments, case) for case in arguments["cases"]]
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, results)
    return {"results": of_ranks}
