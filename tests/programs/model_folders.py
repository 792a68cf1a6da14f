# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Changes model folders, and tells what a run and a server read of them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from torchtitan.grpo.config_checks import load_config
from torchtitan.grpo.inference.embedded.model import load_model
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.models.hf_weights import load_hf_weights
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.training.model_spec import build_without_memory, check_weights

ASSETS = Path(__file__).resolve().parents[2] / "assets/reverse_digits"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UP = "model.layers.0.mlp.up_proj"
EMBEDDING, OUTPUT, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]


def save(tensors: Tensors, file: Path) -> None:
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, file, {"format": "pt"})


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def settings(folder: Path, *more: str) -> list[str]:
    return [
        *(f"--model.hf_assets_path={folder}", f"--prompts.path={ASSETS}/train.jsonl"),
        *("--reward.functions=exact_match", "--training.seq_len=64", "--rollout.max_new_tokens=8"),
        *("--inference.kind=embedded", "--inference.launch", "--training.steps=1", *more),
    ]


def check(folder: Path, *more: str, is_trained: bool = True) -> list[str]:
    config = load_config(settings(folder, *more))
    model = read_hf_model(config.model.hf_assets_path)
    return check_weights(config, model, is_trained=is_trained)[1]


def trained(folder: Path) -> Tensors:
    config = load_config(settings(folder))
    model, adapter_of = build_without_memory(config, read_hf_model(folder))
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()  # ties the ends of a tied model again
    adapter = adapter_of(str(folder))
    load_hf_weights([model], adapter, folder)
    found: Tensors = {}
    for name, parameter in named_parameters([model]):
        found |= adapter.to_hf({name: parameter.detach()})
    return found


def served(folder: Path) -> Tensors:
    return load_model(str(folder), "cpu", "float32").state_dict()


def wrong(found: Tensors, wanted: Tensors) -> list[str]:
    return [name for name in found if not torch.equal(found[name].float(), wanted[name].float())]


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = sorted(tensors)
    first = names[: len(names) // 2]
    return {n: tensors[n] for n in first}, {n: tensors[n] for n in names if n not in first}


def split(folder: Path, tensors: Tensors) -> dict[str, str]:
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for file, part in zip(FILES, halves(tensors), strict=True):
        save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any, encoding: str = "utf-8") -> None:
    content = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / INDEX).write_bytes(content.encode(encoding))
