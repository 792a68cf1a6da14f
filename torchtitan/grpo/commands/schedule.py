# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The command ``torchtitan-grpo schedule``, which shows a pipeline schedule and compares it with others."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.models.hub import locate_models
from torchtitan.grpo.pipeline.choice import assumed_times, choose
from torchtitan.grpo.pipeline.draw import draw_picture, draw_text
from torchtitan.grpo.pipeline.schedules import (
    AUTO,
    HELIX,
    LAYER_SCHEDULES,
    SCHEDULES,
    Schedule,
    assumed_microbatches,
    candidates,
)
from torchtitan.grpo.pipeline.stages import fixes_stages, stage_modules, trains_together
from torchtitan.grpo.pipeline.tables.actions import Costs, Table
from torchtitan.grpo.pipeline.tables.fused import simulate_fused
from torchtitan.grpo.pipeline.tables.helix import helix, part_costs
from torchtitan.grpo.pipeline.tables.simulate import Simulation, simulate


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchtitan-grpo schedule X.toml", allow_abbrev=False)
    time = _number("a time must be a finite number above 0", lambda value: 0 < value < math.inf)
    delay = _number("the time must be a finite number from 0", lambda value: 0 <= value < math.inf)
    share = _number("the share must be between 0 and 1", lambda value: 0 < value < 1)
    parser.add_argument(
        "--times", nargs=3, type=time, metavar=("F", "I", "W"),
        help="times of a microbatch's forward pass, input gradients and weight gradients on one "
        "rank (default: typical times for the configured activation checkpointing)",
    )  # fmt: skip
    parser.add_argument(
        "--microbatches", type=_count, metavar="M",
        help="number of microbatches of a step; in a run, it depends on the lengths of the "
        "completions (default: four for each rank)",
    )  # fmt: skip
    parser.add_argument(
        "--hop", type=delay, default=0.0, help="time to send a tensor between ranks (default: 0)"
    )
    parser.add_argument(
        "--attention", type=share, default=0.5, metavar="SHARE",
        help="share of F and I that attention takes, which Helix computes apart; it grows with "
        "the length of rows (default: 0.5)",
    )  # fmt: skip
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw all schedules into this file"
    )
    return parser


def _number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Returns a parser for numbers that fit; the parser's error message begins with ``what``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{what}, got {text!r}")
        return value

    return parse


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"the number must be an integer above 0, got {text!r}")
    return int(text)


def show_schedules(config: JobConfig, given: argparse.Namespace) -> None:
    """Prints the configured schedule over time, and all schedules in a table."""
    settings = config.parallelism
    num_ranks = settings.pipeline_parallel_degree
    num_microbatches = given.microbatches or assumed_microbatches(num_ranks)
    times = tuple(given.times or assumed_times(config))
    tried = try_all(num_ranks, num_microbatches, times, given.hop)
    recomputes = config.activation_checkpoint.mode == "full"
    helix = try_helix(num_ranks, num_microbatches, times, given.hop, given.attention, recomputes)
    tried[HELIX] = helix
    name = settings.pipeline_parallel_schedule
    if name == AUTO:
        allowed = {row.name: tried[row.name] for row in _candidates(config)}
        name = choose(allowed, config.grpo.pipeline_memory, num_ranks)
        print(f"For these times, {AUTO} would choose {name}. A run measures its own times.\n")
    table, simulation = tried[name]
    print(
        f"{name} on {num_ranks} ranks with {num_microbatches} microbatches. F, I, W take "
        f"{', '.join(f'{time:g}' for time in times)}. Later stages of a rank are in lower case.\n"
    )
    if trains_together(config):
        row = SCHEDULES[name]
        costs = Costs.uniform(num_ranks, row.stages_per_rank, times, given.hop)
        table, fused = simulate_fused(table, costs, turns=row.turns_second)
        print(
            f"One pass trains the critic, too, which is also in lower case. It takes {fused.makespan:.4g} "
            f"instead of {2 * simulation.makespan:.4g} in two passes. The comparison of schedules, behind "
            "the drawing, is of one model.\n"
        )
        simulation = fused
    print(draw_text(table, simulation), end="\n\n")
    print(comparison(tried, name))
    if given.picture is not None:
        titles = {
            f"{name}: bubble {s.bubble:.1%}, peak {s.peak:g}": (t, s)
            for name, (t, s) in tried.items()
        }
        print(f"\nPicture: {draw_picture(titles, given.picture)}")


