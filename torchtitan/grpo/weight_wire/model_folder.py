# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads and checks the folder of a model. Trainer and servers use this module, which needs no torch."""

import json
from pathlib import Path
from typing import Any

from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.files import check_folder, damaged_files, open_regular, read_regular

SUMS_FILE = "sums_export.json"
"""Sizes and checksums of the files of an exported model, beside them."""

REMEDY = (
    "Name the model's release in bfloat16, usually the one whose name lacks FP8, INT8, AWQ, GPTQ or "
    "4bit; or a copy that was dequantised, in transformers with dequantize() and save_pretrained."
)
MERGE = (
    "Merge them, in PEFT with merge_and_unload() and save_pretrained, and name the merged folder."
)

_LFS_POINTER = b"version https://git-lfs"
_CONVERT = "Convert the weights to safetensors, or name another directory"
_IN_TRANSFORMERS = f"{_CONVERT}: in transformers, from_pretrained and then save_pretrained."
# Files by which folders that are no whole model in safetensors are known, the most telling first.
_SIGNS = (
    ("model_index.json", "It is a pipeline of diffusers. Name the folder of a language model."),
    ("*.gguf", f"It holds GGUF files, which this project does not read. {_IN_TRANSFORMERS}"),
    ("*.distcp", "It is a checkpoint of torchtitan. Set checkpoint.initial_load_path to it, and name "
     "the Hugging Face directory from which its run began."),
    ("pytorch_model*.bin", f"It holds PyTorch files (.bin) and no safetensors. {_IN_TRANSFORMERS}"),
    ("consolidated*", "It holds weights in the format of their author (consolidated). Name the model's "
     "release for transformers."),
    ("*.pt*", f"It holds PyTorch files and no safetensors. {_IN_TRANSFORMERS}"),
    ("modules.json", "It is a model of sentence-transformers. Name the folder of a language model."),
)  # fmt: skip


class ModelError(RunError, ValueError):
    """A model directory cannot be used; the message gives the reason."""


class WeightsAbsent(ModelError):
    pass


def read_json(file: Path, setting: str) -> dict[str, Any]:
    """Reads a JSON file in UTF-8 or UTF-16, with or without a byte-order mark.

    ``setting`` is the configuration key that gave the folder; errors name it.
    """
    try:
        check_folder(file.parent)
        content = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        hint = about_pointer(file) or ("" if file.exists() else f" {about_folder(file.parent)}")
        raise ModelError(
            f"{setting} must be a readable Hugging Face model directory; reading {file} failed: "
            f"{error}.{hint}"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{setting} must be a readable Hugging Face model directory, but {file} holds a "
            f"{type(content).__name__} where an object must be. Download the model again."
        )
    return content


def require_undamaged(
    path: Path, setting: str, share: int = 0, num_shares: int = 1, *, weights: bool
) -> None:
    """Raises ModelError for a directory that this project has exported and that has changed since.

    Other directories have no checksums. Files besides weights, such as chat templates, are not compared
    if they are gone or have another size, because users edit them. Ranks can divide the files into
    ``num_shares``. If ``weights`` is True, only weights are checked, and otherwise only other files.
    """

    def is_wanted(name: str, size: int) -> bool:
        file = path / name
        if name.endswith(".safetensors"):
            return weights
        return not weights and file.is_file() and file.stat().st_size == size

    if damaged := list(damaged_files(path, share, num_shares, is_wanted=is_wanted)):
        raise ModelError(
            f"{setting}: the files of {path} must be what was exported, but these have changed since: "
            f"{', '.join(damaged[:3])}. Export the model again, or remove {path / SUMS_FILE} if you "
            "have changed them yourself."
        )


def refuse_quantised(config: dict[str, Any], file: Path, setting: str) -> None:
    """Raises ModelError for a ``config.json`` that describes quantised weights."""
    for key in ("quantization_config", "compression_config"):
        if found := config.get(key):
            method = found.get("quant_method") if isinstance(found, dict) else None
            raise ModelError(
                f"{setting} must be a model with plain weights, but {file} has {key} "
                f"({method or f'{found!r:.80}'}). {REMEDY} If the weights beside it are plain already, "
                f"remove {key} from the file."
            )


def about_pointer(file: Path) -> str:
    """Returns a sentence if the file is only a pointer of Git LFS, and otherwise an empty string."""
    try:
        with open_regular(file) as opened:
            is_pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return ""
    return " It is a pointer of Git LFS and not the file itself: run git lfs pull." * is_pointer


def about_folder(path: Path) -> str:
    """Says what a folder that lacks config.json or weights seems to be, and what to do about it."""
    if not path.is_dir():
        return f"{path} is a file: name the folder." if path.exists() else f"There is no {path}."
    if (path / "adapter_config.json").is_file():
        return _about_adapter(path)
    for link in path.iterdir():
        if link.is_symlink() and not link.exists():
            return f"{link.name} is a link to a file that is absent. Download the model again."
    for pattern, sentence in _SIGNS:
        if any(path.glob(pattern)):
            return sentence
    for inner in (*path.glob("*/config.json"), *path.glob("*/*/config.json")):
        return f"There is a config.json in {inner.parent}: name that folder."
    if not any(path.iterdir()):
        return "The folder is empty. Name another directory."
    return f"{_CONVERT}."


def _about_adapter(path: Path) -> str:
    try:
        base = json.loads((path / "adapter_config.json").read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    return (
        "It is a folder of PEFT with adapters only (adapter_config.json), made for the base model "
        f"{base or '<not named>'}. {MERGE} Or name the base model."
    )


_FULL, _SLIDING = "full_attention", "sliding_attention"
# What transformers takes where config.json has no value.
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28


def attention_window(config: dict[str, Any], architecture: str) -> int | None:
    """Returns the number of tokens, itself included, that each token attends to; None for all.

    Reads the settings as transformers does. Mistral's models have a window unless it is null, others
    only with ``use_sliding_window``; in dense models, ``layer_types`` or ``max_window_layers`` says
    in which layers. Raises ValueError if the settings contradict each other.
    """
    kinds = config.get("layer_types") or []
    if unknown := [kind for kind in kinds if kind not in (_FULL, _SLIDING)]:
        raise ValueError(f"layer_types must be {_FULL!r} or {_SLIDING!r}, got {unknown[0]!r:.80}.")
    is_mistral = architecture == "MistralForCausalLM"
    is_switched_on = config.get("use_sliding_window", False)
    window = config.get("sliding_window", _WINDOW) if is_mistral or is_switched_on else None
    if window is None:
        if _SLIDING in kinds:
            raise ValueError(
                f"layer_types with {_SLIDING!r} needs sliding_window, and use_sliding_window = true in "
                f"models that have it, got sliding_window = {config.get('sliding_window')!r} and "
                f"use_sliding_window = {is_switched_on!r}. Correct the file."
            )
        return None
    if type(window) is not int or window < 1:
        raise ValueError(
            f"sliding_window must be null or a number of tokens above 0, got {window!r}."
        )
    if is_mistral or "Moe" in architecture:
        return window  # in all layers
    if kinds:
        return window if _SLIDING in kinds else None
    first = config.get("max_window_layers", _MAX_WINDOW_LAYERS)
    if type(first) is not int:
        raise ValueError(f"max_window_layers must be a whole number, got {first!r}.")
    return window if first < config["num_hidden_layers"] else None
