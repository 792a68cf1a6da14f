# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that the sums of who waited for whom close, and that a planted cause is the one that is named.

    python benchmarks/who_waits.py [--json] [--only NAME ...] [--keep FOLDER]

The first table has a run of each kind: asynchronous, synchronous, lent devices, a pipeline, and so on,
with real embedded servers. In each of them

    the seconds of all ``wall/...`` and those of the summary that are in no record add up to the run's
    time, by stamps that the benchmark takes on rank 0 where the trainer begins to be made and where its
    summary is written, within 1 %;
    the shares of each server add up to 1 in every record, within 1 %;
    the seconds of all ``wait/...`` exceed ``wall/rollouts_seconds`` by at most 1 % of the run.

The second table has a run for each cause, which the run is made to wait for: a slow judge, a server
that stands still, and so on. The summary must name this cause first, and the setting that changes it.
Where the setting can remove the wait, the run is repeated with it, and the cause's share must fall.
Servers in these runs sleep in each decode step (`stub_server.py`), and so does training in its loss
(`timed_loss.py`), so that a machine of two cores is enough. The exit status is 1 if a check fails.
A run takes 15 to 40 seconds, and there are 32. With ``--json`` the last line is a JSON object.
"""

import re
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from figures import finish, make_parser, say_bounds
from judge_latency import stub_judge
from who_waits_world import CODE, TASK, Case, Finished, Stub, World, kill, pause, run_case

TOLERANCE = 0.01
_SERVER_SHARE = re.compile(r"servers/(.+)/(\w+)_fraction")


def lose_and_restart(world: World) -> None:
    if world.wait_for_step(4):
        kill(world, 1)
    if world.wait_for_step(12):
        world.start_again(1)


def stand_still(world: World) -> None:
    if world.wait_for_step(3) and world.wait_for_requests(1):
        pause(world, 1, 9.0)


EVALUATED = {"evaluation.path": TASK / "heldout.jsonl", "evaluation.num_prompts": 16}
EPISODES = {"rollout.max_turns": 2, "rollout.environment": f"{CODE}:Digits"}
SUPERVISED = {
    "sft.path": TASK / "train.jsonl", "sft.completion_column": "answer", "rollout.temperature": 1.0,
}  # fmt: skip
QUICK = {"grpo.policy_loss_options.seconds": 0.05}  # for a loss that is called several times a step
KINDS = {
    "asynchronous": Case({"training.steps": 24}, num_servers=2),
    "synchronous": Case({"rollout.max_head_offpolicyness": 0, "grpo.async_weight_update": "false"}),
    "lent devices": Case({"cluster.own.tags": "rollout", "cluster.shared.tags": "train,rollout"}),
    "pipeline": Case(
        {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 4, **QUICK}, num_ranks=2
    ),
    "agents": Case(
        {"agent.function": f"{CODE}:agent", "reward.functions": "agent", "training.steps": 8}
    ),
    "environment": Case({**EPISODES, "reward.functions": "environment"}),
    "evaluations": Case({**EVALUATED, "evaluation.interval": 3, "grpo.async_weight_update": "false"}),
    "evaluations beside": Case({**EVALUATED, "evaluation.interval": 3}),
    "lost server": Case({"training.steps": 24}, num_servers=2, disturb=lose_and_restart),
    "streamed parts": Case({"rollout.stream": "true"}),
    "minibatches": Case({"grpo.num_minibatches": 4, **QUICK}, num_ranks=2),
    "supervised": Case({**SUPERVISED, "training.steps": 40}),
    "checkpoints": Case({"checkpoint.enable": "true", "checkpoint.interval": 3}),
}  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A planted cause: its case, the setting that must be named, and what to change in a second run."""

    case: Case
    setting: str
    change: dict[str, Any] | None = None
    without_server: int | None = None
    """The number of the stub server that the second run leaves out."""
    judges: bool = False
    named: str = ""
    """What the text must hold."""


