# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which safetensors file of a model's folder holds a tensor, and checks the tensors.

As in transformers, ``model.safetensors`` is used if it exists, or else the files that the index
names. Without either, all safetensors files of the folder are used, and no two of them may hold
the same tensor. Only headers are read, except where an output layer is compared with the embedding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from torchtitan.grpo.weight_wire.model_folder import (
    MERGE,
    REMEDY,
    ModelError,
    WeightsAbsent,
    about_folder,
    about_pointer,
    read_json,
)

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
# Number of bytes of the embedding that are compared at a time.
_COMPARED_BYTES = 64 * 1024**2
_SHOWN = 3
# Files of adapters, of weights under the names that their author gave them, and of macOS.
_OTHER_FORMATS = ("adapter_", "consolidated", ".")
# Ends of the names of buffers that older versions of transformers wrote.
_BUFFERS = (".inv_freq", ".position_ids")


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file. ``dtype`` is the name in the file, such as ``BF16``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class WeightFiles:
    """The weights in a folder, whose TOML key is ``setting``. Raises ModelError if none can be read."""

    def __init__(self, path: Path, setting: str) -> None:
        self.path, self.setting = path, setting
        self._indexed: dict[str, Path] = {}
        self._found: dict[str, list[Stored]] = {}
        present = [
            file
            for file in sorted(path.glob("*.safetensors"))
            if file.is_file() and not file.name.startswith(_OTHER_FORMATS)
        ]
        self._files, self._source = present, ""
        if path / SINGLE_FILE in present:
            self._files, self._source = [path / SINGLE_FILE], SINGLE_FILE
        elif (path / INDEX_FILE).is_file():
            self._indexed, self._source = self._read_index(), INDEX_FILE
            self._files = sorted(set(self._indexed.values()))
        if not self._files:
            raise WeightsAbsent(
                f"{setting} ({path}) must hold *.safetensors files, found none. {about_folder(path)}"
            )
        self._others = [file for file in present if file not in self._files]
        for file in self._files:
            for name, stored in self._header(file):
                self._found.setdefault(name, []).append(stored)

    def _read_index(self) -> dict[str, Path]:
        file = self.path / INDEX_FILE
        weight_map = read_json(file, self.setting).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(
                f"{self.setting}: {file} must have an object weight_map of tensors and their files, got "
                f"{weight_map!r:.80}. Download the model again."
            )
        for name in sorted(set(map(str, weight_map.values()))):
            where = PurePosixPath(name)
            if where.is_absolute() or ".." in where.parts or where.suffix != ".safetensors":
                raise ModelError(
                    f"{self.setting}: {file} must name safetensors files inside its folder, got {name!r}. "
                    "Download the model again."
                )
            if not (self.path / name).is_file():
                raise WeightsAbsent(
                    f"{self.setting} must hold complete safetensors files, but {name}, which {file} "
                    "names, is absent. Download the model again, or copy that file as well."
                )
        return {name: self.path / str(held_in) for name, held_in in weight_map.items()}

    def _header(self, file: Path) -> Iterator[tuple[str, Stored]]:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118
                    tensor = handle.get_slice(name)
                    yield name, Stored(file, tensor.get_dtype(), tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{self.setting} must hold complete safetensors files; reading {file} failed: {error}."
                f"{about_pointer(file) or ' Copy or download the model again.'}"
            ) from error

    def headers(self) -> dict[str, Stored]:
        return {name: found[-1] for name, found in self._found.items()}

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all weights and biases, for a model that is not built yet."""
        names = [name for name in self._found if name.endswith((".weight", ".bias"))]
        modules = {name.rpartition(".")[0] for name in names}
        return {
            name: self.stored(name).shape
            for name in names
            if modules.isdisjoint(list(_modules_around(name))[1:])
        }

    def stored(self, name: str, shape: Sequence[int] | None = None) -> Stored:
        """Finds a tensor.

        Raises ModelError if it is missing or ambiguous, if its dtype is not a plain one, or if it has
        another shape than ``shape``.
        """
        found = self._found.get(name)
        if not found:
            self.refuse_missing(name)
        stored = found[-1]
        # Of two files that the index names, every loader takes the later one.
        if len(found) > 1 and self._indexed.get(name) != stored.file:
            files = " and ".join(each.file.name for each in found)
            why = f"no {INDEX_FILE} decides between them"
            if name in self._indexed:
                named = self._indexed[name].name
                why = f"{INDEX_FILE} names {named}, but loaders read it from the other file"
            raise ModelError(
                f"{self.setting} ({self.path}) must hold each tensor once, but {name} is in {files}, and "
                f"{why}. Remove the file that does not belong to the model, or download it again."
            )
        if stored.dtype not in _PLAIN:
            self._refuse_parts([f"{name} is {stored.dtype}"])
        if shape is not None and stored.shape != tuple(shape):
            raise ModelError(
                f"{name} in {stored.file} ({self.setting}) must have shape {list(shape)} "
                f"according to config.json, got {list(stored.shape)}. Check that config.json and the "
                "weights belong to the same model."
            )
        return stored

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        with safe_open(self.stored(name, shape).file, framework="pt") as handle:
            return handle.get_tensor(name)

    def slices(self) -> dict[str, Any]:
        """Returns all tensors by name, as slices that are read when they are used."""
        opened = {file: safe_open(file, framework="pt") for file in self._files}
        return {name: opened[each[-1].file].get_slice(name) for name, each in self._found.items()}

    def refuse_missing(self, name: str) -> NoReturn:
        """Raises ModelError for a tensor that the files lack, perhaps because they are quantised."""
        packed = [f"{other} is {each[-1].dtype}" for other, each in self._found.items()
                  if each[-1].dtype not in _PLAIN]  # fmt: skip
        if packed:
            self._refuse_parts([f"{name} is missing", *packed])
        hint = "Check that no safetensors file is missing."
        if name in self._indexed:
            held_in = self._indexed[name].name
            hint = f"{INDEX_FILE} says that {held_in} holds it. Download the model again."
        elif other := next(
            (o for o in self._found if name.endswith(f".{o}") or o.endswith(f".{name}")), None
        ):
            hint = f"They hold {other} instead: save the model with the names of transformers."
        elif name == OUTPUT:
            hint = "If the embedding is the output layer as well, set tie_word_embeddings = true there."
        raise ModelError(
            f"The weights in {self.setting} ({self.path}) lack the tensor {name}, which the "
            f"config.json beside them requires. {hint}"
        )

    def check(self, needed: Mapping[str, Sequence[int]], *, is_tied: bool) -> list[str]:
        """Compares the files with the tensors that a model needs; returns remarks on all other tensors.

        Raises ModelError as :meth:`stored`; if a tensor beside a weight looks like a part of it,
        such as its scales; or if a tied model has an output layer that is not its embedding.
        """
        packed = [
            f"{name} is {stored.dtype}"
            for name in needed
            for stored in self._found.get(name, ())
            if stored.dtype not in _PLAIN
        ]
        if parts := [*packed, *self._parts_of(needed)]:
            self._refuse_parts(parts)
        for name, shape in needed.items():
            self.stored(name, shape)
        if is_tied and OUTPUT in self._found and not self._has_equal_ends():
            raise ModelError(
                f"{self.setting} ({self.path}) must have one weight for embedding and output layer, "
                f"because its config.json has tie_word_embeddings = true, but its {OUTPUT} differs from "
                f"{EMBEDDING}. If the model was trained with an output layer of its own, set "
                f"tie_word_embeddings = false in config.json; otherwise remove {OUTPUT} from the file."
            )
        return list(self._unread(needed))

    def _parts_of(self, needed: Mapping[str, Sequence[int]]) -> Iterator[str]:
        """Yields remarks on unneeded tensors beside a weight, except biases, as transformers ignores these."""
        modules = {name.rpartition(".")[0] for name in needed}
        for name in self._found:
            if name not in needed and not name.endswith(".bias"):
                beside = modules.intersection(_modules_around(name))
                yield from (f"{name} stands beside the weight of {module}" for module in beside)

    def _refuse_parts(self, parts: Sequence[str]) -> NoReturn:
        more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
        has_adapters = ".lora_" in "".join(parts)
        raise ModelError(
            f"{self.setting} ({self.path}) must hold plain weights (BF16, F16 or F32), but they "
            f"{'have adapters that are not merged' if has_adapters else 'look quantised'}: "
            f"{', '.join(parts[:_SHOWN])}{more}. {MERGE if has_adapters else REMEDY}"
        )

    def _has_equal_ends(self) -> bool:
        first, last = self.stored(EMBEDDING), self._found[OUTPUT][-1]
        if first.shape != last.shape or last.dtype not in _PLAIN:
            return False
        rows = max(1, _COMPARED_BYTES // (4 * first.shape[-1]))
        with (
            safe_open(first.file, framework="pt") as of_first,
            safe_open(last.file, framework="pt") as of_last,
        ):
            embedding, output = of_first.get_slice(EMBEDDING), of_last.get_slice(OUTPUT)
            return all(
                torch.equal(embedding[row : row + rows].float(), output[row : row + rows].float())
                for row in range(0, first.shape[0], rows)
            )

    def _unread(self, needed: Mapping[str, Sequence[int]]) -> Iterator[str]:
        place = f"{self.setting} ({self.path})"
        extra = [name for name in self._found if name not in needed and name != OUTPUT]
        if extra := [name for name in extra if not name.endswith(_BUFFERS)]:
            yield (
                f"{place}: the model does not have {len(extra)} of the tensors, which are not read: "
                f"{', '.join(extra[:_SHOWN])}{', ...' if len(extra) > _SHOWN else ''}."
            )
        for file in self._others:
            try:
                repeated = [name for name, _ in self._header(file) if name in needed]
            except ModelError:
                continue  # nothing is read from it
            if repeated:
                yield (
                    f"{place}: {file.name} also holds {len(repeated)} of the model's tensors, such as "
                    f"{repeated[0]}, and is not read, because {self._source} decides which file counts."
                )
        if (self.path / "adapter_config.json").is_file():
            yield f"{place}: adapters lie beside the weights (adapter_config.json) and are not read."


def _modules_around(name: str) -> Iterator[str]:
    """Yields the module of a tensor, and those that contain it, innermost first."""
    while name := name.rpartition(".")[0]:
        yield name
