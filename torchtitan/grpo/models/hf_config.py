# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads a Hugging Face directory's ``config.json`` into the arguments of a model.

Model variants that no block computes are refused. Otherwise they would show only as a mismatch between
the trainer's and the sampling-time logprobs.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.decoder import DecoderArgs, decoder_args
from torchtitan.grpo.models.families import FAMILIES, refusals
from torchtitan.grpo.weight_wire.model_folder import (
    ModelError,
    attention_window,
    read_json,
    refuse_quantised,
    require_undamaged,
)

__all__ = ["HFModel", "ModelError", "read_hf_model"]


@dataclass(frozen=True)
class HFModel:
    """A Hugging Face directory's model; ``window`` is the shortest attention window, if any."""

    path: Path
    architecture: str
    model_args: DecoderArgs
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int
    window: int | None = None


def read_hf_model(
    path: str | Path,
    *,
    setting: str = "model.hf_assets_path",
    may_be_quantised: bool = False,
    may_score: bool = False,
) -> HFModel:
    """Reads the directory that the key ``setting`` names. Only servers can read quantised weights.

    With ``may_score``, the model may have a score head in place of the output layer, like reward models.
    """
    path = Path(path)
    require_undamaged(path, setting, weights=False)
    config = read_json(path / "config.json", setting)
    if not may_be_quantised:
        refuse_quantised(config, path / "config.json", setting)
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str):
        architecture = "<none>"
    if may_score:
        architecture = architecture.replace("ForSequenceClassification", "ForCausalLM")
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


_REQUIRED = {
    "hidden_size": 1_000_000,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 100_000_000,
    "max_position_embeddings": 1_000_000_000,
}
"""Largest value of each size that every family has: far above any model, far below what hangs."""
_OPTIONAL = {
    "num_key_value_heads": 100_000,
    "head_dim": 1_000_000,
    "moe_intermediate_size": 10_000_000,
    "num_experts": 1_000_000,
    "num_local_experts": 1_000_000,
    "num_experts_per_tok": 1_000_000,
}


def wrong_size(config: dict[str, Any]) -> str | None:
    """Returns what is wrong with a size in a ``config.json``, as the end of a sentence, or None."""
    for key, largest in (_REQUIRED | _OPTIONAL).items():
        value = config.get(key)
        if value is None and key in _OPTIONAL:
            continue
        if type(value) is not int or not 1 <= value <= largest:
            return f"{key} must be a whole number from 1 to {largest}, got {_shown(value)}"
    epsilon = config.get("rms_norm_eps")
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        return f"rms_norm_eps must be a number between 0 and 1, got {_shown(epsilon)}"
    if type(tied := config.get("tie_word_embeddings", False)) is not bool:
        return f"tie_word_embeddings must be true or false, got {_shown(tied)}"
    if not isinstance(config.get("layer_types"), list | None):
        return f"layer_types must be a list or null, got {_shown(config['layer_types'])}"
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key), dict | None):
            return f"{key} must be an object or null, got {_shown(config[key])}"
    return None


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.80}"


# No weight depends on the longest sequence, and frequencies follow from base and scaling.
_IRRELEVANT = frozenset(
    {"max_seq_len", "layers", "rotary", "rotary.frequencies", "rotary.attention_factor"}
)
# Names in `config.json` of arguments, and of sizes of blocks.
_NAME_IN_CONFIG = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "expert_hidden": "moe_intermediate_size",
    "window": "sliding_window",
    "norm_eps": "rms_norm_eps",
    "enable_weight_tying": "tie_word_embeddings",
    "top_k": "num_experts_per_tok",
    "normalizes": "norm_topk_prob",
    "rotary.theta": "rope_theta",
    "rotary.scaling": "rope_scaling",
}


def check_reference(config: JobConfig) -> None:
    """Raises ModelError if the reference differs from the policy in more than its weights.

    Both directories are read again, because building a model changes the arguments read from them.
    """
    _check_same_model(config, config.grpo.ref_model_path, "grpo.ref_model_path", "reference")


def check_critic_model(config: JobConfig) -> None:
    """Raises ModelError if the critic's architecture differs from the policy's in more than a score head."""
    _check_same_model(config, config.critic.path, "critic.path", "critic", may_score=True)


def _check_same_model(
    config: JobConfig, path: str | None, setting: str, what: str, *, may_score: bool = False
) -> None:
    if path is None:
        return
    policy = read_hf_model(config.model.hf_assets_path)
    other = read_hf_model(path, setting=setting, may_score=may_score)
    if may_score:  # it has no logits
        other.model_args.enable_weight_tying = policy.model_args.enable_weight_tying
    if found := list(_differences(policy, other)):
        raise ModelError(
            f"{setting} ({path}) must hold the model of model.hf_assets_path ({policy.path}) with "
            f"other weights, but their config.json files differ: {'; '.join(found)}. Choose a {what} "
            "of the same architecture."
        )


