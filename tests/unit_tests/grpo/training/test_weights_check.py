# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Model directories: what is read of them is what the model was saved with, or they are refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from torchtitan.grpo import entry
from torchtitan.grpo.config_manager import load_config
from torchtitan.grpo.inference.embedded.model import load_model
from torchtitan.grpo.models.hf_config import ModelError, read_hf_model
from torchtitan.grpo.models.hf_weights import load_hf_weights, named_parameters, write_hf
from torchtitan.grpo.training.weights_check import build_without_memory, check_weights

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UP = "model.layers.0.mlp.up_proj"
EMBEDDING, OUTPUT, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path, repository: Path) -> Path:
    """A copy of the shipped model, which a test changes."""
    return Path(shutil.copytree(repository / "assets/reverse_digits/model", tmp_path / "model"))


@pytest.fixture
def tensors(folder: Path) -> Tensors:
    return load_file(folder / WEIGHTS)


def save(tensors: Tensors, file: Path) -> None:
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, file, {"format": "pt"})


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def settings(folder: Path, *more: str) -> list[str]:
    return [
        *(f"--model.hf_assets_path={folder}", "--prompts.path=assets/reverse_digits/train.jsonl"),
        *("--reward.functions=exact_match", "--training.seq_len=64", "--rollout.max_new_tokens=8"),
        *("--inference.kind=embedded", "--inference.launch", "--training.steps=1", *more),
    ]


def check(folder: Path, *more: str) -> list[str]:
    """Returns what is said about weights that are used."""
    config = load_config(settings(folder, *more))
    return check_weights(config, read_hf_model(config.model.hf_assets_path))[1]


def trained(folder: Path) -> Tensors:
    """Returns the weights with which a run would begin, by their Hugging Face names."""
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
    """Returns the weights that the embedded server would serve."""
    return load_model(str(folder), "cpu", "float32").state_dict()


def wrong(found: Tensors, wanted: Tensors) -> list[str]:
    return [name for name in found if not torch.equal(found[name].float(), wanted[name].float())]


# What lies in place of, or beside, one weight: names end with ``+`` if the weight itself stays.
FP8 = torch.float8_e4m3fn
QUANTISED: dict[str, dict[str, torch.Tensor]] = {
    "fp8 with scales": {".weight": torch.ones(256, 96).to(FP8), ".weight_scale_inv": torch.ones(2, 1)},
    "fp8 e5m2 alone": {".weight": torch.ones(256, 96).to(torch.float8_e5m2)},
    "int8 alone": {".weight": torch.ones(256, 96, dtype=torch.int8)},
    "bool alone": {".weight": torch.ones(256, 96, dtype=torch.bool)},
    "int64 alone": {".weight": torch.ones(256, 96, dtype=torch.int64)},
    "llm.int8 with SCB": {".weight": torch.ones(256, 96, dtype=torch.int8), ".SCB": torch.ones(256)},
    "bitsandbytes nf4": {
        ".weight": torch.ones(12288, 1, dtype=torch.uint8),
        ".weight.absmax": torch.ones(384),
        ".weight.quant_map": torch.ones(16),
        ".weight.quant_state.bitsandbytes__nf4": torch.ones(8, dtype=torch.uint8),
    },
    "gptq": {
        ".qweight": torch.ones(12, 256, dtype=torch.int32),
        ".qzeros": torch.ones(1, 32, dtype=torch.int32),
        ".scales": torch.ones(1, 256, dtype=torch.float16),
        ".g_idx": torch.ones(96, dtype=torch.int32),
    },
    "hqq in floats": {".W_q": torch.ones(256, 96), ".zero": torch.ones(1), ".scale": torch.ones(1)},
    "compressed-tensors": {
        ".weight_packed": torch.ones(256, 12, dtype=torch.int32),
        ".weight_scale": torch.ones(256, 1),
        ".weight_shape": torch.ones(2, dtype=torch.int64),
    },
    "torchao": {".weight:_data": torch.ones(256, 96, dtype=torch.int8), ".weight:_scale": torch.ones(1)},
    "mxfp4": {"_blocks": torch.ones(256, 48, dtype=torch.uint8), "_scales": torch.ones(256, 3).byte()},
    "scale beside a plain weight": {"+.weight_scale": torch.ones(1)},
    "zero point beside a plain weight": {"+.weight_zero_point": torch.ones(1, dtype=torch.int8)},
    "adapters that were not merged": {"+.lora_A.weight": torch.ones(2, 96)},
}  # fmt: skip