def _candidates(config: JobConfig) -> list[Schedule]:
    """Returns the schedules to compare. The model is read only if the settings fix the number of stages."""
    settings = config.parallelism
    if not fixes_stages(settings):
        return candidates(settings.pipeline_parallel_degree)
    try:
        locate_models(config, weights=False)
        model = read_hf_model(config.model.hf_assets_path)
        stages = stage_modules(settings, model.model_args.n_layers)  # pyright: ignore
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return candidates(settings.pipeline_parallel_degree, len(stages))


def try_all(
    num_ranks: int, num_microbatches: int, times: tuple[float, ...], hop: float = 0.0
) -> dict[str, tuple[Table, Simulation]]:
    """Simulates all schedules but Helix, as if dividing the model into more stages cost no time."""
    tried = {}
    for name, row in LAYER_SCHEDULES.items():
        if name == AUTO:
            continue
        costs = Costs.uniform(num_ranks, row.stages_per_rank, times, hop)
        table = row.make_table(num_ranks, num_microbatches, costs)
        tried[name] = table, simulate(table, costs)
    return tried


_LAYERS_A_RANK = 4
_KEPT = (2.0, 4.0)
"""Memory of a part with weights, and of attention, relative to a checkpointed layer: the inputs of
both, and the output of attention. The queries are as large as hidden states, keys and values smaller."""
_KEPT_BY_ATTENTION = 0.2
"""Share of a layer's activations without checkpointing."""


def try_helix(
    num_ranks: int,
    num_microbatches: int,
    times: tuple[float, ...],
    hop: float,
    attention: float,
    recomputes: bool,
) -> tuple[Table, Simulation]:
    """Simulates Helix with a few layers on each rank.

    ``attention`` is the share of attention in the time of F (forward) and of I (input gradient). With
    ``recomputes``, I includes recomputing all of F, of which Helix need not recompute attention.
    """
    forward, input_grad, weight_grad = (time / _LAYERS_A_RANK for time in times)
    again = forward if recomputes else 0.0
    kept = _KEPT if recomputes else (1 - _KEPT_BY_ATTENTION, _KEPT_BY_ATTENTION)
    costs = part_costs(
        num_ranks * _LAYERS_A_RANK,
        ((1 - attention) * forward, (1 - attention) * (input_grad - again) + weight_grad),
        (attention * forward, attention * max(input_grad - again, 0.0)),
        hop=hop,
        recomputes=recomputes,
        kept=(kept[0] / _LAYERS_A_RANK, kept[1] / _LAYERS_A_RANK),
        shared=kept[1] / 4 / _LAYERS_A_RANK,
    )
    table = helix(num_ranks, num_microbatches, costs)
    return table, simulate(table, costs)


def comparison(tried: dict[str, tuple[Table, Simulation]], chosen: str) -> str:
    lines = [f"  {'schedule':22} {'time':>8} {'bubble':>7} {'span bubble':>12} {'memory':>7}"]
    for name, (_, simulation) in tried.items():
        lines.append(
            f"{'*' if name == chosen else ' '} {name:22} {simulation.makespan:8.4g} "
            f"{simulation.bubble:7.1%} {simulation.span_bubble:12.1%} {simulation.peak:7.3g}"
        )
    lines.append(
        "time: time from the first start to the last end. bubble: idle share of this time, on\n"
        "average. span bubble: the largest idle share of a rank between its first start and its\n"
        "last end. memory: peak of a rank's activations, in activations of one microbatch."
    )
    return "\n".join(lines)