def _differences(policy: HFModel, reference: HFModel) -> Iterator[str]:
    if policy.architecture != reference.architecture:
        # The arguments of two model families cannot be compared one by one.
        yield f"architecture {reference.architecture} instead of {policy.architecture}"
        return
    if policy.window != reference.window:
        yield f"sliding_window {reference.window} instead of {policy.window}"
    wanted, found = _arguments(policy.model_args), _arguments(reference.model_args)
    told = set[str]()
    for (name, number), value in wanted.items():
        other = found.get((name, number))
        if other != value and name not in told and (number is None or "num_layers" not in told):
            told.add(name)
            yield f"{_NAME_IN_CONFIG.get(name, name)} {other} instead of {value}"


def _arguments(args: DecoderArgs) -> dict[tuple[str, int | None], Any]:
    """Returns a model's arguments by (name, None), and sizes of its blocks by (name, number of the layer)."""
    found: dict[tuple[str, int | None], Any] = {("num_layers", None): args.n_layers}
    for prefix, row in (("", args), ("rotary.", args.rotary)):
        for field in fields(row):
            name = prefix + field.name
            if name not in _IRRELEVANT:
                found[name, None] = getattr(row, field.name)
    for number, layer in enumerate(args.layers):
        for block in (layer.attention, layer.feed_forward):
            for field in fields(block):
                found[field.name, number] = getattr(block, field.name)
    return found


class NoEosTokenError(ValueError):
    """No file names an end-of-sequence token, or a file names something that cannot be one."""


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Returns the ids that end a completion, from the first file that names any.

    Raises NoEosTokenError, OSError if a file cannot be read, or ValueError if a file is not JSON.
    """
    looked_at = []
    for name in ("generation_config.json", "config.json"):
        if found := ids_in(directory / name):
            return found
        looked_at.append(f"{name} (eos_token_id: {_absence(directory / name)})")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if text := _text_of(directory / name):
            return (_id_of(text, directory, name),)
        looked_at.append(f"{name} (eos_token: {_absence(directory / name)})")
    raise NoEosTokenError(
        f"{directory} must name the token that ends a completion; none of its files does: "
        f"{', '.join(looked_at)}. Set eos_token_id in generation_config.json."
    )


def ids_in(file: Path) -> tuple[int, ...]:
    value = _read(file).get("eos_token_id")
    found = value if isinstance(value, list) else [value]
    if all(token is None for token in found):
        return ()
    bound = _num_ids(file.parent)
    ids = [token for token in found if type(token) is int and 0 <= token < bound]
    if len(ids) < len(found):
        raise NoEosTokenError(
            f"eos_token_id in {file} must be a token id of the model, from 0 to {bound - 1}, or a list "
            f"of them, got {json.dumps(value, allow_nan=True):.200}. Correct it, or remove it so that the next file "
            "decides: generation_config.json, then config.json, then the tokenizer's eos_token."
        )
    return tuple(dict.fromkeys(ids))


def _num_ids(directory: Path) -> int:
    size = _read(directory / "config.json").get("vocab_size")
    return size if type(size) is int else sys.maxsize


def _read(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_bytes()) if file.exists() else {}
    if not isinstance(content, dict):
        raise NoEosTokenError(f"{file} must hold an object, got a {type(content).__name__}.")
    return content


def _absence(file: Path) -> str:
    return "not set" if file.exists() else "no such file"


def _text_of(file: Path) -> str | None:
    """Returns the text of a file's ``eos_token``, which may be a string or an object with ``content``."""
    token = _read(file).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise NoEosTokenError(
            f"eos_token in {file} must be the text of a token, got {json.dumps(token, allow_nan=True):.200}. Correct it, "
            "or set eos_token_id in generation_config.json."
        )
    return text


def _id_of(text: str, directory: Path, source: str) -> int:
    file = directory / "tokenizer.json"
    if not file.exists():
        raise NoEosTokenError(
            f"{directory / source} names the end-of-sequence token {text!r}, but its id is unknown: "
            f"there is no {file}. Set eos_token_id in generation_config.json."
        )
    try:
        token_id = Tokenizer.from_file(str(file)).token_to_id(text)
    except Exception as error:  # the library raises plain Exception
        raise NoEosTokenError(f"{file} is not a readable tokenizer: {error}.") from error
    if token_id is None:
        raise NoEosTokenError(
            f"{directory / source} names the end-of-sequence token {text!r}, which {file} does not "
            "contain. Set eos_token_id in generation_config.json."
        )
    if token_id >= _num_ids(directory):
        raise NoEosTokenError(
            f"{directory / source} names the end-of-sequence token {text!r}, whose id {token_id} must be "
            f"below the model's vocab_size, {_num_ids(directory)}: no completion could end. Check that "
            "the tokenizer and config.json belong to the same model."
        )
    return token_id
