# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures the time saved by starting long answers first and spreading them over the servers.

    python benchmarks/dispatch_tail.py [--json] [--batches N] [--taught N]

Two embedded servers (`stub_server.py`) write batches of 40 groups of 4 completions through the
trainer's own dispatcher. Each server has room for 12 completions, and a decode step takes 5 ms for
any number of completions, as on a GPU. The lengths of the answers to a prompt are fixed in
advance: the words of the prompt choose a quantile of a Pareto distribution (shape 1.1, 16 to 448
tokens), and each answer differs from it by a log-normal factor (sigma 0.3). Every batch is written
twice, in alternating order: first come, first served, on servers with equal expected work, and
with ``rollout.longest_first``, using what the ranker has learned from other groups of the same
kind. The number of steps is that of the server that took more of them; in one step, a server
generates one token of each running completion. ``perfect`` is the number of steps that every order
needs at least: the length of the longest answer, or all tokens divided by all places.

The exit status is 1 if longest first takes more than 0.85 of the time of first come, first served
over all batches, or if the rank correlation of predicted and true lengths is below 0.5. With
``--json`` the last line is a JSON object.
"""

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
from boundary_stall import REPOSITORY
from figures import finish, make_parser
from stub_servers import running_stubs

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.inference.embedded.client import EmbeddedClient
from torchtitan.grpo.inference.http import HttpConnection
from torchtitan.grpo.inference.kinds import KINDS
from torchtitan.grpo.inference.local_servers import LaunchedServer
from torchtitan.grpo.rollout.longest_first import LengthRanker, LongestFirst
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt

NUM_SERVERS = 2
PLACES = 12
GROUP_SIZE = 4
PROMPTS = 40
NUM_WORDS = 60
WORDS_A_PROMPT = 12
SHORTEST, LONGEST, SHAPE, NOISE = 16, 448, 1.1, 0.3
DECODE_SECONDS = 0.005
RATIO_BOUND = 0.85
RANK_BOUND = 0.5
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Question:
    """A prompt and the lengths of its answers."""

    prompt: Prompt
    lengths: tuple[int, ...]


class Task:
    """Questions whose words decide how long their answers are."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._effects = self._rng.normal(0, 1 / np.sqrt(WORDS_A_PROMPT), NUM_WORDS)
        self._count = 0

    def question(self) -> Question:
        words = self._rng.choice(NUM_WORDS, WORDS_A_PROMPT)
        place = NormalDist().cdf(float(self._effects[words].sum()))
        mean = SHORTEST * (1 - place) ** (-1 / SHAPE)
        lengths = mean * np.exp(self._rng.normal(0, NOISE, GROUP_SIZE))
        self._count += 1
        # The first two ids of the vocabulary are not words.
        prompt = Prompt(self._count, "", (words + 2).astype(np.int32), {})
        return Question(prompt, tuple(np.clip(lengths, 1, LONGEST).astype(int).tolist()))


class PlannedClient(EmbeddedClient):
    """A client that makes the server write each completion with its planned length."""

    plan: dict[int, list[int]]

    async def generate(self, request: GenerateRequest) -> Generation:
        prompt_index = int(request.request_id.split("-")[1])
        num_tokens = self.plan[prompt_index].pop()
        written = await super().generate(
            replace(request, max_new_tokens=num_tokens, ignore_eos=True)
        )
        return replace(written, finish_reason="stop")  # the completion has its planned length


async def attested(clients: list[PlannedClient]) -> Dispatcher:
    """Returns a dispatcher whose servers serve version 0, as after the first push."""
    dispatcher = Dispatcher(
        clients,
        Rollout(
            request_timeout_seconds=TIMEOUT_SECONDS,
            max_consecutive_failures=1,
            max_concurrent_rollouts=NUM_SERVERS * PLACES,
        ),
        vocab_size=128,
        group_size=GROUP_SIZE,
    )
    for client in clients:
        await client._http.post(
            "/update_weight_version", {"new_version": "0", "abort_all_requests": False}
        )
        dispatcher.set_version(client.url, 0)
    return dispatcher


async def num_steps(client: PlannedClient) -> int:
    """Returns the number of steps that the server has made since its start."""
    return (await client._server_info())["num_steps"]


async def write_batch(
    clients: list[PlannedClient], questions: list[Question], ranker: LengthRanker | None
) -> np.ndarray:
    """Writes a batch, longest first if there is a ranker; returns the seconds and the steps."""
    dispatcher = await attested(clients)
    plan = {question.prompt.group_id: list(question.lengths) for question in questions}
    for client in clients:
        client.plan = plan
    room = asyncio.Event()
    dispatcher.listeners.append(room.set)
    order = LongestFirst(PROMPTS, ranker.predict if ranker else None)
    sampling = Sampling(LONGEST, LONGEST + 32, 1.0, 1.0, -1, (), ignore_eos=True)
    coming, tasks = iter(questions), []
    before = [await num_steps(client) for client in clients]
    start = time.perf_counter()
    for _ in questions:
        while (prompt := order.pop()) is None:
            order.push(next(coming).prompt)
        while True:
            room.clear()
            fits = dispatcher.in_flight + GROUP_SIZE <= NUM_SERVERS * PLACES
            if fits and (server := dispatcher.choose(lambda version: True)) is not None:
                break
            await room.wait()
        expected = ranker.predict(prompt) if ranker else None
        for _ in range(GROUP_SIZE):
            tasks.append(dispatcher.submit(prompt, server, sampling, expected_tokens=expected))
    await asyncio.gather(*tasks)
    seconds = time.perf_counter() - start
    steps = max([await num_steps(c) - n for c, n in zip(clients, before, strict=True)])
    await dispatcher.close()
    return np.array([seconds, steps])


