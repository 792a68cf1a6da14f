# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo plan X.toml [--from RUN] [--devices N] [--table.key value ...]``."""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan.grpo.command_line import ConfigError, refusing
from torchtitan.grpo.config.cluster import count_servers, lent_groups, server_groups
from torchtitan.grpo.inference.gpu_shares import WITHOUT_TRAINING
from torchtitan.grpo.inference.urls import named_urls
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hub import locate_models
from torchtitan.grpo.plan.hardware import DEVICES, Device, cache_places, computed_costs
from torchtitan.grpo.plan.measured import Measured, read_run
from torchtitan.grpo.plan.search import (
    Plan,
    Split,
    Spread,
    best_split,
    compare,
    lendings,
    smaller,
    spread,
    worth_naming,
)
from torchtitan.grpo.plan.system import Lengths, System
from torchtitan.grpo.start.train import parse, ranks_of_layout, read_settings
from torchtitan.grpo.weight_wire.model_folder import read_json

_LONGEST_PROMPT = 512  # if prompts.max_prompt_tokens is not set
_SPREAD = 0.8  # assumed standard deviation of a completion's length, divided by the mean


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchtitan-grpo plan X.toml", allow_abbrev=False)
    parser.add_argument(
        "--from", dest="run", type=Path, metavar="RUN_FOLDER",
        help="take costs and lengths from this run's metrics (default: calculate them)",
    )  # fmt: skip
    parser.add_argument(
        "--devices",
        type=_whole(2, 10_000),
        metavar="N",
        help="find the best split of N devices (2 to 10,000)",
    )
    parser.add_argument(
        "--device-class", choices=DEVICES, default="h100", help="kind of GPU, without --from"
    )
    parser.add_argument(
        "--mean-length", type=_number(1), default=0.5, metavar="PART",
        help="mean length of completions as a part of rollout.max_new_tokens, without --from",
    )  # fmt: skip
    parser.add_argument(
        "--reward-seconds",
        type=_number(86_400),
        default=0.0,
        help="time to score a group (default: 0)",
    )
    parser.add_argument(
        "--seeds", type=_whole(2, 1000), default=4, help="number of simulated runs (default: 4)"
    )
    return parser


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, got {text!r}"
            )
        return int(text)

    return read


