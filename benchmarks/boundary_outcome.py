# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Turns the records of a run of `boundary_stall.py` into figures, a table row, and verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NUM_SERVERS = 3
SICK = NUM_SERVERS - 1
"""Index of the server that is slowed down, stopped or killed."""
WARM_UP = 10
"""Number of steps at the start that are not counted."""
ASYNC_SHARE, ASYNC_FLOOR_MS = 0.01, 2.0
FAULT_FACTOR, FAULT_SLACK_MS = 1.5, 0.5
THROUGHPUT_FACTOR = 1.25


@dataclass
class Outcome:
    """Figures of one run. Durations are in milliseconds.

    The sick server is the one that is slowed down, stopped or killed.

    Attributes:
        stall: p50, p99 and maximum of the stalls.
        parts: p99 and maximum of each part of the stall on each rank.
        queued: p99 of the part of a stall in which the thread waited for a core.
        undisturbed: p99 of the stalls without that part.
        floor: p99 of the duration of 0.1 ms of computing, right before publishing.
        stolen: Share of the cores' time that the host of a virtual machine gave to other machines,
            in percent.
        attested: p50 of the stalls that include a forward pass over the probe's tokens.
        step: p50 of the duration of a step.
        steps_per_second: Steps per second from the end of the warm-up to the end of the run.
        lag: p50 and maximum of the number of versions that each server is behind. A lost server has
            no lag.
        push: p50 of the pushes to the healthy servers, and to the sick server.
        slowest_push: p99 of the pushes to the healthy servers.
        latency: p50 of the time from publishing a version to its confirmation by a healthy server.
        pushes_per_second: Pushes per second to all servers together.
        failures: Number of times that a server was lost.
    """

    stall: tuple[float, float, float]
    parts: dict[str, tuple[float, float]]
    queued: float
    undisturbed: float
    floor: float
    stolen: float
    attested: float
    step: float
    steps_per_second: float
    lag: list[tuple[float, float]]
    push: tuple[float, float]
    slowest_push: float
    latency: float
    pushes_per_second: float
    failures: int


def read_outcome(results: list[dict[str, Any]], urls: list[str], stolen: float) -> Outcome:
    """Returns percentiles over the steps after the warm-up.

    Args:
        results: The file that each rank of `boundary_run.py` wrote.
        urls: URLs of the servers. The sick server is the last one.
        stolen: Share of the cores' time that the host took during the run, in percent.
    """
    ranks = [[r for r in result["records"] if r["step"] > WARM_UP] for result in results]
    steps_of_ranks = list(zip(*ranks, strict=True))
    stalls = [1e3 * max(r["stall_seconds"] for r in pair) for pair in steps_of_ranks]
    parts = {}
    for rank, records in enumerate(ranks):
        for part in ("fence", "publish", "reserve_slot"):
            values = [1e3 * r[part] for r in records]
            parts[f"{part}/{rank}"] = (percentile(values, 99), max(values))
    leader = ranks[0]
    published = {r["step"]: r["published_at"] for r in leader}
    confirmed = results[0]["confirmed"]
    lags = [lags_of(url, published, confirmed, results[0]["lost"]) for url in urls]
    latencies = [
        at - published[version]
        for at, url, version in confirmed
        if version in published and url in urls[:SICK]
    ]
    seconds = leader[-1]["published_at"] - leader[0]["published_at"]
    begin = leader[0]["published_at"]
    return Outcome(
        stall=(percentile(stalls, 50), percentile(stalls, 99), max(stalls)),
        parts=parts,
        queued=percentile([1e3 * max(r["queued"] for r in pair) for pair in steps_of_ranks], 99),
        undisturbed=percentile(
            [1e3 * max(r["stall_seconds"] - r["queued"] for r in pair) for pair in steps_of_ranks],
            99,
        ),
        floor=percentile([1e3 * max(r["floor"] for r in pair) for pair in steps_of_ranks], 99),
        stolen=stolen,
        attested=percentile(
            [s for s, pair in zip(stalls, steps_of_ranks, strict=True) if pair[0]["is_attested"]],
            50,
        ),
        step=1e3 * percentile([r["step_seconds"] for r in leader], 50),
        steps_per_second=(len(leader) - 1) / seconds,
        lag=[
            (percentile(list(lag.values()), 50), max(lag.values(), default=float("nan")))
            for lag in lags
        ],
        push=(
            percentile(pushes_of(urls[:SICK], leader), 50),
            percentile(pushes_of(urls[SICK:], leader), 50),
        ),
        slowest_push=percentile(pushes_of(urls[:SICK], leader), 99),
        latency=1e3 * percentile(latencies, 50),
        pushes_per_second=sum(at >= begin for at, _, _ in confirmed) / seconds,
        failures=len(results[0]["lost"]),
    )


def lags_of(
    url: str,
    published: dict[int, float],
    confirmed: list[tuple[float, str, int]],
    lost: list[tuple[float, str, str]],
) -> dict[int, int]:
    """Returns how many versions a server is behind when each version is published.

    Versions that are published while the server is lost are left out.
    """
    news = [(at, version) for at, u, version in confirmed if u == url]
    news = sorted(news + [(at, None) for at, u, _ in lost if u == url], key=lambda n: n[0])
    lags = {}
    for version, at in published.items():
        state = next((v for when, v in reversed(news) if when <= at), None)
        if state is not None:
            lags[version] = version - state
    return lags


