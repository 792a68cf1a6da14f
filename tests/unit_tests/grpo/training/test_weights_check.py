# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Weights that are no plain weights of the model are refused, wherever they are read."""

import json
import os
import shutil

import pytest
import torch
from model_folders import (
    ASSETS,
    EMBEDDING,
    FP8,
    NORM,
    OUTPUT,
    UP,
    WEIGHTS,
    Tensors,
    change,
    check,
    save,
    served,
    settings,
    split,
    trained,
    wrong,
)
from transformers import AutoModelForCausalLM

from torchtitan.grpo.inference.embedded.model import load_model
from torchtitan.grpo.models.hf_config import ModelError, read_hf_model
from torchtitan.grpo.models.hf_weights import write_hf
from torchtitan.grpo.start import entry

# What lies in place of, or beside, one weight: names begin with ``+`` if the weight itself stays.
QUANTISED: dict[str, dict[str, torch.Tensor]] = {
    "fp8 with scales": {".weight": torch.ones(256, 96).to(FP8), ".weight_scale_inv": torch.ones(2, 1)},
    "fp8 e5m2 alone": {".weight": torch.ones(256, 96).to(torch.float8_e5m2)},
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
    "torchao": {".weight:_data": torch.ones(256, 96, dtype=torch.int8), ".weight:_scale": torch.ones(1)},
    "mxfp4": {"_blocks": torch.ones(256, 48, dtype=torch.uint8), "_scales": torch.ones(256, 3).byte()},
    "scale beside a plain weight": {"+.weight_scale": torch.ones(1)},
    "adapters that were not merged": {"+.lora_A.weight": torch.ones(2, 96)},
}  # fmt: skip


@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_weights_are_refused_wherever_they_are_read(case, folder, tensors):
    parts = QUANTISED[case]
    if not any(name.startswith("+") for name in parts):
        del tensors[f"{UP}.weight"]
    save(tensors | {UP + n.removeprefix("+"): t for n, t in parts.items()}, folder / WEIGHTS)
    reference = ("--grpo.kl_coef=0.1", f"--grpo.ref_model_path={folder}")
    is_adapter = "adapters" in case
    said, remedy = ("not merged", "merge_and") if is_adapter else ("quantised", "bfloat16")
    with pytest.raises(ModelError, match=rf"hf_assets_path .*{said}: {UP}.*{remedy}"):
        check(folder)
    with pytest.raises(ModelError, match=rf"grpo.ref_model_path .*{said}: {UP}"):
        check(ASSETS / "model", *reference)
    with pytest.raises(ValueError, match=rf"--model-path .*({said}: .*{UP}|lack the tensor {UP})"):
        load_model(str(folder), "cpu", "float32")


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


def test_weights_of_each_plain_type_are_read(folder, tensors):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        save(rounded, folder / WEIGHTS)
        assert check(folder) == []
        assert wrong(trained(folder), rounded) == wrong(served(folder), rounded) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_with_a_row_of_zeros_are_named_if_they_can_be_sampled(dtype, folder, tensors):
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors[EMBEDDING][127] = 0  # the tokenizer does not know it
    tensors[EMBEDDING][7, :-1] = 0
    tensors[EMBEDDING][126] = tensors[EMBEDDING][125]
    save(tensors, folder / WEIGHTS)
    assert check(folder) == []
    tensors[EMBEDDING][[0, 40, 41, 50]] = 0
    save(tensors, folder / WEIGHTS)
    (note,) = check(folder)
    named = (
        "4 of the tokenizer's tokens: '<pad>' (0), 'E' (40), 'F' (41) and 1 more; grad_norm jumps"
    )
    assert f"{EMBEDDING} is zero for {named}" in note
    assert check(folder, "--lora.rank=2") == [], "the embedding is frozen"
    assert check(folder, is_trained=False) == [], "an evaluation has no gradients"
    (folder / "tokenizer.json").unlink()
    assert check(folder) == [], "another message says that there is none"


def test_tokens_with_equal_rows_are_named_in_one_line(folder, tensors):
    tensors[EMBEDDING][[70, 80]] = tensors[EMBEDDING][60].clone()
    tensors[EMBEDDING][90, :-1] = tensors[EMBEDDING][60, :-1]
    tensors[EMBEDDING][0] = 0
    save(tensors, folder / WEIGHTS)
    zero, equal = check(folder)
    assert "zero for 1 of the tokenizer's tokens: '<pad>' (0);" in zero
    assert "equal rows among 3 of the tokenizer's tokens: 'Y' (60), 'c' (70), 'm' (80)," in equal


TIED = {"tie_word_embeddings": True}


def without(tensors: Tensors, name: str) -> Tensors:
    return {n: tensor for n, tensor in tensors.items() if n != name}


@pytest.mark.parametrize(
    ("config", "change_weights", "message"),
    [
        (TIED, lambda t: t, f"its {OUTPUT} differs from {EMBEDDING}"),
        (TIED, lambda t: t | {OUTPUT: t[EMBEDDING] + (torch.arange(128) == 127)[:, None] * 1e-6},
         "differs"),
        (TIED, lambda t: t | {OUTPUT: t[EMBEDDING][:5]}, "differs"),
        (TIED, lambda t: t | {OUTPUT: t[EMBEDDING].to(FP8)}, "differs"),
        ({}, lambda t: without(t, OUTPUT), f"lack .* {OUTPUT}.*= true"),
        (None, lambda t: without(t, OUTPUT), f"lack .* {OUTPUT}.*= true"),
        (TIED, lambda t: without(t, EMBEDDING), f"lack .* {EMBEDDING}"),
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
    with pytest.raises(ModelError, match=message):
        check(folder)
    if "must be true" not in message:  # the reference of a tied policy
        policy = shutil.copytree(ASSETS / "model", folder.with_name("policy"))
        shutil.copy(folder / "config.json", policy / "config.json")
        ends = {} if config != TIED else {OUTPUT: tensors[EMBEDDING]}
        save(tensors | ends, policy / WEIGHTS)
        with pytest.raises(ModelError, match=f"grpo.ref_model_path.*{message}"):
            check(policy, "--grpo.kl_coef=0.1", f"--grpo.ref_model_path={folder}")


@pytest.mark.parametrize("has_output", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_model_may_repeat_its_embedding(has_output, dtype, folder, tensors):
    change(folder / "config.json", tie_word_embeddings=True)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors[OUTPUT] = tensors[EMBEDDING].float()
    save(tensors if has_output else without(tensors, OUTPUT), folder / WEIGHTS)
    assert check(folder) == []
    assert wrong(trained(folder), tensors) == wrong(served(folder), tensors) == []


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (NORM, NAN, f"{NORM} in .* got 1 of 96 that are NaN or infinite"),
        (EMBEDDING, INFINITE, "1 of 12288 that are NaN"),
        (f"{UP}.weight", -INFINITE, "1 of 24576 that are NaN"),
        ("model.layers.2.input_layernorm.weight", None, "only zeros"),
        (EMBEDDING, None, "only zeros"),
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
