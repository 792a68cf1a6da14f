# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The estimated memory of a training step, held against what a real model keeps."""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.rows import Sample, build_rows
from torchtitan.grpo.models.checkpointing import apply_checkpointing
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.training.memory_estimate import (
    TrainingMemory,
    available_bytes,
    estimate_memory,
)
from torchtitan.grpo.training.model_spec import hf_train_spec, parameter_shapes
from torchtitan.grpo.training.runner import model_inputs

SEQ_LEN, ROWS = 128, 2
# Sizes in the proportions of a real model: the feed-forward is three times as wide as the rest.
SIZES = {
    "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "intermediate_size": 384, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
GIB = 2**30


class FusedNorm(torch.autograd.Function):
    """Keeps what CUDA's kernel of an RMSNorm keeps. A CPU computes it in steps that keep more."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return x * inverse * weight

    @staticmethod
    def backward(ctx, *gradients):
        _, weight, inverse = ctx.saved_tensors
        return gradients[0] * inverse * weight, torch.zeros_like(weight), None


def norm_forward(self, x):
    return FusedNorm.apply(x, self.weight, self.eps)


def config_of(folder: str, **settings) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path = folder
    config.training.seq_len = SEQ_LEN
    config.training.mixed_precision_param = settings.pop("param_dtype", "float32")
    for key, value in settings.items():
        table, name = key.split("__")
        setattr(getattr(config, table), name, value)
    return config


def kept_bytes(config: JobConfig, monkeypatch) -> int:
    """Returns the bytes that a real model holds between its forward and its backward pass."""
    monkeypatch.setattr(nn.RMSNorm, "forward", norm_forward)
    hf_model = read_hf_model(config.model.hf_assets_path)
    hf_model.model_args.update_from_config(config)
    model = hf_train_spec(hf_model, config).model_cls(hf_model.model_args)
    with torch.no_grad():
        model.init_weights()
    caches = record_caches(monkeypatch)
    if config.activation_checkpoint.mode != "none":
        apply_checkpointing(model, config)
    tokens = torch.arange(SEQ_LEN - 8, dtype=torch.int32).numpy()
    samples = [Sample(tokens[:4], tokens[4:], torch.zeros(len(tokens) - 4).numpy())] * ROWS
    rows = build_rows(samples, [[i] for i in range(ROWS)], SEQ_LEN)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(rows.tokens, **model_inputs(rows))
    for cache in caches:
        for kept in tree_leaves([*cache.storage.values()]):
            tensor = getattr(kept, "val", kept)
            if isinstance(tensor, torch.Tensor):
                pack(tensor)
    return sum(storage.nbytes() for storage in storages.values())


def record_caches(monkeypatch) -> list:
    """Returns a list that receives what holds the kept results of each checkpointed block."""
    make, caches = torch.utils.checkpoint.create_selective_checkpoint_contexts, []

    def record(*arguments):
        contexts = make(*arguments)
        caches.append(contexts[0])
        return contexts

    monkeypatch.setattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts", record)
    return caches


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(
    ("mode", "option"), [("none", "op"), ("full", "op"), ("selective", "2"), ("selective", "op")]
)
def test_the_activations_of_a_real_model_are_within_a_tenth(
    kind, mode, option, make_model, monkeypatch
):
    sizes = SIZES if kind == "qwen3" else {k: v for k, v in SIZES.items() if k != "head_dim"}
    found, expected = [], []
    for layers in (2, 6):
        _, folder = make_model(kind, **sizes, num_hidden_layers=layers)
        config = config_of(
            folder,
            activation_checkpoint__mode=mode,
            activation_checkpoint__selective_ac_option=option,
        )
        args = read_hf_model(folder).model_args
        shapes = parameter_shapes(config, read_hf_model(folder))
        memory = estimate_memory(config, shapes, args, num_ranks=1)
        expected.append(memory.per_token[mode] * SEQ_LEN * ROWS)
        found.append(kept_bytes(config, monkeypatch))
    # What does not grow with the layers lives at another time, or does not depend on the tokens.
    assert expected[1] - expected[0] == pytest.approx(found[1] - found[0], rel=0.1)


def estimate(folder: str, num_ranks: int = 1, **settings) -> TrainingMemory:
    config = config_of(folder, param_dtype="bfloat16", **settings)
    model = read_hf_model(folder)
    return estimate_memory(config, parameter_shapes(config, model), model.model_args, num_ranks)


def test_states_are_counted_by_hand(make_model):
    model, folder = make_model("qwen3", **SIZES, num_hidden_layers=2)
    number = sum(p.numel() for p in model.parameters())
    one = estimate(folder)
    assert (one.parameters, one.gradients, one.optimizer) == (4 * number, 4 * number, 8 * number)
    assert (one.whole_parameters, one.whole_gradients) == (2 * number, 4 * number)
    eight = estimate(folder, 8)
    assert eight.parameters == pytest.approx(4 * number / 8, rel=0.01)
    assert eight.whole_parameters == 2 * number
    # On one rank gathered parameters and unreduced gradients replace others of the same size.
    assert one.kept("keep_all") == 0
    assert eight.kept("keep_parameters") == 2 * number
    assert eight.kept("keep_all") == 2 * number + 4 * number - eight.gradients
    never = estimate(folder, 8, parallelism__fsdp_reshard_after_forward="never")
    assert never.fixed("free") == eight.fixed("keep_parameters")
    assert never.kept("keep_parameters") == 0
    tensor = estimate(folder, 2, parallelism__tensor_parallel_degree=2)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert tensor.parameters == 4 * (matrices // 2 + number - matrices)
    frozen = estimate(folder, grpo__kl_coef=0.1)
    assert frozen.reference == 4 * number
    valued = estimate(folder, grpo__advantage="gae")
    backbone = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("lm_head"))
    assert (valued.critic, valued.critic_optimizer) == (8 * backbone, 8 * backbone)
    assert valued.fixed("free") == one.fixed("free") + 16 * backbone
    together, apart = (
        estimate(
            folder, 2, grpo__advantage="gae", grpo__pipeline_fill_gaps=fills,
            parallelism__pipeline_parallel_degree=2, parallelism__pipeline_parallel_schedule="1F1B",
        )
        for fills in (True, False)
    )  # fmt: skip
    assert together.whole_gradients == 2 * apart.whole_gradients
    held = together.per_token["none"] - apart.per_token["none"]
    assert 0.2 < held / together.per_token["none"] < 0.4, "three microbatches instead of two"
    waiting = [
        each.resting(offloads_optimizer=offloads) for each in (valued, one) for offloads in (0, 1)
    ]
    assert waiting[0] - waiting[2] == 12 * backbone and waiting[1] - waiting[3] == 4 * backbone


def test_parameters_are_kept_before_gradients_and_both_only_where_they_fit(make_model):
    _, folder = make_model("qwen3", **SIZES, num_hidden_layers=2)
    memory = replace(estimate(folder, 8), whole_parameters=2 * GIB, whole_gradients=4 * GIB)
    free, tokens = memory.total("none", 1000, "free"), 1000
    kept = [memory.choose_kept("none", tokens, free + x * GIB) for x in (0, 1, 2, 5, 6)]
    assert kept == ["free", "free", "keep_parameters", "keep_parameters", "keep_all"]
    available = memory.fixed("free") + round(1000 * memory.per_token["none"])
    assert memory.largest_microbatch("none", "free", available) == pytest.approx(1000, abs=1)
    assert memory.largest_microbatch("none", "keep_all", available) == 0


def test_a_part_of_the_device_is_reserved():
    assert available_bytes(100 * GIB) == 90 * GIB
    assert available_bytes(100 * GIB, servers_share=0.4) == 50 * GIB


def test_experts_adapters_and_stages_are_divided_as_the_layout_says(make_model):
    model, folder = make_model("qwen3_mixed")
    number = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert 0.2 * number < experts < number
    parted = estimate(folder, 4, parallelism__expert_parallel_degree=4)
    assert parted.parameters == pytest.approx(number, rel=0.02)  # 4 bytes, 4 ranks
    assert parted.whole_parameters == 2 * (number - experts + experts // 4)
    adapted = estimate(folder, lora__rank=2, lora__base_dtype="bfloat16")
    assert adapted.gradients < adapted.parameters / 10
    assert adapted.whole_gradients == adapted.gradients
    assert adapted.kept("keep_all") == 0
    _, folder = make_model("qwen3", **SIZES, num_hidden_layers=6)
    whole = estimate(folder)
    stage = estimate(
        folder, 2, parallelism__pipeline_parallel_degree=2,
        parallelism__pipeline_parallel_schedule="1F1B",
    )  # fmt: skip
    assert whole.parameters / 2 <= stage.parameters < 0.6 * whole.parameters
    # The first of two ranks holds half of the layers, for two microbatches and half more.
    blocks = whole.per_token["full"], stage.per_token["full"]
    assert blocks[0] < blocks[1] < 2 * blocks[0]
    halves = estimate(folder, 4, parallelism__context_parallel_degree=4)
    assert halves.per_token["none"] == whole.per_token["none"] / 4
