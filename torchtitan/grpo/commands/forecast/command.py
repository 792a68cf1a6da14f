# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo plan X.toml [--from RUN] [--devices N] [--table.key value ...]``.

Simulates a run before it starts: its speed, its idle times, and what would make it faster.

system.py      what is simulated: settings, numbers of devices, costs, lengths; scaling it down
servers.py     a simulated server, which decodes all running completions together
simulation.py  the events of a run, under the run's own rules of admission and dispatch
lend_forecast.py  the same with servers on the devices of training, under the run's own scheduler
hardware.py    costs by calculation, for a kind of GPU
measured.py    costs measured in an earlier run
search.py      the best division of devices between training and servers
changes.py     changes of settings that could make the run faster, and what each would gain
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan.grpo.commands.forecast.changes import (
    Change,
    allowed,
    changes,
    check,
    compare,
    decides,
    lendings,
    moved,
    recommended,
    split_of,
)
from torchtitan.grpo.commands.forecast.hardware import (
    DEVICES,
    LENDING,
    cache_places,
    computed_costs,
)
from torchtitan.grpo.commands.forecast.measured import Measured, read_run
from torchtitan.grpo.commands.forecast.search import (
    TOLERANCE,
    Plan,
    Split,
    counted,
    smallest_split,
    spread,
)
from torchtitan.grpo.commands.forecast.system import Lengths, System
from torchtitan.grpo.commands.json_result import Parser
from torchtitan.grpo.config.command_line import ConfigError, refusing
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.inference.gpu_shares import WITHOUT_TRAINING
from torchtitan.grpo.models.hub import locate_models
from torchtitan.grpo.start.train import parse, ranks_of_layout, read_settings
from torchtitan.grpo.system.strict_json import Found
from torchtitan.grpo.weight_wire.model_folder import read_json

_LONGEST_PROMPT = 512  # if prompts.max_prompt_tokens is not set
_TRUSTED = 0.25  # difference of a run and its simulation, as a part of the latter
_SPREAD = 0.8  # assumed standard deviation of a completion's length, divided by the mean


def options() -> Parser:
    parser = Parser("torchtitan-grpo plan X.toml", allow_abbrev=False)
    add = parser.add_argument
    whole, number = partial(_between, int), partial(_between, float)
    text = "take costs and lengths from this run's metrics (default: calculate them)"
    add("--from", dest="run", type=Path, metavar="RUN_FOLDER", help=text)
    text = "find the best split of N devices, 2 to 10,000 (default: the devices of the run)"
    add("--devices", type=whole(2, 10_000), metavar="N", help=text)
    text = "kind of GPU, without --from"
    add("--device-class", choices=DEVICES, default="h100", help=text)
    text = "mean length of completions as a part of rollout.max_new_tokens, without --from"
    add("--mean-length", type=number(0, 1), default=0.5, metavar="PART", help=text)
    text = "time from the end of a group to its rewards (default: that of --from, or 0)"
    add("--reward-seconds", type=number(0, 86_400), help=text)
    text = "number of simulated runs (default: 4)"
    add("--seeds", type=whole(2, 1000), default=4, help=text)
    return parser


