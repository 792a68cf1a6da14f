# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``--dry-run`` and ``check-config``: opens all that a run would open, and reports what it finds.

The check leaves no process behind, and writes nothing into ``job.dump_folder``.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.cluster import count_servers, server_groups
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import ConfigError, warnings_of
from torchtitan.grpo.config_checks.layout import describe_layout, layout_degrees
from torchtitan.grpo.controller import process_config, server_dtype
from torchtitan.grpo.data.planner import StepPlanner
from torchtitan.grpo.data.record import RecordReader
from torchtitan.grpo.data.supervised import ExampleStream
from torchtitan.grpo.inference.registry import registry_folder
from torchtitan.grpo.inference.server_log import log_tail
from torchtitan.grpo.inference.urls import named_urls
from torchtitan.grpo.models.attention_choice import choose_packed_attention
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.rollout.child_process import end_process, start_process
from torchtitan.grpo.rollout.input_check import PROGRESS_FILE, REPORT_FILE, InputReport
from torchtitan.grpo.rollout.link_messages import CONFIG_FILE
from torchtitan.grpo.run_folder.start_record import changed_settings, describe_settings
from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.strict_json import Found
from torchtitan.grpo.training.lent_memory import describe_lent_memory
from torchtitan.grpo.training.memory_choice import describe_memory
from torchtitan.grpo.training.model_spec import (
    build_without_memory,
    check_weights,
    parameter_shapes,
)
from torchtitan.grpo.types import PromptProgress
from torchtitan.grpo.weight_sync.memory_plan import describe_placement, predict_memory
from torchtitan.grpo.weight_wire.model_folder import WeightsAbsent

_OUTPUT_FILE = "output.log"
_PROGRESS_SECONDS = 1.0
_SHOWN_OUTPUT_LINES = 20
_OWN_FRAMES = re.compile(
    rf'^  File "{re.escape(str(Path(__file__).parents[1]))}/.*\n(?:    .*\n)*', re.M
)


def dry_run(
    config: JobConfig,
    model: HFModel,
    start: Sequence[str],
    found: Found,
    date: str = "",
    *,
    shows_settings: bool = False,
) -> Iterator[str]:
    """Yields findings and warnings about what the run would read, and then the layout of its ranks.

    This fills ``found``, and may change the model's arguments. An empty ``date`` means now. Raises ConfigError
    for bad prompts, rewards or environments, DataError for bad files of ``grpo.ptx_path``,
    ``rollout.replay`` or ``[sft]``, and ModelError if the weights are those of another model.
    """
    inputs, warnings = found["inputs"], found["warnings"] = [], []
    found |= {"start": list(start), "settings": changed_settings(config)}
    yield "Start"
    yield from (f"  {line}" for line in start)
    yield "Inputs"
    try:
        for line in _inputs(config, model, date, warnings):
            inputs.append(line)
            yield f"  {line}"
    except RunError:
        yield from (f"warning: {warning}" for warning in warnings)
        raise
    yield from (f"warning: {warning}" for warning in warnings)
    found["layout"] = layout_degrees(config)
    yield describe_plan(config)
    yield from _memory(config, model, found.setdefault("memory", {}))
    if shows_settings:
        yield f"Settings\n{describe_settings(config)}"
    else:
        yield "Settings: --settings prints the value of each."


