# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The table ``[agent]``."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class Agent:
    """``[agent]``: programs that call the model themselves, over OpenAI's API.

    Each completion is an episode of the program, which the rollout process serves at
    ``OPENAI_BASE_URL``. docs/how-to/agents.md shows how to train one.
    """

    command: list[str] = field(default_factory=list)
    """Experimental: Program and arguments of an agent, of which one process is started for each
    episode. At most one for each core starts at the same time, until its first request or for
    30 s. It reads the prompt's row as JSON from its standard input. If the last line of its
    output is a number, or a JSON object with ``reward``, this is the episode's reward
    (``reward.functions = ["agent"]``)."""

    function: str | None = None
    """An agent as a function, ``async def run(client, row)``, named ``package.module:run`` or
    ``path/to/file.py:run``, or ``verifiers`` for environments of that package. ``client`` is an ``openai.AsyncOpenAI`` of the episode, and ``row`` a
    dictionary. What it returns is the episode's reward: a number, a dictionary with ``reward``, or
    None."""

    options: dict[str, Any] = field(default_factory=dict)
    """Experimental: Keyword arguments with which ``function`` is called, besides ``client`` and
    ``row``."""

    workers: Annotated[int, at_least(1)] = 1
    """Number of processes that run ``function``. Each process runs many episodes at the same
    time. Measured by ``benchmarks/agent_load.py``."""

    timeout_seconds: Annotated[float, above(0)] = 300.0
    """Experimental: Maximum time that an episode takes from its first request on, not counting
    the time in which it waits for the model. After this time, the program is ended and the
    completion counts as failed. The first request must come within the same time; that of a
    ``command``, within 300 s or more."""

    allow_sampling: bool = False
    """Experimental: Whether a request's own ``temperature``, ``top_p``, ``top_k`` and ``seed``
    are used. Tokens that were sampled with other settings than those of ``[rollout]`` are
    context and not trained. With False, the settings of ``[rollout]`` are used for all
    requests."""

    host: str = "127.0.0.1"
    """Experimental: Address on which the rollout process serves its agents. Programs in other
    network namespaces, such as containers, need an address that they can reach."""

    @property
    def is_used(self) -> bool:
        return bool(self.command) or self.function is not None
