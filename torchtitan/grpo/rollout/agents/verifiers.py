# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs environments of the `verifiers` package from 0.4 on (https://github.com/PrimeIntellect-ai/verifiers).

    pip install "verifiers>=0.4"
    python -m torchtitan.grpo.rollout.agents.verifiers '{"taskset": {"id": "my-taskset"}}' prompts.jsonl

    [agent]
    function = "verifiers"
    options = { taskset = { id = "my-taskset" } }

The second command writes the tasks to a file for ``prompts.path``. The options are those of the
package's ``[env]`` table. The harness of an environment sends its requests to the run's endpoint. The
reward of an episode is the sum of the environment's rewards.
"""

import argparse
import importlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

from torchtitan.grpo.system import strict_json

INSTALL = 'pip install "verifiers>=0.4"'
_numbers = itertools.count()


async def run(client: Any, row: dict[str, Any], **options: Any) -> float:
    """Plays one task and returns its reward. Raises RuntimeError if the environment or its harness failed."""
    clients = _module("clients")
    environment = _load(options)
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate(row["task"]), environment.taskset.config.task)
    # Its clients read their key from a variable, which therefore must be of this episode.
    variable = f"GRPO_EPISODE_KEY_{next(_numbers)}"
    os.environ[variable] = client.api_key
    try:
        server = clients.EvalClientConfig(base_url=str(client.base_url), api_key_var=variable)
        context = clients.ModelContext(model="policy", client=server)
        async with environment.serving():
            episode = await environment.run_episode(task, context)
    finally:
        del os.environ[variable]
    if not episode.ok:
        errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        raise RuntimeError(
            f"The environment failed: {errors[-1] if errors else 'no reason'!s:.1000}"
        )
    return sum(trace.reward for trace in episode.traces)


def _load(options: dict[str, Any]) -> Any:
    loaders = _module("utils.loaders")
    return loaders.load_environment(loaders.resolve_env_config(options))


def _module(name: str) -> Any:
    """Imports a module of the package, which is an optional dependency."""
    try:
        return importlib.import_module(f"verifiers.v1.{name}")
    except ImportError as error:
        raise ValueError(
            f'agent.function = "verifiers" needs the package verifiers from 0.4 on: run {INSTALL} in '
            f"the trainer's environment ({error})."
        ) from error


def write_prompts(options: dict[str, Any], path: Path, number: int | None = None) -> int:
    """Writes the tasks of an environment as prompts, and returns their number."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for task in itertools.islice(_load(options).taskset, number):
            row = {"prompt": task.data.prompt_text, "task": task.data.model_dump(mode="json")}
            file.write(strict_json.dumps(row) + "\n")
            count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description="Write an environment's tasks as prompts.")
    parser.add_argument("options", type=json.loads, help="agent.options, as JSON")
    parser.add_argument("output", type=Path, help="JSONL file for prompts.path")
    parser.add_argument("--number", type=int, help="of tasks, for tasksets without an end")
    arguments = parser.parse_args()
    count = write_prompts(arguments.options, arguments.output, arguments.number)
    print(f"{arguments.output}: {count} prompts")


if __name__ == "__main__":
    main()
