# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which files of a model folder hold its weights: those of transformers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import (
    FILES,
    INDEX,
    NORM,
    WEIGHTS,
    Tensors,
    check,
    halves,
    save,
    served,
    split,
    trained,
    write_index,
    wrong,
)
from transformers import AutoModelForCausalLM

from torchtitan.grpo.inference.embedded.model import load_model
from torchtitan.grpo.models.hf_config import ModelError


def other(tensors: Tensors) -> Tensors:
    return {name: tensor + 5 for name, tensor in tensors.items()}


def _stale_shard_that_sorts_first(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    save(other(tensors), folder / "a.safetensors")


def _single_file_beside_an_index(folder: Path, tensors: Tensors) -> None:
    split(folder, other(tensors))
    save(tensors, folder / WEIGHTS)


def _single_file_beside_another(folder: Path, tensors: Tensors) -> None:
    save(other(tensors), folder / "model.fp16.safetensors")


def _index_without_all_tensors(folder: Path, tensors: Tensors) -> None:
    weight_map = split(folder, tensors)
    del weight_map[NORM]
    write_index(folder, weight_map)


def _renamed(*names: str) -> Callable[[Path, Tensors], None]:
    def prepare(folder: Path, tensors: Tensors) -> None:
        split(folder, tensors)
        weight_map = {}
        for old, new, part in zip(FILES, names, halves(tensors), strict=True):
            (folder / new).parent.mkdir(exist_ok=True)
            (folder / old).rename(folder / new)
            weight_map |= dict.fromkeys(part, new)
        write_index(folder, weight_map)

    return prepare


def _beside(name: str, tensor: str) -> Callable[[Path, Tensors], None]:
    def prepare(folder: Path, tensors: Tensors) -> None:
        split(folder, tensors)
        save({tensor: torch.ones(2)}, folder / name)

    return prepare


CONSOLIDATED = ("consolidated.safetensors", "layers.0.attention.wq.weight")
ADAPTERS = ("adapter_model.safetensors", "base_model.model.x")


def _damaged_file_beside_an_index(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"{")


def _repeated_in_the_later_file(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    first, second = halves(tensors)
    save(first | {NORM: tensors[NORM] + 5}, folder / FILES[0])
    assert NORM in second


READ: dict[str, tuple[Callable[[Path, Tensors], None], str | None]] = {
    "stale shard that sorts first": (_stale_shard_that_sorts_first, "a.safetensors also holds 47"),
    "single file beside an index": (_single_file_beside_an_index, f"{FILES[0]} also holds 23"),
    "single file beside another": (_single_file_beside_another, "model.fp16.safetensors also holds 47"),
    "index without all tensors": (_index_without_all_tensors, None),
    "files without digits": (_renamed("front.safetensors", "back.safetensors"), None),
    "files in a folder": (_renamed(*(f"weights/{file}" for file in FILES)), None),
    "consolidated beside": (_beside(*CONSOLIDATED), None),
    "damaged file beside an index": (_damaged_file_beside_an_index, None),
    "repeated in the later file": (_repeated_in_the_later_file, None),
    "adapters beside": (_beside(*ADAPTERS), None),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_the_files_that_count_are_those_of_transformers(case, folder, tensors):
    prepare, said = READ[case]
    prepare(folder, tensors)
    notes = check(folder)
    assert (said is None and notes == []) or said in notes[0]
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert wrong(trained(folder), wanted) == wrong(served(folder), wanted) == []
    assert wrong(wanted, tensors) == []


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_json_files_are_read_in_each_encoding_of_unicode(encoding, folder, tensors):
    write_index(folder, split(folder, tensors), encoding)
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((folder / name).read_text().encode(encoding))
    assert check(folder) == []
    assert wrong(trained(folder), tensors) == wrong(served(folder), tensors) == []


def test_files_without_an_index_make_up_a_model_together(folder, tensors):
    split(folder, tensors)
    (folder / INDEX).unlink()
    (folder / f"._{FILES[0]}").write_bytes(b"of macOS")
    assert check(folder) == []
    assert wrong(trained(folder), tensors) == wrong(served(folder), tensors) == []


def _two_files_without_an_index(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    (folder / INDEX).unlink()
    save(halves(tensors)[1], folder / "old.safetensors")


def _index_with(change_map: Callable[[dict[str, str]], Any]) -> Callable[[Path, Tensors], None]:
    def prepare(folder: Path, tensors: Tensors) -> None:
        write_index(folder, change_map(split(folder, tensors)))

    return prepare


def _no_such_file(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    (folder / FILES[1]).unlink()


def _file_lacks_a_tensor(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    save({n: t for n, t in halves(tensors)[1].items() if n != NORM}, folder / FILES[1])


def _two_files_of_the_index(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    name = next(iter(halves(tensors)[0]))
    save(halves(tensors)[1] | {name: tensors[name]}, folder / FILES[1])


def _instead(name: str | None, content: bytes = b"") -> Callable[[Path, Tensors], None]:
    def prepare(folder: Path, _: Tensors) -> None:
        (folder / WEIGHTS).unlink()
        if name is not None:
            (folder / name).write_bytes(content)

    return prepare


def _dangling(folder: Path, _: Tensors) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../../blobs/absent")


def _alone(name: str, tensor: str) -> Callable[[Path, Tensors], None]:
    def prepare(folder: Path, tensors: Tensors) -> None:
        _instead(None)(folder, tensors)
        save({tensor: torch.ones(2)}, folder / name)
        if name.startswith("adapter"):
            (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "lab/base"}')

    return prepare


def _names_with_a_prefix(folder: Path, tensors: Tensors) -> None:
    save({f"module.{name}": tensor for name, tensor in tensors.items()}, folder / WEIGHTS)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
REFUSED: dict[str, tuple[Callable[[Path, Tensors], None], str]] = {
    "two files without an index": (_two_files_without_an_index, f"once, but .* is in {FILES[1]} and old"),
    "no such file": (_no_such_file, f"{FILES[1]}, which .*index.json names, is absent"),
    "file lacks a tensor": (_file_lacks_a_tensor, f"lack the tensor {NORM}.*{FILES[1]} holds it"),
    "two files of the index": (_two_files_of_the_index, f"is in {FILES[0]} and {FILES[1]}"),
    "leaves the folder": (_index_with(lambda m: m | {NORM: f"../{FILES[0]}"}), "inside its folder"),
    "names another format": (_index_with(lambda m: m | {NORM: "x.bin"}), "safetensors files inside"),
    "no text": (_index_with(lambda m: m | {NORM: 7}), "inside its folder, got '7'"),
    "list": (_index_with(list), "object weight_map"),
    "empty": (_index_with(lambda _: {}), "object weight_map"),
    "damaged index": (_instead(INDEX, b'{"weight_map": {"a'), "index.json failed"),
    "index that is a pointer": (_instead(INDEX, POINTER), "git lfs pull"),
    "prefix": (_names_with_a_prefix, "lack the tensor .* They hold module.model.embed_tokens.weight"),
    "truncated": (lambda folder, _: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1),
                  "complete safetensors files"),
    "pointer": (_instead(WEIGHTS, POINTER), "git lfs pull"),
    "nothing": (_instead(None), "found none"),
    "link to nothing": (_dangling, "link to a file that is absent"),
    "gguf": (_instead("model-q4.gguf", b"GGUF"), "GGUF"),
    "bin": (_instead("pytorch_model.bin"), "save_pretrained"),
    "consolidated": (_instead("consolidated.00.pth"), "release for transformers"),
    "consolidated file of safetensors": (_alone(*CONSOLIDATED), "release for transformers"),
    "adapters": (_alone(*ADAPTERS), "adapters only .* base model lab/base. Merge them"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_make_up_a_model_are_refused(case, folder, tensors):
    prepare, message = REFUSED[case]
    prepare(folder, tensors)
    with pytest.raises(ModelError, match=f"model.hf_assets_path.*{message}"):
        check(folder)
    with pytest.raises(ValueError, match="--model-path"):
        load_model(str(folder), "cpu", "float32")
