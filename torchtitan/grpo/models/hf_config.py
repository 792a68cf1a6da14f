# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads a Hugging Face directory's ``config.json`` into torchtitan's model arguments.

Torchtitan chooses models by named flavors. Here the directory alone describes the model. A
variant that upstream's model code does not implement is refused by name: a model that loads but
computes something else than the server does would show only as a mismatch between the
trainer's and the sampling-time logprobs.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.grpo.models.config_sizes import wrong_size
from torchtitan.grpo.models.decoder import DecoderArgs
from torchtitan.grpo.models.eos_tokens import NoEosTokenError, eos_token_ids
from torchtitan.grpo.models.families import FAMILIES, Family, decoder_args, refusals
from torchtitan.grpo.system.regular_files import check_folder, read_regular


class ModelError(ValueError):
    """A model directory cannot be used; the message gives the reason."""


@dataclass(frozen=True)
class HFModel:
    """Describes the model of a Hugging Face directory.

    Attributes:
        path: The directory.
        architecture: Architecture in ``config.json``, such as ``Qwen3ForCausalLM``.
        model_args: Torchtitan's arguments of the model.
        vocab_size: Number of rows of the embedding.
        eos_token_ids: Ids of the tokens that end a completion.
        max_position_embeddings: Length of the longest sequence that the model was trained for.
    """

    path: Path
    architecture: str
    model_args: DecoderArgs
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int


def read_hf_model(path: str | Path, *, setting: str = "model.hf_assets_path") -> HFModel:
    """Reads a Hugging Face directory.

    Args:
        path: The directory.
        setting: TOML key that names the directory, for error messages.

    Raises:
        ModelError: If ``path`` is not such a directory, its architecture is not supported, it
            uses a variant that upstream's model lacks, or it names no end-of-sequence token.
    """
    path = Path(path)
    config = _read_json(path / "config.json", setting)
    architecture = _architecture(config)
    if architecture not in FAMILIES:
        raise ModelError(
            f"The architecture {architecture} of {setting} ({path}) is not supported. "
            f"Supported architectures: {', '.join(sorted(FAMILIES))}."
        )
    if wrong := wrong_size(config):
        raise ModelError(
            f"{setting} must be a model's directory with a sound config.json, but in "
            f"{path / 'config.json'} {wrong}. Download the model again, or correct the file."
        )
    return HFModel(
        path=path,
        architecture=architecture,
        model_args=_model_args(FAMILIES[architecture], config, path),
        vocab_size=config["vocab_size"],
        eos_token_ids=_eos_token_ids(path, setting),
        max_position_embeddings=config.get("max_position_embeddings", 0),
    )


def _read_json(file: Path, setting: str) -> dict[str, Any]:
    try:
        check_folder(file.parent)
        content = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{setting} must be a readable Hugging Face model directory; reading {file} failed: "
            f"{error}"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{setting} must be a readable Hugging Face model directory, but {file} holds a "
            f"{type(content).__name__} where an object must be. Download the model again."
        )
    return content


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) else "<none>"


def _model_args(family: Family, config: dict[str, Any], path: Path) -> DecoderArgs:
    file = path / "config.json"
    if found := refusals(family, config):
        raise ModelError(f"{file}: {' '.join(found)}")
    try:
        return decoder_args(family, config)
    except KeyError as error:
        raise ModelError(f"{file} must have the key {error}, and lacks it.") from error
    except ValueError as error:
        raise ModelError(f"{file}: {error}") from error


def _eos_token_ids(path: Path, setting: str) -> tuple[int, ...]:
    try:
        return eos_token_ids(path)
    except NoEosTokenError as error:
        raise ModelError(f"{setting}: {error}") from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{setting} must be a readable Hugging Face model directory; reading the "
            f"end-of-sequence token from {path} failed: {error}"
        ) from error