def _inputs(config: JobConfig, model: HFModel, date: str, warnings: list[str]) -> Iterator[str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attention = choose_packed_attention(config, device, model.model_args.head_dim)
    yield (
        f"model: {model.architecture} at {model.path}, on {device.upper()}, with {attention} "
        "attention of packed rows"
    )
    StepPlanner(config, model)  # opens grpo.ptx_path
    if config.sft.path is not None:
        yield from _examples(config, model, date, warnings)
    elif config.rollout.replay is not None:
        path, temperature = config.rollout.replay, config.rollout.temperature
        reader = RecordReader(path, model.vocab_size, temperature, "rollout.replay")
        yield f"rollout.replay: {path}, {sum(1 for _ in reader)} batches"
    else:
        report = check_inputs(
            process_config(config, model, 0, PromptProgress(), "", date),
            config.inference.startup_timeout_seconds,
        )
        yield from report.lines
        warnings += [*warnings_of(config), *report.warnings]
        if report.error is not None:
            raise ConfigError(report.error)
    yield f"weights: {_weights(config, model, warnings)}"


def _weights(config: JobConfig, model: HFModel, warnings: list[str]) -> str:
    try:
        num_tensors, notes = check_weights(config, model)
    except WeightsAbsent:
        if "snapshots" not in model.path.parts:
            raise
        return "not downloaded yet; the run will compare them with config.json"
    warnings += notes
    return f"{num_tensors} tensors in {model.path} with the names and shapes of the model"


def _examples(config: JobConfig, model: HFModel, date: str, warnings: list[str]) -> Iterator[str]:
    for key, path in (("path", config.sft.path), ("held_out_path", config.sft.held_out_path)):
        if path is None:
            continue
        stream = ExampleStream(config, model, path, f"sft.{key}", date=date)
        yield f"sft.{key}: {path}, {len(stream)} examples"
        yield f"  {stream.checked.describe()}"
        yield f"  {stream.describe_first()}"
        warnings += stream.notes()
        stream.close()


def _memory(config: JobConfig, model: HFModel, found: Found) -> Iterator[str]:
    yield "Memory of a training step, on the rank that holds the most (estimated)"
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    step, lent = found["step"], found["lent"] = {}, {}
    yield from (f"  {line}" for line in describe_memory(config, model, num_ranks, step))
    yield from (f"  {line}" for line in describe_lent_memory(config, model, num_ranks, lent))
    if not config.has_servers:
        return
    shapes = parameter_shapes(config, model)
    _, adapter_of = build_without_memory(config, model)
    num_servers = count_servers(server_groups(config)) or len(named_urls(config.inference))
    on_gpu = torch.cuda.is_available()
    memory = predict_memory(
        config,
        shapes,
        adapter_of(str(model.path)),
        num_servers,
        num_ranks=num_ranks,
        on_gpu=on_gpu,
    )
    found["push"] = {"version_bytes": memory.version, "host_bytes": memory.slots}
    yield "Memory of the weight push"
    num_layers: int = model.model_args.n_layers  # pyright: ignore[reportAttributeAccessIssue]
    yield from (f"  {line}" for line in describe_placement(config, num_layers))
    yield from (f"  {line}" for line in memory.describe(on_gpu=on_gpu))


def check_inputs(config: RolloutProcessConfig, timeout_seconds: float) -> InputReport:
    """Opens a run's inputs as the rollout process would, in a child process that the timeout ends."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-check-"))  # mode 0700: there may be keys
    try:
        (folder / CONFIG_FILE).write_text(json.dumps(config.to_dict(), allow_nan=False))
        child, mark = start_process(
            "torchtitan.grpo.rollout.input_check", folder, config, folder / _OUTPUT_FILE
        )
        try:
            _wait(child, folder / PROGRESS_FILE, timeout_seconds)
        finally:
            end_process(child, mark)
        return _read_report(folder, timeout_seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(child: subprocess.Popen, progress: Path, timeout_seconds: float) -> None:
    deadline, told = time.monotonic() + timeout_seconds, ""
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(min(_PROGRESS_SECONDS, max(deadline - time.monotonic(), 0.0)))
            return
        text = progress.read_text() if progress.is_file() else ""
        if text and text != told:
            told = text
            print(text, file=sys.stderr, flush=True)


def _read_report(folder: Path, timeout_seconds: float) -> InputReport:
    lines = _OWN_FRAMES.sub("", log_tail(folder / _OUTPUT_FILE)).splitlines()
    output = "\n".join(f"  {line}" for line in lines[-_SHOWN_OUTPUT_LINES:])
    said = f" Its output ends with:\n{output}" if output else ""
    file = folder / REPORT_FILE
    if not file.is_file():
        raise ConfigError(
            "Opening prompts, rewards and tokenizer did not come to an end within "
            f"{timeout_seconds:g} s (inference.startup_timeout_seconds), or its process died.{said}"
        )
    report = msgspec.json.decode(file.read_bytes(), type=InputReport)
    if report.error is not None and output:
        report.error = f"{report.error.removesuffix('.')}.{said}"
    return report


def describe_plan(config: JobConfig) -> str:
    num_prompts, size = config.grpo.prompts_per_step, config.grpo.group_size
    batch = f"{num_prompts} prompts x {size} rollouts = {num_prompts * size}"
    if config.sft.path is not None:
        batch = f"{config.sft.examples_per_step} examples"
    lines = [
        "Layout",
        f"  ranks: {describe_layout(config)}",
        f"  global batch: {batch}, packed into rows of {config.training.seq_len} tokens",
    ]
    if config.sft.path is None:
        staleness = config.rollout.max_head_offpolicyness
        lines.append(f"  staleness: at most {staleness} {'step' if staleness == 1 else 'steps'}")
    lines.append(f"  servers: {_describe_servers(config)}")
    if config.teacher.urls:
        teacher = config.teacher
        lines.append(
            f"  teacher: {teacher.kind} at {', '.join(teacher.urls)}, coef {teacher.coef:g}"
            + (f", top_k {teacher.top_k}" if teacher.top_k else "")
        )
    return "\n".join(lines)


def _describe_servers(config: JobConfig) -> str:
    if config.sft.path is not None:
        return f"none, the run is trained on the examples of {config.sft.path}"
    if config.rollout.replay is not None:
        return f"none, rollouts are replayed from {config.rollout.replay}"
    inference = config.inference
    if groups := server_groups(config):
        kind = inference.kind
        each = (f"{g.num_servers} x {kind}{' on lent devices' * g.is_lent}" for g in groups)
        return f"{' and '.join(each)}, launched on this machine, in {server_dtype(config)}"
    if folder := registry_folder(inference, config.job.dump_folder):
        return f"{inference.kind} servers that register themselves in {folder}"
    source = f" ({inference.urls_file})" if inference.urls_file else ""
    return f"{inference.kind} at {', '.join(named_urls(inference))}{source}"