def _between(kind: type[int | float], least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        with suppress(ValueError):
            value = kind(text)
            if least <= value <= most:
                return value
        raise argparse.ArgumentTypeError(
            f"must be {'a whole' if kind is int else 'a'} number from {least:g} to {most:g}, got {text!r}"
        )

    return read


@dataclass(frozen=True)
class _Given:
    """The plan's input. ``read`` reads the run with more arguments; ``model`` is a parsed ``config.json``."""

    config: JobConfig
    read: Callable[[Sequence[str]], JobConfig]
    options: argparse.Namespace
    split: Split
    measured: Measured | None
    model: dict[str, Any]

    @property
    def device_bytes(self) -> int:
        return DEVICES[self.options.device_class].memory

    @property
    def server_devices(self) -> int:
        return max(1, self.config.inference.tensor_parallel_size)

    @property
    def server_bytes(self) -> int:
        """Memory that a server may use, on all of its devices together."""
        part = self.config.inference.gpu_memory_utilization or WITHOUT_TRAINING
        return int(part * self.device_bytes * self.server_devices)


def plan(arguments: list[str], found: Found) -> int:
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
    check(config)
    locate_models(config, weights=False)
    model = read_json(Path(config.model.hf_assets_path) / "config.json", "model.hf_assets_path")
    measured = read_run(given.run) if given.run is not None else None
    num_ranks = _num_ranks(config, parsed.num_ranks, measured)
    split = split_of(config, num_ranks, measured.num_servers if measured else 1)

    def read(words: Sequence[str]) -> JobConfig:
        return read_settings(parse([*others, *words]))

    for line in _lines(_Given(config, read, given, split, measured, model), found):
        print(line, flush=True)
    return 0


def _num_ranks(config: JobConfig, asked: int | None, measured: Measured | None) -> int:
    smallest, is_fixed = ranks_of_layout(config)
    number = asked or (measured.num_ranks if measured and not is_fixed else smallest)
    if number % smallest or (is_fixed and number != smallest):
        raise ConfigError(
            f"--nproc (by default the ranks of the run of --from) must be {'' if is_fixed else 'a multiple of '}"
            f"{smallest} for the degrees in [parallelism], got {number}. Change it, or the degrees."
        )
    return number


def _lines(facts: _Given, found: Found) -> Iterator[str]:
    seeds, off, error = facts.options.seeds, 0.0, "not the error of the prediction"
    if measured := facts.measured:
        split = split_of(measured.config, measured.num_ranks, measured.num_servers)
        with refusing():
            own = _make_plan(replace(facts, config=measured.config, split=split)).system
        had, simulated = measured.samples_per_second, spread(own, seeds).mean("samples_per_second")
        off = abs(had / simulated - 1)
        found["measured"] = {
            "run_folder": str(facts.options.run), **asdict(split), "samples_per_second": had,
            "simulated_samples_per_second": simulated, "waited_fraction": measured.waited,
            "waits_fraction": measured.waits, "error_fraction": off, "is_trusted": off <= _TRUSTED,
        }  # fmt: skip
        error = f"and the {100 * off:.1f} % between the run and its own simulation"
        yield f"What {facts.options.run} had, with {_describe(split)}"
        yield f"  {had:.4g} samples a second, and {simulated:.4g} when it is simulated"
        yield f"  {100 * measured.waited:.0f} % of the time waiting for rollouts\n"
        if off > _TRUSTED:
            waits = ", ".join(f"{what} {100 * part:.0f} %" for what, part in measured.waits.items())
            yield (
                f"The simulation leaves out some of what this run waited for ({waits} of the time, or other "
                "causes): do not trust its advice.\n"
            )
    with refusing():
        made = _make_plan(facts)
    made = replace(made, system=replace(made.system, off=off))
    yield from _describe_costs(facts, made.system, found.setdefault("costs", {}))
    before = spread(made.system, seeds)
    yield f"\nThe run, with {_describe(made.split)} (+- is the spread over {seeds} seeds, {error})"
    found["run"] = run = asdict(made.split) | before.figures()
    yield from (f"  {line}" for line in _describe_run(run))
    yield f"\nWhat to change first (+- is the standard error over {seeds} seeds, {error})"
    rows = compare(allowed(made, facts.read, changes(made, facts.config)), before)
    best = recommended(rows)
    found["changes"] = [_of_change(*row) for row in rows]
    found["recommended"] = best and _of_change(*best)
    if best:
        yield f"  Recommended: {best[0].name} ({100 * (best[1] - 1):+.0f} % samples a second)"
    else:
        yield "  None of these changes gains more than the simulation's noise."
    for change, gain, own_error in rows:
        note = f"  ({change.note})" if change.note else ""
        yield f"    {100 * (gain - 1):+6.1f} % +- {100 * own_error:.1f}  {change.name}{note}"
    devices = facts.options.devices or max(made.num_devices, made.fewest_devices)
    yield f"\nThe best split of {devices:,} devices"
    told = found["best_split"] = {}
    with refusing():
        yield from (f"  {line}" for line in _describe_split(facts, made, devices, told))


def _make_plan(facts: _Given) -> Plan:
    """Takes costs measured or calculated for some number of devices, and scales them to the run's devices."""
    config, measured, split = facts.config, facts.measured, facts.split
    rollout, limit, unit = config.rollout, config.rollout.max_new_tokens, ranks_of_layout(config)[0]
    if measured is not None:
        lengths, prompt_tokens = measured.lengths, measured.prompt_tokens
        old = split_of(measured.config, measured.num_ranks, measured.num_servers)
    else:
        lengths = Lengths.lognormal(facts.options.mean_length * limit, _SPREAD)
        longest = config.prompts.max_prompt_tokens or _LONGEST_PROMPT
        prompt_tokens, old = min(longest, config.training.seq_len - limit) / 2, Split(unit, 1)
    if rollout.ignore_eos:
        lengths = Lengths.lognormal(limit, 0.0)
    tokens = prompt_tokens + lengths.mean(limit)
    if measured is not None:
        costs, dropped, places = measured.costs, measured.dropped, 0
    else:
        dropped, places = 0.0, max(1, cache_places(facts.model, facts.server_bytes, tokens))
        costs = computed_costs(
            config, facts.model, DEVICES[facts.options.device_class],
            num_ranks=unit, server_devices=facts.server_devices, context_tokens=(tokens + prompt_tokens) / 2,
        )  # fmt: skip
    reward = costs.reward if (given := facts.options.reward_seconds) is None else given
    system = System(
        config.grpo, rollout, replace(costs, reward=reward), lengths, old.num_servers, old.num_lent, places,
        prompt_tokens, config.training.seq_len if config.prompts.share_contexts else 0, dropped,
    )  # fmt: skip
    row = config.training.seq_len * config.training.local_batch_size
    made = Plan(system, old, unit, facts.server_devices, row)
    return replace(made, system=replace(made.on(split), rollout=rollout), split=split)


def _of_change(change: Change, gain: float, error: float) -> Found:
    told = {"settings": dict(change.settings), "text": change.name, "note": change.note}
    return told | {"gain_fraction": gain - 1, "error_fraction": error}


def _describe(split: Split) -> str:
    ranks, servers = counted(split.num_ranks, "training rank"), counted(split.all_servers, "server")
    some = f", {split.num_lent:,} of them" if split.num_servers else ""
    return f"{ranks} and {servers}{f'{some} on lent devices' if split.num_lent else ''}"


def _describe_costs(facts: _Given, system: System, found: Found) -> Iterator[str]:
    costs, measured, name = system.costs, facts.measured, facts.options.device_class.upper()
    found |= {f"{name}_seconds": value for name, value in asdict(costs).items()}
    found |= {"prompt_tokens": system.prompt_tokens, "completion_tokens": system.mean_tokens}
    if measured is not None:
        yield f"Costs, measured in {measured.num_steps} steps of {facts.options.run}"
    else:
        yield f"Costs, calculated for {name} (--device-class); --from RUN_FOLDER would measure them"
    parts = (costs.token, ""), (costs.beside, " N")
    token = " + ".join(f"{1e3 * seconds:.3g}{more}" for seconds, more in parts if seconds)
    yield (
        f"  a server with N completions: {token} ms for a token of each, and {1e3 * costs.request:.3g} ms for "
        "a request"
    )
    yield (
        f"  training: {1e6 * costs.train_token:.3g} us for a token, and {costs.train:.3g} s for a step; a push "
        f"takes {costs.push:.3g} s, and the reward of a group {costs.reward:.3g} s"
    )
    yield (
        f"  lengths: {system.prompt_tokens:.0f} tokens of a prompt and {system.mean_tokens:.0f} of a "
        f"completion on average, {'measured' if measured else 'assumed (--mean-length)'}"
    )
    if system.max_running:
        yield f"  the cache of a server: {system.max_running:,} completions at once"
    assumed = measured.assumed if measured else LENDING
    found |= {"cache_completions": system.max_running or None, "assumed": list(assumed)}
    told = {name: "assumed" if name in assumed else "measured" for name in LENDING}
    yield (
        f"  lending: {costs.room:.3g} s to make room ({told['room']}), {costs.wake:.3g} s to wake servers "
        f"({told['wake']}) and {costs.sleep:.3g} s to put them to sleep ({told['sleep']})"
    )
    if measured is not None:
        yield from (f"  {doubt}" for doubt in measured.doubts)
        ours, theirs = (c.model.hf_assets_path for c in (facts.config, measured.config))
        if Path(ours).resolve() != Path(theirs).resolve():
            yield f"  these are costs of model.hf_assets_path = {theirs}, not {ours}"


def _describe_run(run: Found) -> Iterator[str]:
    def percent(name: str) -> str:
        return f"{100 * run[f'{name}_fraction']:.0f} %"

    rate, step = "samples_per_second", "step_seconds"
    yield f"samples a second  {run[rate]:.4g} +- {run[f'{rate}_error']:.2g}"
    yield f"step              {run[step]:.4g} s +- {run[f'{step}_error']:.2g} s"
    parts = f"{percent('trained')} training, {percent('waited')} waiting for rollouts"
    yield f"training devices  {parts}, {percent('pushed')} waiting for pushes, {percent('lent')} lent"
    if busy := run["busy_fraction"]:
        yield f"servers           {percent('busy')} generating, {100 - 100 * busy:.0f} % idle"
    if run["lent_tokens_fraction"]:
        yield f"lent servers      {percent('lent_tokens')} of the tokens"
    mean, oldest = run["mean_age_batches"], run["max_age_batches"]
    yield f"age of a sample   {mean:.2f} batches on average, at most {oldest}"


def _describe_split(facts: _Given, made: Plan, num_devices: int, told: Found) -> Iterator[str]:
    options = facts.options
    split, rate = smallest_split(made, num_devices)
    system, used = made.on(split), replace(made, split=split).num_devices
    yield f"{_describe(split)}: {rate:.4g} samples a second"
    if num_devices - used >= min(made.unit, made.server_devices):
        yield (
            f"{num_devices:,} devices are no more than {100 * TOLERANCE:g} % faster than {used:,}: a batch of "
            f"{system.batch_completions:,} samples is too small for more (raise grpo.prompts_per_step)"
        )
    change = moved(made, facts.config, split)
    if not decides(facts.read(change.words), split):
        change = replace(change, more="other tables in [cluster]")
    if change.name:
        yield f"with {change.name}: as many completions in flight for each server as now"
    runs = spread(system, options.seeds)
    told |= asdict(split) | runs.figures() | {"samples_per_second": rate}
    told |= {"devices": num_devices, "used_devices": used, "settings": dict(change.settings)}
    yield (
        f"training devices: {100 * runs.mean('trained'):.0f} % training, {100 * runs.mean('waited'):.0f} % "
        f"waiting; servers: {100 * runs.mean('busy'):.0f} % generating"
    )
    found = allowed(made, facts.read, lendings(made, facts.config, split))
    rows = compare(found, runs)
    told["lendings"] = [_of_change(*row) for row in rows]
    for change, gain, error in rows:
        yield f"{change.name} ({change.note}): {100 * (gain - 1):+.1f} % +- {100 * error:.1f}"
