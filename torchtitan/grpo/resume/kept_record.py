# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The record of a run in its checkpoints, and how a resumed run treats settings that have changed.

A changed setting takes effect, unless the checkpoint's state depends on it: then the change is refused.
"""

import hashlib
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.grpo.config.environments import environments_of, own_settings, setting_of
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.run_folder.start_record import toml_value
from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.files import open_regular

STATE_KEY = "run_record"

_SAMPLE_BYTES = 65536


class CheckpointError(RunError, ValueError):
    """A run cannot start as asked from a checkpoint or in its folder; the message says why."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint cannot be read, or differs from what was written; ``reason`` says why in one line."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(
            f"A run must resume from a checkpoint that can be read, and {folder} cannot ({reason}). "
            "Its files are damaged, or were written by an incompatible release. Name an earlier "
            "step of that folder with --checkpoint.load_step, or remove the damaged checkpoint."
        )
        self.reason = reason


class RunRecord(msgspec.Struct):
    """Facts about the run that wrote a checkpoint. Later starts read them before they load any state.

    ``settings`` are keyed by table and name, with API keys masked. ``model_sizes`` are torchtitan's
    model arguments. ``weights`` is a digest of the weights with which the run began, or empty.
    ``schedule_steps`` is the length of the learning-rate schedule. ``date`` is the date of the run's
    first start, which chat templates use as the current date.
    """

    settings: dict[str, dict[str, Any]]
    num_ranks: int
    architecture: str
    model_sizes: dict[str, str]
    weights: str
    prompt_bytes: dict[str, int]
    schedule_steps: int
    date: str = ""


def record_of(config: JobConfig, model: HFModel, schedule_steps: int) -> RunRecord:
    """Returns the record of a run. Call it before a trainer is made: that changes the model."""
    owns = environments_of(config).values()
    paths = config.prompts.paths or [own.prompts.path for own in owns]
    return RunRecord(
        settings=config.to_dict(),
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
        architecture=model.architecture,
        model_sizes={"n_layers": str(model.model_args.n_layers)}
        | dict(_sizes(asdict(model.model_args))),
        weights=weights_digest(model.path),
        prompt_bytes={path: Path(path).stat().st_size for path in paths if Path(path).is_file()},
        schedule_steps=schedule_steps,
        date=datetime.now().isoformat(timespec="seconds"),
    )


