# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Copies weights between a Hugging Face directory and a sharded model.

The family's state-dict adapter converts one whole parameter at a time, in every layout.
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors.torch import save_file

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.collect import Collector, agree_on_assembly
from torchtitan.grpo.models.decoder import is_tied
from torchtitan.grpo.models.hf_names import StateDictAdapter
from torchtitan.grpo.models.lora import export_peft, lora_scale, whole_folder, with_adapters
from torchtitan.grpo.models.shards import in_buckets, local_block, local_tensor, named_parameters
from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.system.files import sums_of, write_sums
from torchtitan.grpo.weight_wire.adapter_names import is_adapter
from torchtitan.grpo.weight_wire.model_files import EMBEDDING, INDEX_FILE, WeightFiles
from torchtitan.grpo.weight_wire.model_folder import (
    SUMS_FILE,
    ModelError,
    read_json,
    require_undamaged,
)

# Files of the source directory, other than weights, that are copied into an export.
_ASSETS = ("*.json", "*.txt", "*.model", "*.jinja")
# Descriptions and checksums of other weights than those that are exported.
_NOT_COPIED = (".index.json", "adapter_config.json", SUMS_FILE)
# Size of the buckets of whole parameters that an export collects.
_EXPORT_BUCKET_BYTES = 256 * 1024**2


def hf_meta(adapter: StateDictAdapter, name: str, shape: Sequence[int]) -> dict[str, torch.Tensor]:
    return adapter.to_hf({name: torch.empty(tuple(shape), device="meta")})


def keeps_bytes(adapter: StateDictAdapter, name: str, shape: Sequence[int]) -> bool:
    """Returns whether a parameter's bytes on disk are the same: only renamed, or split like stacked experts."""
    native = torch.empty(tuple(shape), device="meta")
    end = 0
    for converted in adapter.to_hf({name: native}).values():
        is_part = converted is native or converted._base is native
        if not (is_part and converted.is_contiguous() and converted.storage_offset() == end):
            return False
        end += converted.numel()
    return end == native.numel()


def load_hf_weights(
    model_parts: list[nn.Module],
    adapter: StateDictAdapter,
    path: str | Path,
    *,
    setting: str = "model.hf_assets_path",
    new: Collection[str] = (),
    show: Callable[[str, int, int], object] = lambda line, done, wanted: None,
) -> None:
    """Fills sharded parameters from a directory.

    Raises ModelError if the directory's files do not match the model, or if they are an export of this
    project whose files were changed later.
    Parameters named in ``new`` may be missing from the files; they then keep their values. ``show`` is
    called with a line before each parameter, and with the numbers of those loaded and of all.
    """
    is_group = dist.is_initialized()
    share = (dist.get_rank(), dist.get_world_size()) if is_group else (0, 1)
    require_undamaged(Path(path), setting, *share, weights=True)
    files = WeightFiles(Path(path), setting)
    with torch.no_grad():
        parameters = list(named_parameters(model_parts))
        for number, (name, parameter) in enumerate(parameters):
            show(
                f"loading the model's weights: {number} of {len(parameters)} parameters",
                number,
                len(parameters),
            )
            if is_adapter(name):
                continue  # the directory holds the base model
            metas = hf_meta(adapter, name, parameter.shape)
            if name in new and not files.headers().keys() & metas.keys():
                continue
            hf = {key: files.read(key, meta.shape) for key, meta in metas.items()}
            for key, tensor in hf.items():
                _refuse_values(key, tensor, f"{files.stored(key).file} ({setting})")
            # Each rank reads the whole tensor, so that nothing needs to be sent.
            whole = adapter.from_hf(hf)[name]
            local = local_tensor(parameter)
            if local.numel():
                local.copy_(local_block(parameter).of(whole))


def _refuse_values(name: str, tensor: torch.Tensor, place: str) -> None:
    """Raises ModelError for values that show a damaged file or a failed conversion: NaN, inf, or only zeros."""
    # The sum of finite values of 16 bits may overflow.
    if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
        wrong = int((~torch.isfinite(tensor)).sum())
        found = f"{wrong} of {tensor.numel()} that are NaN or infinite"
    elif (name.endswith("norm.weight") or name == EMBEDDING) and not tensor.any():
        found = "only zeros, as in a file that was not downloaded to its end"
    else:
        return
    raise ModelError(
        f"{name} in {place} must hold the values of a trained model, got {found}. Download or export the "
        "model again."
    )