def _number(most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = math.nan
        with suppress(ValueError):
            value = float(text)
        if not 0 <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a number from 0 to {most:g}, got {text!r}")
        return value

    return read


@dataclass(frozen=True)
class _Given:
    """What the plan is made from."""

    config: JobConfig
    options: argparse.Namespace
    num_ranks: int
    measured: Measured | None
    model: Mapping[str, Any]

    @property
    def device(self) -> Device:
        return DEVICES[self.options.device_class]

    @property
    def server_devices(self) -> int:
        return max(1, self.config.inference.tensor_parallel_size)

    @property
    def server_bytes(self) -> int:
        """What a server may fill, on all of its devices."""
        part = self.config.inference.gpu_memory_utilization or WITHOUT_TRAINING
        return int(part * self.device.memory * self.server_devices)

    def split(self) -> Split:
        lent = count_servers(lent_groups(self.config))
        number = count_servers(server_groups(self.config))
        number = number or len(named_urls(self.config.inference))
        if number == 0:  # they register when they are up
            number = self.measured.num_servers if self.measured else 1
        return Split(self.num_ranks, number - lent, lent)


def plan(arguments: list[str]) -> int:
    given, others = options().parse_known_args(arguments)
    parsed = parse(others)
    config = read_settings(parsed)
    if config.job.config_file is None and not parsed.rest:
        raise ConfigError("A configuration must be named: torchtitan-grpo plan X.toml.")
    if not config.has_servers:
        raise ConfigError(
            "torchtitan-grpo plan simulates rollouts, which a run with rollout.replay or sft.path does not "
            "have. Plan a run that generates."
        )
    locate_models(config, weights=False)
    model = read_json(Path(config.model.hf_assets_path) / "config.json", "model.hf_assets_path")
    measured = read_run(given.run) if given.run is not None else None
    num_ranks = parsed.num_ranks or ranks_of_layout(config)[0]
    facts = _Given(config, given, num_ranks, measured, model)
    for line in _lines(facts):
        print(line, flush=True)
    return 0


def _lines(facts: _Given) -> Iterator[str]:
    with refusing():
        made = make_plan(facts)
    yield from _costs(facts, made)
    before = spread(made.system, facts.options.seeds)
    yield f"\nThe run, with {_describe(made.split)}"
    yield from (f"  {line}" for line in describe_run(before))
    yield "\nWhat to change first"
    yield from (f"  {line}" for line in describe_changes(made, before))
    if facts.options.devices is not None:
        yield f"\nThe best split of {facts.options.devices:,} devices"
        with refusing():
            yield from (f"  {line}" for line in describe_split(made, facts.options))
    if facts.measured is None:
        yield f"\nMemory, on {facts.options.device_class.upper()}"
        yield from (f"  {line}" for line in _memory(facts, made))


def make_plan(facts: _Given) -> Plan:
    config, measured, split = facts.config, facts.measured, facts.split()
    rollout, grpo, limit = config.rollout, config.grpo, config.rollout.max_new_tokens
    if measured is not None:
        lengths, prompt_tokens = measured.lengths, measured.prompt_tokens
        costs, dropped = measured.costs, measured.dropped
        lent = min(measured.num_servers, count_servers(lent_groups(measured.config)))
        old = Split(measured.num_ranks, measured.num_servers - lent, lent)
    else:
        lengths = Lengths.lognormal(facts.options.mean_length * limit, _SPREAD)
        longest = config.prompts.max_prompt_tokens or _LONGEST_PROMPT
        prompt_tokens = min(longest, config.training.seq_len - limit) / 2
        dropped, old = 0.0, split
        costs = computed_costs(
            config, facts.model, facts.device,
            num_ranks=split.num_ranks, num_servers=split.num_servers + split.num_lent,
            server_devices=facts.server_devices, context_tokens=prompt_tokens + lengths.mean(limit) / 2,
        )  # fmt: skip
    if rollout.ignore_eos:
        lengths = Lengths.lognormal(limit, 0.0)
    costs = replace(costs, reward=facts.options.reward_seconds)
    system = System(
        grpo, rollout, costs, lengths, old.num_servers, old.num_lent,
        max_running=-(-rollout.max_concurrent_rollouts // (split.num_servers + split.num_lent)),
        prompt_tokens=prompt_tokens,
        reward_places=config.reward.num_workers * (config.reward.concurrency or 1),
        dropped=dropped,
    )  # fmt: skip
    unit = ranks_of_layout(config)[0]
    row = config.training.seq_len * config.training.local_batch_size
    made = Plan(system, old, unit, facts.server_devices, row)
    moved = replace(made.on(split), rollout=rollout)
    if measured is None:
        tokens = prompt_tokens + lengths.mean(limit)
        places = cache_places(facts.model, facts.server_bytes, tokens)
        moved = replace(moved, max_running=max(1, min(moved.max_running, places)))
    return replace(made, system=moved, split=split)


def _describe(split: Split) -> str:
    ranks = "1 training rank" if split.num_ranks == 1 else f"{split.num_ranks:,} training ranks"
    number = split.num_servers + split.num_lent
    servers = "1 server" if number == 1 else f"{number:,} servers"
    return f"{ranks} and {servers}{' on lent devices' if split.num_lent else ''}"


def _costs(facts: _Given, made: Plan) -> Iterator[str]:
    costs, system, measured = made.system.costs, made.system, facts.measured
    if measured is not None:
        yield f"Costs, measured in {measured.num_steps} steps of {facts.options.run}"
    else:
        name = facts.options.device_class.upper()
        yield f"Costs, calculated for {name} (--device-class); --from RUN_FOLDER would measure them"
    yield (
        f"  a server: {1e3 * costs.token:.3g} ms for a token, and {1e3 * costs.beside:.3g} ms for each running "
        f"completion; {1e3 * costs.request:.3g} ms for a request"
    )
    yield (
        f"  training: {1e6 * costs.train_token:.3g} us for a token, and {costs.train:.3g} s for a step; a push "
        f"takes {costs.push:.3g} s, and the reward of a group {costs.reward:.3g} s"
    )
    limit = system.rollout.max_new_tokens
    source = "measured" if measured is not None else "assumed (--mean-length)"
    yield (
        f"  lengths: {system.prompt_tokens:.0f} tokens of a prompt and {system.lengths.mean(limit):.0f} of a "
        f"completion on average, {source}"
    )


def describe_run(runs: Spread) -> Iterator[str]:
    def percent(name: str) -> str:
        return f"{100 * runs.mean(name):.0f} %"

    rate, step = "samples_per_second", "step_seconds"
    yield f"samples a second  {runs.mean(rate):.4g} +- {runs.deviation(rate):.2g} (over {len(runs.outcomes)} seeds)"
    yield f"step              {runs.mean(step):.4g} s +- {runs.deviation(step):.2g} s"
    parts = f"{percent('trained')} training, {percent('waited')} waiting for rollouts"
    parts += f", {percent('pushed')} waiting for pushes, {percent('lent')} lent"
    yield f"training devices  {parts}"
    if runs.mean("busy"):
        idle = 100 - 100 * runs.mean("busy")
        yield f"servers           {percent('busy')} generating, {idle:.0f} % idle"
    if runs.mean("lent_tokens"):
        yield f"lent servers      {percent('lent_tokens')} of the tokens"
    yield f"age of a sample   {runs.mean('mean_age'):.2f} batches on average, at most {max(o.max_age for o in runs.outcomes)}"


def describe_changes(made: Plan, before: Spread) -> Iterator[str]:
    rows = compare(made, before)
    change, gain, error = rows[0]
    if worth_naming(gain, error):
        yield f"Set {change.name}: {100 * (gain - 1):+.0f} % samples a second, the most of these changes."
    else:
        yield "None of these changes gains more than the simulation's noise."
    for change, gain, error in rows:
        note = f"  ({change.note})" if change.note else ""
        yield f"  {100 * (gain - 1):+6.1f} % +- {100 * error:.1f}  {change.name}{note}"


def describe_split(made: Plan, given: argparse.Namespace) -> Iterator[str]:
    split, rate = best_split(made, given.devices)
    yield f"{_describe(split)}: {rate:.4g} samples a second"
    fewer = smaller(made, split, rate)
    if fewer <= given.devices // 2:
        yield f"but {fewer:,} devices reach nearly as many: a batch does not keep more of them busy"
    system = made.on(split)
    in_flight = system.rollout.max_concurrent_rollouts
    yield f"with rollout.max_concurrent_rollouts = {in_flight}, as many for each server as now"
    runs = spread(system, 2)
    yield (
        f"training devices: {100 * runs.mean('trained'):.0f} % training, {100 * runs.mean('waited'):.0f} % "
        f"waiting; servers: {100 * runs.mean('busy'):.0f} % generating"
    )
    for change in lendings(made, split):
        gain, error = spread(change.system, 2).gain(runs)
        yield f"{change.name} ({change.note}): {100 * (gain - 1):+.1f} % +- {100 * error:.1f}"


def _memory(facts: _Given, made: Plan) -> Iterator[str]:
    """Imports torch, which takes seconds."""
    from torchtitan.grpo.models.hf_config import read_hf_model
    from torchtitan.grpo.observe.console import init_console
    from torchtitan.grpo.plan.memory import judge_memory

    init_console("error", is_rank_zero=True)
    model = read_hf_model(facts.config.model.hf_assets_path)
    found = judge_memory(
        facts.config, model, made.split,
        device_bytes=facts.device.memory, server_bytes=facts.server_bytes,
    )  # fmt: skip
    for _, line in found:
        yield line
    system = made.system
    tokens = system.prompt_tokens + system.lengths.mean(system.rollout.max_new_tokens)
    places = cache_places(facts.model, facts.server_bytes, tokens)
    yield f"a server's cache: {places:,} completions at once, of {system.window(made.split.num_servers):,} wanted"
