# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Adapters beside experts are PEFT's, with and without expert parallelism."""

from typing import Any

import pytest
import torch
from hf_reference import ROWS, SEQUENCES, reference
from peft_reference import peft_model
from safetensors.torch import load_file, save_file

LORA = {
    "rank": 3,
    "alpha": 5.0,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "fsdp2 ep2": {"dp_shard": 2, "ep": 2, "base_dtype": "bfloat16"},
        "cp2 ep2": {"cp": 2, "ep": 2},
        "tp2": {"tp": 2},
        "tp2 lent to ep2": {"tp": 2, "ep": 2, "ac": "full"},
    },
    4: {
        "hsdp2x2 ep2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        "fsdp2 ep2 tp2": {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
        "pp2 fsdp2 ep2": {"pp": 2, "dp_shard": 2, "ep": 2, "schedule": "1F1B"},
    },
}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_adapters_of_attention_are_pefts(num_ranks, make_model, run_ranks, tmp_path):
    model, folder = make_model("qwen3_mixed", intermediate_size=78)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # so that a base in bfloat16 loses nothing
    model.save_pretrained(folder)
    base, _ = reference(model)
    model.zero_grad()
    adapted = peft_model(
        model, tmp_path / "adapters", LORA["rank"], LORA["alpha"], LORA["target_modules"]
    )
    logprobs, gradients = reference(adapted)
    gradients = {k.replace(".default", ""): g for k, g in gradients.items()}
    num_adapters = 3 * len(LORA["target_modules"])  # in each layer, with experts or without
    assert len(gradients) == 2 * num_adapters
    save_file(gradients, tmp_path / "gradients.safetensors")
    save_file({"model.norm.weight": model.model.norm.weight}, tmp_path / "merged.safetensors")
    results = run_ranks(
        "lora_layouts", num_ranks, model=folder, seq_len=12, sequences=SEQUENCES, rows=ROWS,
        lora=LORA, adapters=str(tmp_path / "adapters" / "adapter_model.safetensors"),
        gradients=str(tmp_path / "gradients.safetensors"), folder=str(tmp_path),
        merged=str(tmp_path / "merged.safetensors"), layouts=LAYOUTS[num_ranks],
    )  # fmt: skip
    written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    for name in LAYOUTS[num_ranks]:
        held = {key for result in results for key in result[name]["gradient_errors"]}
        assert len(held) == 2 * num_adapters, (
            "the ranks hold every adapter, and nothing else trains"
        )
        for result in (result[name] for result in results):
            for key, expected in (("base", base), ("logprobs", logprobs)):
                if result[key] is not None:
                    torch.testing.assert_close(
                        torch.tensor(result[key]), expected, atol=1e-5, rtol=1e-5, msg=name
                    )
            wrong = {k: e for k, e in result["gradient_errors"].items() if not e < 2e-5}
            assert not wrong, (name, wrong)
        exported = load_file(tmp_path / name / "adapter_model.safetensors")
        assert exported.keys() == written.keys()
        assert all(torch.equal(exported[key], written[key]) for key in written)