def rank_correlation(ranker: LengthRanker, questions: list[Question]) -> float:
    """Returns Spearman's rank correlation of predicted and true mean lengths."""
    pairs = [
        (ranker.predict(question.prompt), float(np.mean(question.lengths)))
        for question in questions
    ]
    ranks = [np.argsort(np.argsort(values)) for values in zip(*pairs, strict=True)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def ideal_tokens(questions: list[Question]) -> float:
    """Returns the number of steps that a perfect order would need."""
    lengths = [length for question in questions for length in question.lengths]
    return max(max(lengths), sum(lengths) / (NUM_SERVERS * PLACES))


async def measure(
    servers: list[LaunchedServer], batches: list[list[Question]], ranker: LengthRanker
) -> dict[str, np.ndarray]:
    """Writes all batches in both orders, prints each, and returns their seconds and steps."""
    clients = [
        PlannedClient(
            HttpConnection(server.url, api_key=None, admin_key=None, timeout_seconds=30.0),
            KINDS["embedded"].capabilities,
            request_timeout_seconds=TIMEOUT_SECONDS,
        )
        for server in servers
    ]
    await write_batch(clients, batches[0][:8], None)  # warms up memory and code
    totals = {"first_come": np.zeros(2), "longest_first": np.zeros(2)}
    print("batch  tokens longest perfect |  first come, steps | longest first, steps")
    for number, questions in enumerate(batches):
        taken = {}
        for name in list(totals) if number % 2 == 0 else list(totals)[::-1]:
            used = ranker if name == "longest_first" else None
            taken[name] = await write_batch(clients, questions, used)
            totals[name] += taken[name]
        lengths = [length for question in questions for length in question.lengths]
        columns = [f"{taken[name][0]:10.2f} s {taken[name][1]:7.0f}" for name in totals]
        print(
            f"{number:5} {sum(lengths):7} {max(lengths):7} {ideal_tokens(questions):7.0f} | "
            + " | ".join(columns),
            flush=True,
        )
    for client in clients:
        await client.close()
    return totals


def measure_tail(num_batches: int, taught: int, seed: int) -> tuple[dict[str, float], bool]:
    """Runs the benchmark, prints its table, and returns figures and whether the bounds hold.

    Args:
        num_batches: Number of batches that are written.
        taught: Number of groups that the ranker has observed before.
        seed: Seed of the lengths.
    """
    task = Task(seed)
    ranker = LengthRanker(first_guess=LONGEST)
    for _ in range(taught):
        question = task.question()
        ranker.observe(question.prompt, question.lengths)
    batches = [[task.question() for _ in range(PROMPTS)] for _ in range(num_batches)]
    correlation = rank_correlation(ranker, [q for questions in batches for q in questions])
    with (
        tempfile.TemporaryDirectory() as folder,
        running_stubs(
            NUM_SERVERS,
            REPOSITORY / "assets/reverse_digits/model",
            Path(folder),
            decode_seconds=DECODE_SECONDS,
            mean_tokens=LONGEST,
            max_model_len=LONGEST + 32,
            max_running_requests=PLACES,
        ) as servers,
    ):
        totals = asyncio.run(measure(servers, batches, ranker))
    ratio = totals["longest_first"] / totals["first_come"]
    figures = {
        "first_come_seconds": float(totals["first_come"][0]),
        "longest_first_seconds": float(totals["longest_first"][0]),
        "ratio_of_seconds": float(ratio[0]),
        "ratio_of_steps": float(ratio[1]),
        "perfect_over_first_come_steps": float(
            sum(ideal_tokens(questions) for questions in batches) / totals["first_come"][1]
        ),
        "rank_correlation": correlation,
        "skill": ranker.skill,
    }
    print()
    for name, value in figures.items():
        print(f"{name:30} {value:.3f}")
    ok = figures["ratio_of_seconds"] <= RATIO_BOUND and correlation >= RANK_BOUND
    print(
        f"{'ok  ' if ok else 'FAIL'} ratio_of_seconds must be <= {RATIO_BOUND}, and "
        f"rank_correlation must be >= {RANK_BOUND}"
    )
    return figures, ok


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument(
        "--taught", type=int, default=400, help="number of groups that the ranker learns from"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures, ok = measure_tail(options.batches, options.taught, options.seed)
    return finish(options, "dispatch_tail", ok, figures)


if __name__ == "__main__":
    sys.exit(main())
