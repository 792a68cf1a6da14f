# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the inputs of a run by opening everything that the rollout process would, except servers.

The check is a process of its own, with the same environment as the rollout process, so that it can be
killed if it takes too long. Its argument is a private directory that contains `config.json` and receives
`report.json`.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.evaluation import EvaluationSet, evaluation_sets, set_key
from torchtitan.grpo.rollout.agents.writer import Agents
from torchtitan.grpo.rollout.environments.program import Environments
from torchtitan.grpo.rollout.inputs import EnvironmentInputs, Inputs
from torchtitan.grpo.rollout.link_messages import CONFIG_FILE
from torchtitan.grpo.rollout.session import RolloutSession
from torchtitan.grpo.system.child import adopt_orphans, end_descendants
from torchtitan.grpo.system.files import write_whole
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.owner import OUTPUT_HINT

REPORT_FILE = "report.json"
PROGRESS_FILE = "progress.txt"
"""Progress of a long check, as a sentence."""


class InputReport(msgspec.Struct):
    """The findings. ``lines`` say what was opened, and ``error`` is the error that would end the run."""

    lines: list[str] = []
    warnings: list[str] = []
    error: str | None = None


async def check(config: RolloutProcessConfig, say: Callable[[str], object]) -> InputReport:
    """Opens and closes the inputs of a run. ``say`` is called with the progress of long checks."""
    announced: list[str] = []
    session = RolloutSession(config, announced.append, say)
    try:
        await session.open_inputs()
        lines = describe_inputs(config, session.inputs)
        return InputReport(lines, [*announced, *session.inputs.warnings])
    except (ValueError, RuntimeError, TimeoutError) as error:
        message = str(error).replace(OUTPUT_HINT, "").strip()
        return InputReport(warnings=[*announced, *session.inputs.warnings], error=message)
    finally:
        await session.close()


def describe_inputs(config: RolloutProcessConfig, inputs: Inputs) -> list[str]:
    lines = [*_model_lines(config, inputs)]
    for one in inputs.environments.values():
        lines += [*_prompt_lines(one, inputs), *_reward_lines(one)]
    return [*lines, *_evaluation_lines(config, inputs)]


def _model_lines(config: RolloutProcessConfig, inputs: Inputs) -> Iterator[str]:
    codec = inputs.codec
    ends = [f"{token} {codec.token_text(token)!r}" for token in config.eos_token_ids]
    yield (
        f"tokenizer: {config.hf_assets_path}, largest token {codec.largest_id}, the model's "
        f"vocab_size {config.vocab_size}"
    )
    yield f"a completion ends at: {', '.join(ends) or 'no token'}"
    if not codec.has_chat_template():
        yield "chat template: none"
    elif any(one.is_chat for one in inputs.environments.values()):
        yield f"chat template: applied, with {config.prompts.chat_template_kwargs or 'no variables'}"
    elif config.prompts.template:
        yield "chat template: not applied, because prompts.template gives the whole text of a prompt"
    else:
        yield (
            "chat template: not applied, because the prompts are strings. A model that was trained "
            "for chat expects it: make the prompts lists of messages"
        )


def _prompt_lines(one: EnvironmentInputs, inputs: Inputs) -> Iterator[str]:
    stream = inputs.stream
    assert stream is not None, "the inputs of a run are open"
    sets = [prompts for prompts in stream.sets if prompts.environment == one.name]
    for prompts, of_set in zip(sets, one.examples, strict=True):
        first = of_set[0]
        most = prompts.limits.max_tokens
        yield f"{prompts.key}: {prompts.path}, {len(prompts)} rows, prompts of at most {most} tokens"
        columns = [f"{one.config.prompts.column} (the prompt)", *sorted(first.columns)]
        yield f"  columns: {', '.join(columns)}"
        if prompts.checked is not None:
            yield f"  {prompts.checked.describe()}"
        yield from _first_prompt(first, inputs)


def _first_prompt(prompt: Prompt, inputs: Inputs) -> Iterator[str]:
    shown = inputs.codec.excerpt(prompt.token_ids.tolist())
    kind = "string" if isinstance(prompt.text, str) else "chat messages"
    yield f"  first prompt ({prompt.row}): {kind}, {len(prompt.token_ids)} tokens: {shown}"


def _reward_lines(one: EnvironmentInputs) -> Iterator[str]:
    config = one.config
    players = one.players
    if isinstance(players, Environments):
        stop_strings = players.stop_strings
        ends = f", turns end at {stop_strings}" if stop_strings else ""
        yield f"{one.key('rollout.environment')}: {config.rollout.environment}{ends}"
    if isinstance(players, Agents):
        program = config.agent.function or " ".join(config.agent.command)
        url = players.endpoint.url
        yield f"{one.key('agent')}: {program}, which reaches the model at {url}"
    weights = config.reward.weights or [1.0] * len(config.reward.functions)
    for position, function in enumerate(config.reward.functions):
        values = [of_set[position] for of_set in one.rewards]
        yield (
            f"{one.key('reward.functions')}: {function}, weight {weights[position]:g}; an empty "
            f"completion of the first prompt earns {_numbers(values)}"
        )
    if config.rollout.should_accept is not None:
        yield f"{one.key('rollout.should_accept')}: {config.rollout.should_accept}"


def _evaluation_lines(config: RolloutProcessConfig, inputs: Inputs) -> Iterator[str]:
    if not inputs.held_out:
        yield "evaluation: none (evaluation.path and evaluation.sets are not set)"
        return
    for name, settings in evaluation_sets(config.evaluation).items():
        prompts = inputs.held_out[name]
        yield (
            f"{set_key(config.evaluation, name, 'path')}: {settings.path}, {len(prompts)} prompts "
            f"used; {settings.function} gives an empty completion {_numbers([inputs.scores[name]])}"
        )
        if settings.environment is not None:
            yield f"  with the settings of environments.{settings.environment}"
        yield f"  {_sampling(settings)}"
        yield from _first_prompt(prompts[0], inputs)


def _sampling(settings: EvaluationSet) -> str:
    if settings.temperature == 0:
        return "one completion of each prompt, decoded greedily"
    return (
        f"{settings.num_samples} completions of each prompt, sampled at temperature "
        f"{settings.temperature:g}, top_p {settings.top_p:g}"
    )


def _numbers(values: list[float | None]) -> str:
    return ", ".join("no reward" if value is None else f"{value:g}" for value in values)


def main() -> NoReturn:
    """Entry point: ``light_start.py torchtitan.grpo.rollout.input_check DIRECTORY``."""
    logging.basicConfig(level=logging.ERROR)
    folder = Path(sys.argv[1])
    config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=RolloutProcessConfig)
    adopt_orphans()
    report = asyncio.run(check(config, (folder / PROGRESS_FILE).write_text))
    end_descendants()
    write_whole(folder / REPORT_FILE, msgspec.json.encode(report))
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that still reads a data set must not delay the end.
    os._exit(0)


if __name__ == "__main__":
    main()
