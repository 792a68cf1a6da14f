# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Trainer, embedded engine and export agree with transformers on a real model.

It has 9 heads, of which 3 have keys and values, a width of 576, and tied embeddings.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from build_model import build
from engine_harness import harness
from family_layouts import gradient_errors
from hf_reference import reference
from safetensors.torch import load_file
from sharded_model import picked_sum, rows_of, runner_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchtitan.grpo.models.hf_weights import export_hf
from torchtitan.grpo.training.gradient_norm import GradientClipper

QUESTIONS = ("What is 90 plus 8?", "What is 9 plus 4?")
ANSWERS = ("90 + 8 = 98<|im_end|>", "13<|im_end|>")
TOLERANCE = 1e-4
"""Of logprobs, and of gradients relative to their norm. The errors are about 1e-5."""


def test_trainer_engine_and_export_of_a_real_model_agree_with_transformers(
    smollm2: Path, only_rank, tmp_path: Path
):
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    settings = {"add_generation_prompt": True, "return_dict": False}
    shared, other = (tokenizer.apply_chat_template(chat, **settings) for chat in chats)
    with harness(model, max_slots=1, max_length=64) as h:
        sampled = h.submit(shared, max_new_tokens=16, temperature=0.0)
        h.finish([sampled])
    model.config._attn_implementation = "sdpa"
    # float32 would add the rounding errors of transformers, which are the larger ones.
    model.requires_grad_().double()
    # The token that ends a message also pads, and transformers gives the embedding of what pads no gradient.
    model.get_input_embeddings().padding_idx = None
    with torch.no_grad():
        likeliest = model(torch.tensor([sampled.token_ids])).logits[0].argmax(-1)
    assert sampled.output_ids == likeliest[len(shared) - 1 : -1].tolist()

    # The greedy completion and an answer share their question.
    answers = [tokenizer.encode(answer) for answer in ANSWERS]
    sequences = [sampled.token_ids, shared + answers[0], other + answers[1]]
    prompts = [len(shared), len(shared), len(other)]
    logprobs, gradients = reference(model, sequences, prompts)
    built = build(str(smollm2), seq_len=128)
    layout = {"rows": [[0, 1, 2]], "sharing": [0, 0, 1], "seq_len": 128}
    rows = rows_of({"sequences": sequences, "prompts": prompts} | layout)
    runner = runner_of(built, [])
    found = runner.forward(rows)[..., 0][rows.loss_mask]
    torch.testing.assert_close(found, logprobs.float(), atol=TOLERANCE, rtol=0)
    of_engine = torch.tensor(sampled.logprobs)
    torch.testing.assert_close(found[: len(of_engine)], of_engine, atol=TOLERANCE, rtol=0)

    runner.forward_backward(rows, picked_sum(rows))
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    clipper = GradientClipper(built.parts, built.dims, max_norm=1e9)
    assert float(clipper.clip()) == pytest.approx(norm, rel=TOLERANCE)
    errors = gradient_errors(built, gradients, num_copies=1)
    assert len(errors) == 272 and max(errors.values()) < TOLERANCE, errors

    target = tmp_path / "exported"
    export_hf(built.parts, built.adapter, smollm2, target, torch.float32, is_writer=True)
    exported = load_file(next(target.glob("*.safetensors")))
    source = load_file(smollm2 / "model.safetensors")
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in source.items())
