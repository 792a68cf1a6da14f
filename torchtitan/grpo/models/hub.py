# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Models named as on the Hugging Face Hub, ``organization/name`` or ``...@revision``.

A local folder of that name takes precedence over huggingface_hub's cache, to which missing files are
downloaded. The library's variables ``HF_HOME`` and ``HF_HUB_OFFLINE`` apply.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.system.files import check_folder, write_whole
from torchtitan.grpo.weight_wire.model_folder import about_folder

# Time in which the first rank of a host downloads a model while the others wait.
_DOWNLOAD_TIMEOUT_SECONDS = 4 * 3600.0
_POLL_SECONDS = 0.1
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
_CONFIG_AND_TOKENIZER = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
# Weights in another format, and what stands in folders.
_NOT_USED = ("consolidated*", "*/*")


@dataclass(frozen=True)
class HubModel:
    """A name on the Hub, ``organization/name``, and a branch, tag or commit; None is the main branch."""

    repo: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> "HubModel | None":
        match = _NAME.fullmatch(text)
        return cls(match["repo"], match["revision"]) if match else None


def is_hub_name(text: str) -> bool:
    return HubModel.parse(text) is not None


def locate_models(config: JobConfig, *, weights: bool = True) -> list[str]:
    """Replaces Hub names in the configuration by local folders. Returns a sentence about each.

    Without ``weights``, configuration and tokenizer are enough. Raises ConfigError if a setting
    names no available model, and TimeoutError if the first rank of this host does not answer.
    """
    named: list[tuple[Any, str, str, bool]] = [(config.model, "model", "hf_assets_path", weights)]
    if config.grpo.kl_coef > 0 and config.grpo.ref_model_path is not None:
        named.append((config.grpo, "grpo", "ref_model_path", weights))
    if config.has_critic and config.critic.path is not None:
        named.append((config.critic, "critic", "path", weights))
    if config.teacher.urls and config.teacher.model_path is not None:
        named.append((config.teacher, "teacher", "model_path", False))
    notes = []
    for table, name, key, needs_weights in named:
        path, found = locate_model(getattr(table, key), f"{name}.{key}", weights=needs_weights)
        setattr(table, key, path)
        notes += found
    return notes


def locate_model(text: str, setting: str, *, weights: bool = True) -> tuple[str, list[str]]:
    """Returns the folder of a model, and sentences about what was found in the Hub's cache."""
    model = HubModel.parse(text)
    if Path(text).is_dir():
        _check_folder(text, setting)
        return text, _about_folder(text, setting, model)
    if Path(text).exists():
        raise ConfigError(
            f"{setting} must be the folder of a model, but {about_folder(Path(text))}"
        )
    if model is None:
        raise ConfigError(
            f"{setting} must be a folder with config.json, tokenizer.json and safetensors files, or a "
            f"name on the Hugging Face Hub, organization/name, got {text!r}: there is no such folder "
            f"(paths are relative to {Path.cwd()})."
        )
    answer: dict[str, Any] = once_per_host(
        f"finding {text}{'' if weights else ' without weights'}",
        lambda: _take(model, text, setting, weights),
        _DOWNLOAD_TIMEOUT_SECONDS,
    )
    if "error" in answer:
        raise ConfigError(answer["error"])
    path = answer["path"]
    _check_folder(path, setting)
    return path, [f"{setting} = {text}: revision {Path(path).name} of the Hub, in {path}"]


def _check_folder(path: str, setting: str) -> None:
    try:
        check_folder(path)
    except OSError as error:
        raise ConfigError(f"{setting}: {error}.") from error


def _about_folder(text: str, setting: str, model: HubModel | None) -> list[str]:
    if model is None or Path(text).is_absolute() or not _is_cached(model):
        return []
    return [
        f"{setting} = {text}: the folder {Path(text).resolve()}, and not the Hub's model of the "
        "same name, which is in the cache as well."
    ]


def _is_cached(model: HubModel) -> bool:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"models--{model.repo.replace('/', '--')}").is_dir()


def _take(model: HubModel, text: str, setting: str, weights: bool) -> dict[str, str]:
    from huggingface_hub import snapshot_download

    patterns = [*_CONFIG_AND_TOKENIZER, *(_WEIGHTS if weights else ())]
    try:
        path = snapshot_download(
            model.repo,
            revision=model.revision,
            allow_patterns=patterns,
            ignore_patterns=list(_NOT_USED),
        )
    except Exception as error:  # of this library, of its HTTP client, and of the file system
        return {"error": f"{setting} = {text!r} is no folder here, and {_reason(error)}"}
    return {"path": path}


def _reason(error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.RevisionNotFoundError):
        return "the Hub has no such revision of the model. Write organization/name@revision."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the Hub has no such model, or not for you. If it is private or gated, log in with "
            "hf auth login."
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        return (
            f"the cache, {constants.HF_HUB_CACHE}, does not have all files of a Hub model of that "
            f"name; {why}. Name a folder, or run hf download where there is a network, and set "
            "HF_HOME to where it put the model."
        )
    message = str(error).strip().splitlines() or [""]
    return f"taking it from the Hub failed: {type(error).__name__}: {message[0]}"


def once_per_host(name: str, make: Callable[[], dict[str, Any]], timeout_seconds: float) -> Any:
    """Calls ``make`` on the first rank of this host, and returns its result on all ranks of the host.

    Works before process groups exist: the first rank writes the result, as JSON, into torchrun's folder.
    Without torchrun, each rank calls ``make``. All ranks must pass the same ``name``. If ``make`` raises,
    the other ranks raise TimeoutError after ``timeout_seconds``.
    """
    own_error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if own_error_file is None or os.environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        return make()
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    file = Path(own_error_file).parents[1] / f"{digest}.json"  # <attempt>/<rank>/error.json
    if os.environ.get("LOCAL_RANK", "0") == "0":
        answer = make()
        write_whole(file, json.dumps(answer, allow_nan=False).encode())
        return answer
    deadline = time.monotonic() + timeout_seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"The first rank of this host did not finish {name} within {timeout_seconds:g} s."
            )
        time.sleep(_POLL_SECONDS)
    return json.loads(file.read_text())