TWO, SYNCHRONOUS = (Stub(), Stub()), {"rollout.max_head_offpolicyness": 0}
SAVED = {"checkpoint.enable": "true", "checkpoint.interval": 4}
CAUSES = {
    "rewards": Planted(
        Case({"reward.functions": f"{CODE}:slow_reward", "training.steps": 6}, stubs=TWO),
        "reward.num_workers", {"reward.num_workers": 4},
    ),
    "judge": Planted(
        Case({"reward.functions": "judge", "training.steps": 8}, stubs=TWO),
        "reward.judge.max_concurrent", {"reward.judge.max_concurrent": 64}, judges=True,
    ),
    "slow_server": Planted(
        Case(SYNCHRONOUS, stubs=(Stub(), Stub(decode_seconds=0.075))),
        "inference.urls", without_server=1,
    ),
    "bound": Planted(
        Case({**SYNCHRONOUS, "grpo.policy_loss_options.seconds": 0.6}, stubs=TWO),
        "rollout.max_head_offpolicyness", {"rollout.max_head_offpolicyness": 1},
    ),
    "tail": Planted(
        Case({**SYNCHRONOUS, "rollout.max_new_tokens": 150}, stubs=(Stub(long_slots=1), Stub())),
        "rollout.max_head_offpolicyness", {"rollout.max_head_offpolicyness": 3},
    ),
    "buffer": Planted(
        Case(
            {
                "rollout.max_head_offpolicyness": 8, "rollout.buffer_size_limit": 32,
                "rollout.max_concurrent_rollouts": 8, "training.steps": 20,
                "grpo.policy_loss_options.seconds": 4.0, "grpo.policy_loss_options.every": 5,
            }, stubs=TWO,
        ),
        "rollout.buffer_size_limit", {"rollout.buffer_size_limit": 256},
    ),
    "episodes": Planted(
        Case(
            {
                **EPISODES, "rollout.environment_options.seconds": 0.04, "training.steps": 8,
                "reward.functions": "environment",
            }, stubs=TWO,
        ),
        "rollout.environment_workers", {"rollout.environment_workers": 4},
    ),
    "checkpoint": Planted(
        Case(SAVED, stubs=TWO, slow={"fsync_seconds": 0.3}),
        "checkpoint.async_mode", {"checkpoint.async_mode": "async"},
    ),
    "stalled_server": Planted(
        Case({**SYNCHRONOUS, "training.steps": 10}, stubs=TWO, disturb=stand_still),
        "rollout.request_timeout_seconds", {"rollout.request_timeout_seconds": 3},
    ),
    "ranks": Planted(
        Case(num_ranks=2, stubs=TWO, slow={"slow_rank": 1, "block_seconds": 0.4}),
        "prompts.balance_batch", named="rank 1 ",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sums:
    """What the sums of a run leave: seconds and shares; see the module's first lines."""

    seconds: float
    gap: float
    record_gap: float
    server_gap: float
    rollouts: float
    waits: float
    rest: dict[str, float]

    @property
    def excess(self) -> float:
        return (self.waits - self.rollouts) / self.seconds

    def missed(self, name: str) -> list[str]:
        found = {
            "the run's time": abs(self.gap), "a record": self.record_gap,
            "a server's shares": self.server_gap, "waits beyond rollouts": self.excess,
        }  # fmt: skip
        return [f"{name}: {what}: {gap:.2%}" for what, gap in found.items() if gap > TOLERANCE]


def sums_of(run: Finished) -> Sums:
    wall, waits, server_gap, record_gap = Counter[str](), 0.0, 0.0, 0.0
    for record in run.records:
        shares = Counter[str]()
        mine = {k: v for k, v in record.items() if k.startswith("wall/")}
        total = mine.pop("wall/total_seconds")
        record_gap = max(record_gap, abs(sum(mine.values()) / total - 1))
        wall.update({k.removeprefix("wall/").removesuffix("_seconds"): v for k, v in mine.items()})
        waits += sum(v for k, v in record.items() if k.startswith("wait/"))
        for key, value in record.items():
            if match := _SERVER_SHARE.fullmatch(key):
                shares[match[1]] += value
        server_gap = max([server_gap, *(abs(share - 1) for share in shares.values())])
    rest = Counter(run.summary["wall"]["trainer"])
    rest.subtract(wall)
    total = wall.total() + rest.total()
    return Sums(
        run.seconds, total / run.seconds - 1, record_gap, server_gap, wall["rollouts"], waits,
        {cause: round(seconds, 2) for cause, seconds in rest.items() if seconds > 0.01},
    )  # fmt: skip


def told(run: Finished, count: int = 3) -> str:
    causes = run.summary["causes"][:count]
    return ", ".join(f"{cause['cause']} {cause['fraction']:.0%}" for cause in causes)


def check_kind(name: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    case = KINDS[name]
    run = run_case(case, folder)
    sums = sums_of(run)
    unexplained = (sums.rollouts - sums.waits) / sums.seconds
    print(
        f"{name:19} {sums.seconds:6.2f} s  gap {sums.gap:+.3%}  record {sums.record_gap:.3%}  "
        f"servers {sums.server_gap:.3%}  rollouts {sums.rollouts:5.2f} s, explained {sums.waits:5.2f} s, rest "
        f"{unexplained:+.1%} of the run\n{'':19} {told(run, 4)}; after the last record {sums.rest}",
        flush=True,
    )
    return asdict(sums) | {"unexplained": unexplained}, sums.missed(name)


def run_planted(planted: Planted, folder: Path, change: dict[str, Any]) -> Finished:
    judge = stub_judge(hangs=False, seconds=0.25) if planted.judges else nullcontext({})
    with judge as table:
        own = {f"reward.judge.{key}": value for key, value in table.items()}
        own |= {"reward.judge.max_concurrent": 2} if planted.judges else {}
        return run_case(
            replace(planted.case, settings={**planted.case.settings, **own, **change}), folder
        )


def check_cause(name: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    planted = CAUSES[name]
    run = run_planted(planted, folder / "planted", {})
    first = next(iter(run.summary["causes"]), {"cause": "", "setting": "", "text": ""})
    figures = {"named": first["cause"], "share": run.share(name), "text": first["text"]}
    missed = [f"{name}: named {first['cause']}"] if first["cause"] != name else []
    if first["setting"] != planted.setting:
        missed.append(f"{name}: setting {first['setting']}")
    if planted.named not in first["text"]:
        missed.append(f"{name}: {planted.named!r} is not in the text")
    missed += sums_of(run).missed(name)
    after = ""
    left_out = planted.without_server
    if planted.change is not None or left_out is not None:
        changed, change = planted, planted.change or {}
        if left_out is not None:
            stubs = [s for i, s in enumerate(planted.case.stubs) if i != left_out]
            changed = replace(planted, case=replace(planted.case, stubs=stubs))
        again = run_planted(changed, folder / "changed", change)
        figures |= {"share_changed": again.share(name)}
        if again.share(name) >= run.share(name):
            missed.append(f"{name}: {again.share(name):.0%} with the change")
        what = ", ".join(f"{k} = {v}" for k, v in change.items()) or "without that server"
        after = f"; {again.share(name):.0%} with {what}: {told(again)}"
    print(f"{name:15} {told(run)}{after}\n{'':15} {first['text']}", flush=True)
    return figures, missed


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=[*KINDS, *CAUSES], default=[*KINDS, *CAUSES])
    parser.add_argument("--keep", type=Path, help="a new folder for what the runs leave")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="who-waits-") as temporary:
        for name in options.only:
            check = check_kind if name in KINDS else check_cause
            found, bad = check(name, (options.keep or Path(temporary)) / name.replace(" ", "-"))
            figures[name] = found
            missed += bad
    return finish(options, "who_waits", say_bounds(missed), figures)


if __name__ == "__main__":
    sys.exit(main())