def pushes_of(urls: list[str], records: list[dict[str, Any]]) -> list[float]:
    """Returns the milliseconds of each push to these servers.

    A push is counted once, although later records repeat the last push to a server.
    """
    pushes = {
        (url, version): 1e3 * seconds
        for record in records
        for url, (version, seconds) in record["push_seconds"].items()
        if url in urls and version > WARM_UP
    }
    return list(pushes.values())


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")


# -- bounds -----------------------------------------------------------------------------


@dataclass
class Verdicts:
    """Bounds, each with the measured value and whether it holds."""

    lines: list[tuple[bool, str]] = field(default_factory=list)

    def check(self, what: str, value: float, bound: float, *, at_least: bool = False) -> None:
        ok = value >= bound if at_least else value <= bound
        sign = ">=" if at_least else "<="
        self.lines.append((ok, f"{what}: {value:.3g}, must be {sign} {bound:.3g}"))

    @property
    def ok(self) -> bool:
        return bool(self.lines) and all(ok for ok, _ in self.lines)


def judge(outcomes: dict[str, Outcome]) -> Verdicts:
    """Checks every bound for which both sides were measured."""
    verdicts = Verdicts()
    for name, outcome in outcomes.items():
        size, fault, mode = name.split("/")
        if mode == "foreground":
            continue
        limit = max(ASYNC_SHARE * outcome.step, ASYNC_FLOOR_MS)
        noise = (
            f"(no queue {outcome.undisturbed:.3g}, floor {outcome.floor:.3g}, "
            f"stolen {outcome.stolen:.1f} %)"
        )
        verdicts.check(f"{name} stall p99 ms {noise}", outcome.stall[1], limit)
        foreground = outcomes.get(f"{size}/slow/foreground")
        if fault == "slow" and foreground is not None:
            ratio = outcome.steps_per_second / foreground.steps_per_second
            verdicts.check(
                f"{size} slow: throughput relative to the foreground mode",
                ratio,
                THROUGHPUT_FACTOR,
                at_least=True,
            )
        healthy = outcomes.get(f"{size}/healthy/async")
        if healthy is None:
            continue
        if fault in ("stopped", "killed"):
            p99 = healthy.stall[1]
            limit = max(FAULT_FACTOR * p99, p99 + FAULT_SLACK_MS)
            verdicts.check(
                f"{name} stall p99 ms compared with the healthy condition", outcome.stall[1], limit
            )
        if healthy.slowest_push < healthy.step:
            lag = max(largest for _, largest in outcome.lag[:SICK])
            verdicts.check(f"{name} lag of healthy servers", lag, 1)
    return verdicts


def figures_of(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, o in outcomes.items():
        figures |= {
            f"{name}/stall_p50_ms": o.stall[0],
            f"{name}/stall_p99_ms": o.stall[1],
            f"{name}/stall_max_ms": o.stall[2],
            f"{name}/waited_for_core_p99_ms": o.queued,
            f"{name}/stall_without_that_p99_ms": o.undisturbed,
            f"{name}/floor_p99_ms": o.floor,
            f"{name}/stolen_percent": o.stolen,
            f"{name}/attested_p50_ms": o.attested,
            f"{name}/step_p50_ms": o.step,
            f"{name}/steps_per_second": o.steps_per_second,
            f"{name}/push_healthy_p50_ms": o.push[0],
            f"{name}/push_sick_p50_ms": o.push[1],
            f"{name}/publish_to_confirmed_p50_ms": o.latency,
            f"{name}/pushes_per_second": o.pushes_per_second,
            f"{name}/failures": o.failures,
            f"{name}/push_healthy_p99_ms": o.slowest_push,
        }
        for index, (p50, largest) in enumerate(o.lag):
            figures[f"{name}/lag_p50/{index}"], figures[f"{name}/lag_max/{index}"] = p50, largest
        for part, (p99, largest) in o.parts.items():
            figures[f"{name}/{part}/p99_ms"], figures[f"{name}/{part}/max_ms"] = p99, largest
    # JSON has no NaN.
    return {key: value if np.isfinite(value) else None for key, value in figures.items()}


# -- the table ------------------------------------------------------------------------------

HEADER = (
    f"{'condition':26}{'stall ms p50':>13}{'p99':>11}{'max':>11}{'no queue':>11}{'floor':>9}"
    f"{'stolen %':>9}{'attested':>10}"
    f"{'step ms':>9}{'steps/s':>9}"
    f"{'lag p50/max of each server':>30}{'push ms':>9}{'p99':>9}{'sick':>9}{'pushes/s':>9}{'lost':>5}"
    "  wire"
)


def row(name: str, wire: str, o: Outcome) -> str:
    lags = " ".join(f"{p50:.0f}/{largest:.0f}" for p50, largest in o.lag)
    worst = max(o.parts, key=lambda part: o.parts[part][0])
    attested = (
        f"{o.attested:.1f}" if np.isfinite(o.attested) else "-"
    )  # a short run has no such step
    return (
        f"{name:26}{o.stall[0]:13.3f}{o.stall[1]:11.3f}{o.stall[2]:11.2f}"
        f"{o.undisturbed:11.3f}{o.floor:9.3f}{o.stolen:9.1f}{attested:>10}{o.step:9.1f}"
        f"{o.steps_per_second:9.2f}{lags:>30}{o.push[0]:9.1f}{o.slowest_push:9.1f}{o.push[1]:9.1f}"
        f"{o.pushes_per_second:9.1f}{o.failures:5}  {wire}"
        f"  (longest part: {worst} p99 {o.parts[worst][0]:.2f} ms)"
    )
