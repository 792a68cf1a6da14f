# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo evaluate X.toml``: the evaluation of a run, without training.

Launched servers load the named weights; servers at ``inference.urls`` keep the weights that they have.
"""

import argparse
import asyncio
import os
import signal
import sys
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.grpo.commands.json_result import Parser
from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.cluster import count_servers, server_groups
from torchtitan.grpo.config.evaluation import evaluation_sets
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import check_model, load_config
from torchtitan.grpo.config_checks.rules import require
from torchtitan.grpo.controller import process_config
from torchtitan.grpo.inference.local_servers import set_random_keys
from torchtitan.grpo.inference.urls import named_urls
from torchtitan.grpo.models.hf_config import HFModel, ModelError, read_hf_model
from torchtitan.grpo.models.hf_weights import write_hf
from torchtitan.grpo.models.hub import locate_models
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.observe.console import Progress
from torchtitan.grpo.observe.evaluation_records import evaluation_metrics, sample_records
from torchtitan.grpo.resume.checkpoint_files import METADATA_FILE, quick_problem, whole_steps
from torchtitan.grpo.rollout import link_messages
from torchtitan.grpo.rollout.process import first_cause, result_of
from torchtitan.grpo.rollout.results import EvaluationResult
from torchtitan.grpo.rollout.session import EvaluationSession
from torchtitan.grpo.run_folder.folder import hold
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.child import end_marked
from torchtitan.grpo.system.cores import share_cores
from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.system.disk_failures import disk_failure
from torchtitan.grpo.system.environment import RUN_VARIABLE
from torchtitan.grpo.system.errors import RunError, RunFailed
from torchtitan.grpo.system.files import damaged_files
from torchtitan.grpo.system.folder_lock import HeldFolders
from torchtitan.grpo.system.process_tuning import require_open_files
from torchtitan.grpo.system.stop import stop_signals
from torchtitan.grpo.system.strict_json import Found
from torchtitan.grpo.training.model_spec import build_without_memory, check_weights
from torchtitan.grpo.types import PromptProgress
from torchtitan.grpo.weight_wire.model_folder import require_undamaged

FOLDER = "evaluate"
"""Folder in the dump folder with one folder for each evaluated set of weights."""
RESULT_FILE = "evaluation.json"
SAMPLES_FILE = "evaluation_samples.jsonl"
_STOPPED = 128 + signal.SIGINT
_TABLE_COLUMNS = 1000


@dataclass(frozen=True)
class Subject:
    """The weights that are evaluated.

    ``model`` describes their directory, or gives only the tokenizer if servers already have the weights.
    """

    model: HFModel
    described: str


def options() -> Parser:
    parser = Parser("torchtitan-grpo evaluate", allow_abbrev=False)
    parser.add_argument("--model", help="Hugging Face directory, or name on the Hub, to evaluate")
    parser.add_argument(
        "--checkpoint", help="checkpoint of the run to evaluate: a step, newest, or a folder"
    )
    parser.add_argument("--output", type=Path, help="where the JSON with the result is written")
    return parser


def evaluate(given: argparse.Namespace, arguments: Sequence[str], found: Found) -> int:
    """Evaluates a run with the ``arguments`` of its ranks; returns the exit status, or raises RunError."""
    config = load_config(list(arguments))
    require_open_files()
    held: HeldFolders | None = None
    try:
        _check(config, given)
        model, name = _named(config, given)
        folder = Path(config.job.dump_folder) / FOLDER / name
        held = hold(config, folder)
        return _evaluate(config, given, _subject(config, given, model, folder), folder, found)
    finally:
        if held is not None:
            held.close()


def _evaluate(
    config: JobConfig, given: argparse.Namespace, subject: Subject, folder: Path, found: Found
) -> int:
    check_model(config, subject.model)
    print(f"Evaluating {subject.described}.", file=sys.stderr, flush=True)
    set_random_keys(config.inference, os.environ)
    try:
        result, servers = asyncio.run(_run(_session_config(config, subject.model, folder)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        found["error"] = "The evaluation was stopped."
        print(found["error"], file=sys.stderr)
        return _STOPPED
    except (BaseExceptionGroup, RunError, ValueError, RuntimeError, TimeoutError) as error:
        cause = first_cause(error)
        if not isinstance(cause, RunError | ValueError | RuntimeError | TimeoutError):
            raise
        raise RunFailed(str(cause), 1) from error
    print_table(result)  # before it is written: the disk may be full
    target = given.output or folder / RESULT_FILE
    found |= (record := _record(config, subject, result, servers))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(strict_json.dumps(record, indent=2) + "\n")
        with (folder / SAMPLES_FILE).open("w", encoding="utf-8") as file:
            file.writelines(
                strict_json.dumps(sample, ensure_ascii=False) + "\n"
                for sample in sample_records(result)
            )
    except OSError as error:
        message = disk_failure(error, str(target)) or f"{target} cannot be written: {error}."
        raise RunFailed(message, 1) from error
    found |= {"result_file": str(target), "samples_file": str(folder / SAMPLES_FILE)}
    print(f"The result is in {target}, completions in {folder / SAMPLES_FILE}.")
    return 0


def print_table(result: EvaluationResult) -> None:
    """Prints the scores at full width; by default rich cuts words on a narrow terminal and in a file."""
    ks = sorted({k for of_set in result.sets for k in of_set.pass_at})
    table = Table(box=None, pad_edge=False)
    table.add_column("set")
    table.add_column("function")
    for name in ("score", *(f"pass@{k}" for k in ks), "tokens", "longest", "cut", "prompts", "n"):
        table.add_column(name, justify="right")
    for of_set in result.sets:
        passed = [of_set.pass_at.get(k) for k in ks]
        table.add_row(
            of_set.name,
            of_set.function,
            f"{of_set.score:.4f}",
            *("" if value is None else f"{value:.4f}" for value in passed),
            f"{of_set.length_mean:.1f}",
            str(of_set.length_max),
            f"{of_set.cut_fraction:.1%}",
            str(of_set.num_prompts),
            f"{of_set.num_completions / of_set.num_prompts:.3g}",
        )
    Console(width=_TABLE_COLUMNS).print(table)


def _check(config: JobConfig, given: argparse.Namespace) -> None:
    require(
        bool(evaluation_sets(config.evaluation)),
        "evaluation.path must name held-out prompts, or evaluation.sets several sets of them, got "
        "nothing to evaluate.",
    )
    require(
        not (given.model and given.checkpoint),
        f"--model and --checkpoint name different weights, got {given.model} and "
        f"{given.checkpoint}. Give one of them.",
    )
    require(
        not (given.checkpoint and config.lora.rank),
        f"--checkpoint cannot be used with lora.rank above 0, got {config.lora.rank}: checkpoints "
        "hold adapters alone. Evaluate an export: --model <job.dump_folder>/hf/step-N (the last "
        "step is always exported, others with grpo.hf_export_interval).",
    )
    named = given.model or given.checkpoint
    require(
        not named or config.inference.launch,
        f"{'--model' if given.model else '--checkpoint'} {named} needs inference.launch = true: "
        "servers that run already are evaluated with the weights that they serve. Start servers "
        "on these weights, or let this command launch them (--inference.launch).",
    )


def _named(config: JobConfig, given: argparse.Namespace) -> tuple[HFModel, str]:
    """Returns the model named by ``--model`` or the configuration, and the folder name of its results."""
    if given.model:
        config.model.hf_assets_path = given.model
    for note in locate_models(config):
        print(note, file=sys.stderr)
    # Servers of other kinds can serve quantized weights, and nothing else reads them here.
    reads_itself = config.inference.launch and config.inference.kind == "embedded"
    model = read_hf_model(
        config.model.hf_assets_path, may_be_quantised=not (reads_itself or given.checkpoint)
    )
    if reads_itself and not given.checkpoint:
        for note in check_weights(config, model, is_trained=False)[1]:
            print(f"warning: {note}", file=sys.stderr)
    if given.checkpoint:
        return model, find_checkpoint(config, given.checkpoint).name
    return model, f"model-{model.path.name}" if config.inference.launch else "servers"


def _subject(config: JobConfig, given: argparse.Namespace, model: HFModel, folder: Path) -> Subject:
    if given.checkpoint:
        checkpoint, target = find_checkpoint(config, given.checkpoint), folder / "model"
        export_checkpoint(config, model, checkpoint, target)
        return Subject(read_hf_model(str(target)), f"the checkpoint {checkpoint}")
    if not config.inference.launch:
        urls = ", ".join(named_urls(config.inference)) or "that register themselves"
        return Subject(model, f"what the servers {urls} serve")
    require_undamaged(
        model.path, "--model" if given.model else "model.hf_assets_path", weights=True
    )
    return Subject(model, f"the model in {model.path}")


def _session_config(config: JobConfig, model: HFModel, folder: Path) -> RolloutProcessConfig:
    # No rank trains here, so servers may have every GPU, and nothing is lent.
    number = count_servers(server_groups(config)) or config.inference.num_servers
    inference = replace(config.inference, num_servers=number, lend=False)
    config = replace(config, inference=inference, cluster={})
    return replace(
        process_config(config, model, 0, PromptProgress(), ""),
        dump_folder=str(folder),
        saved_rollouts=None,
        monitor_host="",
        num_training_gpus=0,
    )


async def _run(config: RolloutProcessConfig) -> tuple[EvaluationResult, list[str]]:
    progress = Progress("auto", 0)

    async def show_start(line: str, done: int, wanted: int) -> None:
        progress.wait(line, done, wanted)

    async def show(message: link_messages.Progress) -> None:
        await show_start(message.line, message.done, message.wanted)

    def announce(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    session = EvaluationSession(config, announce, show_start)

    working = asyncio.current_task()
    assert working is not None
    # What was started must end with the command, also if a scheduler or a closed terminal ends it.
    for signum in stop_signals():
        asyncio.get_running_loop().add_signal_handler(signum, working.cancel)
    mark = os.environ[RUN_VARIABLE] = uuid.uuid4().hex
    if config.inference.launch:
        share_cores(config.inference.num_servers)
    try:
        await session.open()
        assert session.evaluator is not None, "there are sets to evaluate"
        work, evaluator = session.evaluate(), session.evaluator
        result = await result_of(work, "evaluation", evaluator, session.dispatcher, show)
        return result, [server.url for server in session.fleet.servers]
    finally:
        progress.close()
        await session.close()
        end_marked(mark)  # what rewards have started and left behind


def _record(
    config: JobConfig, subject: Subject, result: EvaluationResult, servers: Sequence[str]
) -> dict[str, Any]:
    settings = evaluation_sets(config.evaluation)
    return {
        "evaluated": subject.described,
        "model": str(subject.model.path),
        "servers": list(servers),
        "version": result.version,
        **evaluation_metrics(result),
        "num_prompts": result.num_prompts,
        "sets": {name: asdict(of_set) for name, of_set in settings.items()},
    }


def find_checkpoint(config: JobConfig, named: str) -> Path:
    """Returns a checkpoint's folder, checked for damage; ``named`` is ``newest``, a step, or a folder."""
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    if named == "newest" or named.isdecimal():
        steps = whole_steps(folder)
        step = int(named) if named.isdecimal() else max(steps, default=None)
        if step not in steps:
            listed = ", ".join(map(str, steps)) or "none"
            raise ModelError(
                f"--checkpoint must name a checkpoint of the run in job.dump_folder, got {named}. "
                f"{folder} holds whole checkpoints of the steps: {listed}."
            )
        found = folder / f"step-{step}"
    else:
        found = Path(named)
    if not (found / METADATA_FILE).is_file():
        raise ModelError(
            f"--checkpoint must be a checkpoint folder with a {METADATA_FILE}, which is written when "
            f"it is whole, or a step, or newest, got {named}. --model takes a Hugging Face directory."
        )
    problem = quick_problem(found)
    damaged = [problem] if problem else list(damaged_files(found))
    if damaged:
        raise ModelError(f"The checkpoint {found} is damaged: {'; '.join(damaged[:3])}.")
    return found


def export_checkpoint(config: JobConfig, model: HFModel, folder: Path, target: Path) -> None:
    """Writes a checkpoint's model as a Hugging Face directory, in ``export_dtype``.

    The model must fit into host memory. ``model`` gives config and tokenizer; its arguments are modified.
    """
    dtype = TORCH_DTYPE_MAP[config.checkpoint.export_dtype]
    built, adapter_of = build_without_memory(config, model)
    state = {
        name: torch.empty(parameter.shape, dtype=dtype)
        for name, parameter in named_parameters([built])
    }
    try:
        with warnings.catch_warnings():
            # It warns that it loads in a single process, which is what is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    except (CheckpointException, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"The checkpoint {folder} must hold the model of model.hf_assets_path ({model.path}): "
            f"{str(error).strip()[-300:]}"
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    adapter = adapter_of(str(model.path))
    tensors = (item for name in state for item in adapter.to_hf({name: state[name]}).items())
    write_hf(tensors, model.path, target, dtype)