def check_hf_weights(
    model: nn.Module,
    adapter: StateDictAdapter,
    path: Path,
    *,
    setting: str,
    new: Collection[str] = (),
) -> tuple[int, list[str]]:
    """Checks that a directory has the tensors of a model, which may be on the meta device.

    ``new`` parameters may be missing. Returns the number of needed tensors, and remarks about others.
    Raises ModelError if a needed tensor is missing or does not fit.
    """
    files = WeightFiles(path, setting)
    needed: dict[str, tuple[int, ...]] = {}
    for name, parameter in named_parameters([model]):
        metas = hf_meta(adapter, name, parameter.shape)
        if name not in new or files.headers().keys() & metas.keys():
            needed |= {key: tuple(tensor.shape) for key, tensor in metas.items()}
    return len(needed), files.check(needed, is_tied=is_tied(model))


def export_hf(
    model_parts: list[nn.Module],
    adapter: StateDictAdapter,
    source: Path,
    target: Path,
    dtype: torch.dtype,
    *,
    is_writer: bool,
    max_file_bytes: int = 4 * 1024**3,
) -> None:
    """Writes the model like :func:`write_hf`; collective over all ranks, on the training thread."""
    tensors = full_hf_tensors(model_parts, adapter, dtype)
    if is_writer:
        try:
            write_hf(tensors, source, target, dtype, max_file_bytes=max_file_bytes)
        finally:  # after a failure as well, the other ranks take part up to the last tensor
            for _ in tensors:
                pass
    else:
        assert next(tensors, None) is None, (
            "whole tensors arrive on rank 0, which must be the writer"
        )


def write_hf(
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    target: Path,
    dtype: torch.dtype,
    *,
    max_file_bytes: int = 4 * 1024**3,
) -> None:
    """Writes whole tensors as a Hugging Face directory, which appears only when it is complete.

    Config and tokenizer files are copied from ``source``. An existing ``target`` is replaced.
    """
    with whole_folder(target) as partial:
        _write_shards(tensors, partial, max_file_bytes)
        _copy_assets(source, partial, dtype)
        write_sums(partial / SUMS_FILE, sums_of(f for f in partial.iterdir() if f.is_file()))


def full_hf_tensors(
    model_parts: list[nn.Module], adapter: StateDictAdapter, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and whole tensors, with adapters added, on rank 0; collective over all ranks.

    A tensor may share memory with its parameter.
    """
    parameters = dict(named_parameters(model_parts))
    buckets = in_buckets(
        agree_on_assembly(parameters, adapter),
        lambda a: a.numel * dtype.itemsize,
        _EXPORT_BUCKET_BYTES,
    )
    shards = {name: local_tensor(parameter) for name, parameter in parameters.items()}
    device = next(iter(shards.values())).device
    collected = Collector(buckets, dtype, device, group=None).collect(shards)
    for name, full in with_adapters(collected, lora_scale(adapter)):
        yield from adapter.to_hf({name: full}).items()


def _write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, max_file_bytes: int
) -> None:
    """Writes tensors and their index. Only the tensors of one file are in memory at a time."""
    names_in: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = total_bytes = 0

    def write() -> None:
        part = folder / f"part-{len(names_in)}.safetensors"
        save_file(pending, part, metadata={"format": "pt"})
        names_in.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_file_bytes:
            write()
            pending_bytes = 0
        pending[name] = tensor.to("cpu").contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    write()
    weight_map = {}
    for index, names in enumerate(names_in):
        file = f"model-{index + 1:05d}-of-{len(names_in):05d}.safetensors"
        (folder / f"part-{index}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index_json = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index_json, indent=2, allow_nan=False))


def _copy_assets(source: Path, target: Path, dtype: torch.dtype) -> None:
    for pattern in _ASSETS:
        for file in source.glob(pattern):
            if not file.name.endswith(_NOT_COPIED):
                shutil.copyfile(file, target / file.name)  # without the source's permissions
    config = read_json(target / "config.json", "model.hf_assets_path")
    config.pop("quantization_config", None)  # an empty one, which transformers cannot read
    # transformers 5 writes `dtype`; version 4 wrote `torch_dtype`. A loader reads either.
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2, allow_nan=True))


def export_policy(
    config: JobConfig,
    model_parts: list[nn.Module],
    adapter: StateDictAdapter,
    source: Path,
    target: Path,
    *,
    is_writer: bool,
) -> None:
    """Exports the model to ``target``, which is ``hf/step-N``, and LoRA adapters to ``peft/step-N``.

    Collective over all ranks. ``is_writer`` is True on rank 0. ``source`` is the original directory.
    """
    dtype = TORCH_DTYPE_MAP[config.checkpoint.export_dtype]
    peft = target.parents[1] / "peft" / target.name
    try:
        export_hf(model_parts, adapter, source, target, dtype, is_writer=is_writer)
    finally:
        if config.lora.rank:
            export_peft(
                model_parts, adapter, config.lora, str(source), peft, dtype, is_writer=is_writer
            )
