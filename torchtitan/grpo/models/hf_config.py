# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads a Hugging Face directory's ``config.json`` into torchtitan's model arguments.

Torchtitan chooses models by named flavors. Here the directory alone describes the model. A
variant that upstream's model code does not implement is refused by name: a model that loads but
computes something else than the server does would show only as a mismatch between the
trainer's and the sampling-time logprobs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.grpo.models.config_sizes import wrong_size
from torchtitan.grpo.models.decoder import DecoderArgs
from torchtitan.grpo.models.eos_tokens import NoEosTokenError, eos_token_ids
from torchtitan.grpo.models.families import FAMILIES, decoder_args, refusals
from torchtitan.grpo.weight_wire.model_folder import (
    ModelError,
    read_json,
    refuse_quantised,
    require_undamaged,
)
from torchtitan.grpo.weight_wire.sliding_window import attention_window

__all__ = ["HFModel", "ModelError", "read_hf_model"]


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
        window: Number of tokens that attention reaches in the layers with the shortest reach; None
            if all layers reach all tokens.
    """

    path: Path
    architecture: str
    model_args: DecoderArgs
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int
    window: int | None = None


def read_hf_model(
    path: str | Path, *, setting: str = "model.hf_assets_path", may_be_quantised: bool = False
) -> HFModel:
    """Reads a Hugging Face directory.

    Args:
        path: The directory.
        setting: TOML key that names the directory, for error messages.
        may_be_quantised: Whether the weights may be quantised, because only servers read them.

    Raises:
        ModelError: If ``path`` is not such a directory, was exported and has changed since, its
            architecture is not supported, it uses a variant that upstream's model lacks, or it names
            no end-of-sequence token.
    """
    path = Path(path)
    require_undamaged(path, setting, weights=False)
    config = read_json(path / "config.json", setting)
    if not may_be_quantised:
        refuse_quantised(config, path / "config.json", setting)
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
    model_args, window = _args_and_window(architecture, config, path)
    return HFModel(
        path=path,
        architecture=architecture,
        model_args=model_args,
        window=window,
        vocab_size=config["vocab_size"],
        eos_token_ids=_eos_token_ids(path, setting),
        max_position_embeddings=config.get("max_position_embeddings", 0),
    )


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) else "<none>"


def _args_and_window(
    architecture: str, config: dict[str, Any], path: Path
) -> tuple[DecoderArgs, int | None]:
    file = path / "config.json"
    if found := refusals(config):
        raise ModelError(f"{file}: {' '.join(found)}")
    try:
        args = decoder_args(FAMILIES[architecture], config)
        return args, attention_window(config, architecture)
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