def _sizes(arguments: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in arguments.items():
        if isinstance(value, dict):
            yield from _sizes(value, f"{prefix}{name}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], dict):
            yield from _sizes({str(i): of for i, of in enumerate(value)}, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)


def weights_digest(folder: Path) -> str:
    """Returns a digest of parts of the weights. Parts suffice, because training changes every weight."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with open_regular(file) as stream:
            for position in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(position)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files else ""


class RecordState(Stateful):
    """Saves a run's record in checkpoints. It is not loaded with them, but by :func:`read_kept`."""

    def __init__(self, record: RunRecord) -> None:
        self._text = msgspec.json.encode(record, enc_hook=str).decode()

    def state_dict(self) -> dict[str, Any]:
        return {"json": self._text}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing, because the resumed run has a record of its own."""


def states_in(folder: Path) -> set[str]:
    """Returns the names of a checkpoint's states, such as ``optimizer``; none if it is not in torch's format."""
    if not (folder / ".metadata").is_file():
        return set()
    with _refusing_damage(folder):
        metadata = FileSystemReader(folder).read_metadata()
    return {key.partition(".")[0] for key in metadata.state_dict_metadata}


def read_kept(folder: Path, states: set[str]) -> tuple[int, RunRecord | None]:
    """Returns a checkpoint's step, and its record, or None if the checkpoint has none."""
    wanted: dict[str, Any] = {"train_state": {"step": 0}}
    if STATE_KEY in states:
        wanted[STATE_KEY] = {"json": ""}
    with _refusing_damage(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it reads in a single process
        dcp.load(wanted, checkpoint_id=str(folder), no_dist=True)
        record = None
        if STATE_KEY in states:
            record = msgspec.json.decode(wanted[STATE_KEY]["json"], type=RunRecord)
        return int(wanted["train_state"]["step"]), record


@contextmanager
def _refusing_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointDamaged(folder, reason) from error


@dataclass(frozen=True)
class Change:
    """A setting, ``table.name``, whose value differs from that in the run that wrote the checkpoint."""

    key: str
    old: Any
    new: Any

    def describe(self, next_step: int) -> str:
        # Those that begin with fsdp_ say when FSDP gathers, and do not change its shards.
        is_layout = re.match(r"parallelism\.(?!fsdp_)", self.key) or self.key == RANKS
        effect = f"takes effect from step {next_step}"
        if self.key == "training.steps":
            effect = f"takes effect: the run ends after step {self.new}"
        elif is_layout:
            effect = "takes effect: the checkpoint is laid out anew"
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}, {effect}"


RANKS = "number of ranks"

_PROMPT_ORDER = (
    "the checkpoint's place in the stream of prompts, and the prompts that are open, refer to it"
)
_FIXED = {
    "optimizer.name": "the checkpoint holds the state of that optimizer",
    "lora.rank": "the checkpoint holds adapters of that rank",
    "lora.alpha": "the adapters in the checkpoint were trained under that scale",
    "lora.target_modules": "the checkpoint holds adapters of those layers",
    "debug.seed": f"it orders the prompts, and {_PROMPT_ORDER}",
    **dict.fromkeys(
        ("prompts.path", "prompts.paths", "prompts.weights", "prompts.name", "prompts.split"),
        _PROMPT_ORDER,
    ),
    "prompts.shuffle": _PROMPT_ORDER,
    "weight": _PROMPT_ORDER,  # of an environment
    "sft.path": _PROMPT_ORDER,
}
"""Settings that a resumed run cannot change, with the reason."""

_RATES = ("lr_scheduler.", "optimizer.lr", "optimizer.muon_lr")
_WHERE_AND_HOW = ("job.", "checkpoint.", "metrics.", "observe.", "profiling.", "comm.", "cluster.")
_KEEPS_ROLLOUTS = {
    # Of [prompts], where a changed path is refused, unless it has only moved; and of [reward].
    *("balance_batch", "share_contexts", "single_rank_load"),
    *("path", "paths", "num_workers", "timeout_seconds", "max_consecutive_failures"),
}
_SAMPLING = {
    *("grpo.group_size", "training.seq_len", "rollout.max_head_offpolicyness"),
    *("rollout.max_new_tokens", "rollout.temperature", "rollout.top_p", "rollout.top_k"),
    *("rollout.stop_token_ids", "rollout.ignore_eos", "rollout.max_turns"),
    *("rollout.environment", "rollout.environment_options", "rollout.min_completion_tokens"),
    *("rollout.drop_truncated", "rollout.dynamic_sampling", "rollout.should_accept"),
    *("agent.command", "agent.function", "agent.options", "agent.allow_sampling"),
    *("teacher.urls", "teacher.kind", "teacher.model_path", "teacher.top_k"),
}
"""Settings under which rollouts beside a checkpoint were made, besides those of [prompts] and
[reward].
"""


def changes(record: RunRecord, config: JobConfig, num_ranks: int) -> list[Change]:
    """Returns changed settings, except of outputs and logs. Unrecorded old values count as defaults."""
    defaults = JobConfig().to_dict()
    found = [Change(RANKS, record.num_ranks, num_ranks)] if record.num_ranks != num_ranks else []
    for table, values in config.to_dict().items():
        if table == "environments":
            continue
        before = defaults.get(table, {}) | record.settings.get(table, {})
        for name, new in values.items():
            key, old = f"{table}.{name}", before.get(name)
            plain = list(new) if isinstance(new, tuple) else new  # as JSON has kept the old one
            if old != plain and not key.startswith(_WHERE_AND_HOW):
                found.append(Change(key, old, new))
    # An environment that is new, or has been removed, differs in its prompts.path at least.
    before = own_settings(record.settings.get("environments", {}))
    now = own_settings(config.environments)
    keys = dict.fromkeys([*before, *now])
    own = [Change(key, before.get(key), now.get(key)) for key in keys]
    return found + [change for change in own if change.old != change.new]


def refusal(change: Change, record: RunRecord, config: JobConfig) -> str | None:
    """Returns why a changed setting is refused and what to do, or None if the change is accepted."""
    key = setting_of(change.key)
    reason = _FIXED.get(key)
    if change.key == "debug.seed" and (change.old or 0) == (change.new or 0):
        return None
    if change.key == "grpo.ref_model_path" and config.grpo.kl_coef and config.grpo.ref_model_ema:
        reason = "the checkpoint holds the moving reference model (grpo.ref_model_ema)"
    if change.key == "critic.path" and config.has_critic:
        reason = "the checkpoint holds the critic"
    if key in ("prompts.path", "prompts.paths") and _has_moved(change, record):
        return None
    if reason is None:
        return None
    return (
        f"{change.key} must stay {_shown(change.old)} in a run that is resumed, got "
        f"{_shown(change.new)}: {reason}. Set it back{_NEW_RUN}"
    )


_NEW_RUN = (
    ", or begin a new run in another job.dump_folder, from an export of this one if you like "
    "(--model.hf_assets_path <dump_folder>/hf/step-N)."
)


def model_refusal(record: RunRecord, now: RunRecord, path: Path) -> str | None:
    began = record.settings["model"]["hf_assets_path"]
    begin = "model.hf_assets_path must be the model with which this run began"
    end = f"Name {began}{_NEW_RUN}"
    if record.architecture != now.architecture:
        return f"{begin}, {record.architecture} ({began}), got {now.architecture} ({path}). {end}"
    for name, size in sorted(record.model_sizes.items()):
        other = now.model_sizes.get(name, size)
        if other != size and name.rpartition(".")[2] not in _NO_SIZES:
            return f"{begin}, with {name} = {size} ({began}), got {name} = {other} ({path}). {end}"
    if record.weights and now.weights and record.weights != now.weights:
        return (
            f"{begin} ({began}), got {path}, which holds other weights: a resumed run has the "
            f"weights of its checkpoint and would ignore them. {end}"
        )
    return None


_NO_SIZES = {"max_seq_len"}
"""Arguments of models that a run may change, or that say nothing about weights."""


def _has_moved(change: Change, record: RunRecord) -> bool:
    """Whether the prompt files have only moved: their paths differ, but not their names and sizes."""
    old, new = ([x] if isinstance(x, str) else list(x or ()) for x in (change.old, change.new))
    return 0 < len(old) == len(new) and all(
        Path(a).name == Path(b).name
        and Path(b).is_file()
        and record.prompt_bytes.get(a) == Path(b).stat().st_size
        for a, b in zip(old, new, strict=True)
    )


def invalidates_rollouts(found: list[Change]) -> list[str]:
    """Returns those changed settings that make the rollouts saved beside the checkpoint unusable."""

    def matters(key: str) -> bool:
        key = setting_of(key)
        table, _, name = key.partition(".")
        return key in _SAMPLING or (table in ("prompts", "reward") and name not in _KEEPS_ROLLOUTS)

    return [change.key for change in found if matters(change.key)]


def asks_for_another_rate(found: list[Change]) -> bool:
    return any(change.key.startswith(_RATES) for change in found)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Path) else toml_value(value)