@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_weights_are_refused_wherever_they_are_read(case, folder, tensors):
    parts = QUANTISED[case]
    if not any(name.startswith("+") for name in parts):
        del tensors[f"{UP}.weight"]
    save(tensors | {UP + n.removeprefix("+"): t for n, t in parts.items()}, folder / WEIGHTS)
    reference = ("--grpo.kl_coef=0.1", f"--grpo.ref_model_path={folder}")
    sound = Path("assets/reverse_digits/model")
    with pytest.raises(ModelError, match=rf"hf_assets_path .*quantised: {UP}.*bfloat16"):
        check(folder)
    with pytest.raises(ModelError, match=rf"grpo.ref_model_path .*quantised: {UP}"):
        check(sound, *reference)
    with pytest.raises(
        ValueError, match=rf"--model-path .*(quantised: .*{UP}|lack the tensor {UP})"
    ):
        load_model(str(folder), "cpu", "float32")


@pytest.mark.parametrize(
    "name", [EMBEDDING, OUTPUT, NORM, "model.layers.3.self_attn.k_norm.weight"]
)
def test_each_weight_must_be_plain(name, folder, tensors):
    save(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / WEIGHTS)
    with pytest.raises(ModelError, match=rf"quantised: {name} is F8_E4M3"):
        check(folder)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"\(gptq\)"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsand"),
        ({"quantization_config": {"load_in_8bit": False}}, "load_in_8bit"),
        ({"quantization_config": "awq"}, "'awq'"),
        ({"compression_config": {"quant_method": "sparseml"}}, "compression_config"),
    ],
)  # fmt: skip
def test_a_config_that_describes_quantised_weights_is_refused(values, named, folder):
    change(folder / "config.json", **values)
    with pytest.raises(ModelError, match=rf"hf_assets_path must be .*{named}.*bfloat16"):
        check(folder)
    with pytest.raises(ValueError, match=rf"--model-path must be .*{named}"):
        load_model(str(folder), "cpu", "float32")
    assert read_hf_model(folder, may_be_quantised=True).vocab_size == 128, "for vLLM to evaluate"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}, None),
        ({"model.embeddings.position_ids": torch.arange(4)}, None),
        ({"model.layers.0.self_attn.k_scale": torch.ones(1)}, "model.layers.0.self_attn.k_scale"),
        ({"value_head.weight": torch.ones(1, 96)}, "value_head.weight"),
        ({f"{UP}.bias": torch.ones(256)}, f"{UP}.bias"),
    ],
)
@pytest.mark.parametrize("value", [None, {}])
def test_what_the_model_does_not_have_is_named_and_not_read(extra, said, value, folder, tensors):
    change(folder / "config.json", quantization_config=value)
    save(tensors | extra, folder / WEIGHTS)
    notes = check(folder)
    assert said is None or (len(notes) == 1 and f"does not have 1 of the tensors, which are not read: {said}" in notes[0])  # fmt: skip
    assert said is not None or notes == []
    assert wrong(trained(folder), tensors) == wrong(served(folder), tensors) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_each_plain_type_are_read(dtype, folder, tensors):
    rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save(rounded, folder / WEIGHTS)
    assert check(folder) == []
    assert wrong(trained(folder), rounded) == wrong(served(folder), rounded) == []


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = sorted(tensors)
    first = names[: len(names) // 2]
    return {n: tensors[n] for n in first}, {n: tensors[n] for n in names if n not in first}


def split(folder: Path, tensors: Tensors) -> dict[str, str]:
    """Saves the model in two files with an index; returns what the index says."""
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


def other(tensors: Tensors) -> Tensors:
    return {name: tensor + 5 for name, tensor in tensors.items()}


def _stale_shard(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    save(other(halves(tensors)[1]), folder / "model-00003-of-00003.safetensors")


def _stale_shard_that_sorts_first(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    save(other(tensors), folder / "a.safetensors")


def _single_file_beside_an_index(folder: Path, tensors: Tensors) -> None:
    split(folder, other(tensors))
    save(tensors, folder / WEIGHTS)


def _single_file_beside_another(folder: Path, tensors: Tensors) -> None:
    save(other(tensors), folder / "model.fp16.safetensors")


def _index_of_a_single_file(folder: Path, tensors: Tensors) -> None:
    write_index(folder, dict.fromkeys(tensors, WEIGHTS))


def _index_without_all_tensors(folder: Path, tensors: Tensors) -> None:
    weight_map = split(folder, tensors)
    del weight_map[NORM]
    write_index(folder, weight_map)


def _files_without_digits(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    for old, new in zip(FILES, ("front.safetensors", "back.safetensors"), strict=True):
        (folder / old).rename(folder / new)
    first, second = halves(tensors)
    write_index(
        folder,
        dict.fromkeys(first, "front.safetensors") | dict.fromkeys(second, "back.safetensors"),
    )


def _files_in_a_folder(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    (folder / "weights").mkdir()
    for file in FILES:
        (folder / file).rename(folder / "weights" / file)
    first, second = halves(tensors)
    write_index(
        folder,
        dict.fromkeys(first, f"weights/{FILES[0]}") | dict.fromkeys(second, f"weights/{FILES[1]}"),
    )


def _consolidated_beside(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    save({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")


def _damaged_file_beside_an_index(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"{")


def _repeated_in_the_later_file(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    first, second = halves(tensors)
    save(first | {NORM: tensors[NORM] + 5}, folder / FILES[0])
    assert NORM in second


def _adapters_beside(folder: Path, tensors: Tensors) -> None:
    split(folder, tensors)
    save({"base_model.model.x": torch.ones(1)}, folder / "adapter_model.safetensors")


READ: dict[str, tuple[Callable[[Path, Tensors], None], str | None]] = {
    f.__name__.strip("_"): (f, said)
    for f, said in [
        (_stale_shard, "model-00003-of-00003.safetensors also holds 24"),
        (_stale_shard_that_sorts_first, "a.safetensors also holds 47"),
        (_single_file_beside_an_index, f"{FILES[0]} also holds 23"),
        (_single_file_beside_another, "model.fp16.safetensors also holds 47"),
        (_index_of_a_single_file, None),
        (_index_without_all_tensors, None),
        (_files_without_digits, None),
        (_files_in_a_folder, None),
        (_consolidated_beside, None),
        (_damaged_file_beside_an_index, None),
        (_repeated_in_the_later_file, None),
        (_adapters_beside, None),
    ]
}


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
    second = halves(tensors)[1]
    save({n: t for n, t in second.items() if n != NORM}, folder / FILES[1])


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


def _truncated(folder: Path, _: Tensors) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def _dangling(folder: Path, _: Tensors) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../../blobs/absent")


def _adapters_alone(folder: Path, tensors: Tensors) -> None:
    _instead(None)(folder, tensors)
    save({"base_model.model.x": torch.ones(1)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "lab/base"}')


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
REFUSED: dict[str, tuple[Callable[[Path, Tensors], None], str]] = {
    "two files without an index": (_two_files_without_an_index, f"once, but .* is in {FILES[1]} and old"),
    "no such file": (_no_such_file, f"{FILES[1]}, which .*index.json names, is absent"),
    "file lacks a tensor": (_file_lacks_a_tensor, f"lack the tensor {NORM}.*{FILES[1]} holds it"),
    "two files of the index": (_two_files_of_the_index, f"is in {FILES[0]} and {FILES[1]}"),
    "leaves the folder": (_index_with(lambda m: m | {NORM: f"../{FILES[0]}"}), "inside its folder"),
    "absolute": (_index_with(lambda m: m | {NORM: f"/{FILES[0]}"}), "inside its folder"),
    "names another format": (_index_with(lambda m: m | {NORM: "x.bin"}), "safetensors files inside"),
    "no text": (_index_with(lambda m: m | {NORM: 7}), "inside its folder, got '7'"),
    "list": (_index_with(list), "object weight_map"),
    "empty": (_index_with(lambda _: {}), "object weight_map"),
    "damaged index": (_instead(INDEX, b'{"weight_map": {"a'), "index.json failed"),
    "index that is a pointer": (_instead(INDEX, POINTER), "git lfs pull"),
    "truncated": (_truncated, "complete safetensors files"),
    "pointer": (_instead(WEIGHTS, POINTER), "git lfs pull"),
    "nothing": (_instead(None), "found none"),
    "link to nothing": (_dangling, "link to a file that is absent"),
    "gguf": (_instead("model-q4.gguf", b"GGUF"), "GGUF"),
    "bin": (_instead("pytorch_model.bin"), "save_pretrained"),
    "consolidated": (_instead("consolidated.00.pth"), "release for transformers"),
    "adapters": (_adapters_alone, "adapters alone .* base model lab/base. Merge them"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_make_up_a_model_are_refused(case, folder, tensors):
    prepare, message = REFUSED[case]
    prepare(folder, tensors)
    with pytest.raises(ModelError, match=f"model.hf_assets_path.*{message}"):
        check(folder)
    with pytest.raises(ValueError, match="--model-path"):
        load_model(str(folder), "cpu", "float32")


@pytest.mark.parametrize(
    ("config", "change_weights", "message"),
    [
        ({"tie_word_embeddings": True}, lambda t: t, f"its {OUTPUT} differs from {EMBEDDING}"),
        (
            {"tie_word_embeddings": True},
            lambda t: t | {OUTPUT: t[EMBEDDING] + (torch.arange(128) == 127).float()[:, None] * 1e-6},
            "differs",
        ),
        ({"tie_word_embeddings": True}, lambda t: t | {OUTPUT: t[EMBEDDING][:5]}, "differs"),
        ({"tie_word_embeddings": True}, lambda t: t | {OUTPUT: t[EMBEDDING].to(FP8)}, "differs"),
        ({}, lambda t: {n: v for n, v in t.items() if n != OUTPUT}, f"lack .* {OUTPUT}.*= true"),
        (None, lambda t: {n: v for n, v in t.items() if n != OUTPUT}, f"lack .* {OUTPUT}.*= true"),
        ({"tie_word_embeddings": True}, lambda t: {n: v for n, v in t.items() if n != EMBEDDING},
         f"lack .* {EMBEDDING}"),
        ({"tie_word_embeddings": "true"}, lambda t: t, "must be true or false, got 'true'"),
        ({"tie_word_embeddings": None}, lambda t: t, "must be true or false, got nothing"),
    ],
)  # fmt: skip
def test_an_output_layer_that_contradicts_the_config_is_refused(
    config, change_weights, message, folder, tensors
):
    if config is None:  # the default of all families is false
        content = json.loads((folder / "config.json").read_text())
        del content["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(content))
    change(folder / "config.json", **config or {})
    save(change_weights(tensors), folder / WEIGHTS)
    sound = Path("assets/reverse_digits/model")
    with pytest.raises(ModelError, match=message):
        check(folder)
    if "must be true" not in message:  # the reference of a tied policy
        policy = shutil.copytree(sound, folder.with_name("policy"))
        shutil.copy(folder / "config.json", policy / "config.json")
        ends = {} if config != {"tie_word_embeddings": True} else {OUTPUT: tensors[EMBEDDING]}
        save(tensors | ends, policy / WEIGHTS)
        with pytest.raises(ModelError, match=f"grpo.ref_model_path.*{message}"):
            check(policy, "--grpo.kl_coef=0.1", f"--grpo.ref_model_path={folder}")


@pytest.mark.parametrize("has_output", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_model_may_repeat_its_embedding(has_output, dtype, folder, tensors):
    change(folder / "config.json", tie_word_embeddings=True)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors[OUTPUT] = tensors[EMBEDDING].float()
    save({n: t for n, t in tensors.items() if has_output or n != OUTPUT}, folder / WEIGHTS)
    assert check(folder) == []
    assert wrong(trained(folder), tensors) == wrong(served(folder), tensors) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (NORM, float("nan"), f"{NORM} in .* got 1 of 96 that are NaN or infinite"),
        (EMBEDDING, float("inf"), "1 of 12288 that are NaN"),
        (f"{UP}.weight", float("-inf"), "1 of 24576 that are NaN"),
        (NORM, None, f"{NORM} .*zeros alone"),
        ("model.layers.2.input_layernorm.weight", None, "zeros alone"),
        (EMBEDDING, None, "zeros alone"),
    ],
)
def test_values_that_no_training_mends_are_refused(name, value, message, folder, tensors):
    tensors[name].view(-1)[slice(None) if value is None else slice(1)] = value or 0.0
    save(tensors, folder / WEIGHTS)
    with pytest.raises(ModelError, match=message):
        trained(folder)


def test_large_values_and_layers_that_add_nothing_are_read(folder, tensors):
    tensors[f"{UP}.weight"] = torch.full((256, 96), 6e4).half()  # their sum overflows
    tensors["model.layers.3.mlp.down_proj.weight"].zero_()
    save(tensors, folder / WEIGHTS)
    assert wrong(trained(folder), tensors) == []


def test_an_export_describes_no_other_weights(folder, tensors):
    split(folder, tensors)
    change(folder / "config.json", quantization_config={})
    for name in ("adapter_config.json", "pytorch_model.bin.index.json"):
        (folder / name).write_text("{}")
    target = folder.with_name("exported")
    write_hf(tensors.items(), folder, target, torch.float32)
    assert not {"adapter_config.json", "pytorch_model.bin.index.json"} & set(os.listdir(target))
    assert check(target) == []
    exported = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
    assert wrong(exported, tensors) == []


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--lora.rank=4", "--model.hf_assets_path={model}"],
        ["--model.hf_assets_path={sound}", "--grpo.kl_coef=0.1", "--grpo.ref_model_path={model}"],
    ],
)
def test_weights_are_refused_before_an_earlier_run_is_removed(
    more, folder, tensors, repository, tmp_path, capsys
):
    save(tensors | {NORM: tensors[NORM].to(torch.int8)}, folder / WEIGHTS)
    earlier = tmp_path / "run/metrics.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("{}\n")
    sound = repository / "assets/reverse_digits/model"
    given = [option.format(model=folder, sound=sound) for option in more]
    given += [f"--job.dump_folder={earlier.parent}", "--job.overwrite"]
    status = entry.run(lambda *_: pytest.fail("nothing may be built"), settings(folder, *given))
    assert status == 2
    assert f"quantised: {NORM} is I8" in capsys.readouterr().err
    assert earlier.is_file()
