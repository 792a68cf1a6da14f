"""Layouts that cannot work are refused before anything starts, by the names of their keys."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan.grpo.config_checks.layout import (
    describe_layout,
    layout_problems,
    model_layout_problems,
)
from torchtitan.grpo.job_config import JobConfig

ALONE = "data_parallel_shard_degree=1"
PIPELINE = [ALONE, "pipeline_parallel_degree=2"]
WHOLE = "tok_embeddings layers.0 layers.1 | layers.2 layers.3 norm output"
IN_SIX = "tok_embeddings | layers.0 | layers.1 | layers.2 | layers.3 | norm output"
ZERO_BUBBLE = [*PIPELINE, "pipeline_parallel_schedule=ZBVZeroBubble"]


def configured(*settings: str) -> JobConfig:
    """Makes a configuration with ``table.key=value``, or ``key=value`` of ``[parallelism]``."""
    config = JobConfig()
    config.activation_checkpoint.mode = "none"
    for setting in settings:
        name, _, text = setting.partition("=")
        table, _, key = name.rpartition(".")
        section = getattr(config, table or "parallelism")
        old = getattr(section, key)
        setattr(section, key, text == "true" if isinstance(old, bool) else type(old)(text))
    return config


@pytest.mark.parametrize(
    ("num_ranks", "settings", "keys"),
    [
        (2, ["tensor_parallel_degree=0"], ["tensor_parallel_degree", "got 0"]),
        (4, ["data_parallel_shard_degree=3"], ["data_parallel_shard_degree (3)", "ranks, 4"]),
        (3, ["context_parallel_degree=2"], ["ranks, 3", "context_parallel_degree (2)"]),
        (
            2,
            ["tensor_parallel_degree=2", "training.seq_len=33"],
            ["training.seq_len (33)", "parallelism.tensor_parallel_degree"],
        ),
        (1, ["training.global_batch_size=8"], ["training.global_batch_size", "got 8"]),
        (
            1,
            ["enable_async_tensor_parallel=true"],
            ["parallelism.enable_async_tensor_parallel", "compile.enable"],
        ),
        (
            2,
            ["data_parallel_replicate_degree=2", "expert_parallel_degree=2"],
            ["parallelism.expert_parallel_degree (2)", "parallelism.data_parallel_shard_degree"],
        ),
        (
            4,
            ["tensor_parallel_degree=4", "expert_parallel_degree=2", "expert_tensor_parallel_degree=2"],
            ["parallelism.expert_tensor_parallel_degree", "tensor_parallel_degree (4)", "got 2"],
        ),
        (
            2,
            ["expert_parallel_comm_backend=deepep"],
            ["parallelism.expert_parallel_comm_backend", "'deepep'"],
        ),
        (
            1,
            ["activation_checkpoint.mode=memory_budget"],
            ["activation_checkpoint.mode = 'memory_budget'", "compile.enable"],
        ),
        (
            1,
            ["compile.enable=true", "activation_checkpoint.mode=memory_budget", "activation_checkpoint.memory_budget=7"],
            ["activation_checkpoint.memory_budget must be between 0", "got 7"],
        ),
        (1, ["activation_checkpoint.mode=some"], ["activation_checkpoint.mode", "got 'some'"]),
        (
            1,
            ["activation_checkpoint.mode=selective", "activation_checkpoint.selective_ac_option=all"],
            ["activation_checkpoint.selective_ac_option", "got 'all'"],
        ),
        (
            2,
            [*PIPELINE, "pipeline_parallel_schedule=Spiral"],
            ["parallelism.pipeline_parallel_schedule", "ZBVZeroBubble", "got 'Spiral'"],
        ),
        (
            2,
            [*PIPELINE, "pipeline_parallel_microbatch_size=3"],
            ["training.local_batch_size (8)", "parallelism.pipeline_parallel_microbatch_size (3)"],
        ),
        (
            2,
            ["context_parallel_degree=2", "context_parallel_rotate_method=alltoall"],
            ["parallelism.context_parallel_rotate_method", "got 'alltoall'", "all-to-all"],
        ),
        (
            2,
            ["context_parallel_degree=2", "context_parallel_load_balancer=ptrr"],
            ["parallelism.context_parallel_load_balancer", "got 'ptrr'", "'headtail'"],
        ),
        (
            2,
            [*PIPELINE, "pipeline_parallel_schedule_csv=schedule.csv"],
            ["parallelism.pipeline_parallel_schedule_csv", "got 'schedule.csv'"],
        ),
        (
            2,
            [*PIPELINE, "pipeline_parallel_first_stage_less_layers=-1"],
            ["parallelism.pipeline_parallel_first_stage_less_layers", "at least 0, got -1"],
        ),
        (
            2,
            [*ZERO_BUBBLE, "compile.enable=true", "compile.backend=aot_eager"],
            ["compile.backend", "parallelism.pipeline_parallel_schedule", "got 'aot_eager'"],
        ),
        (
            2,
            [*ZERO_BUBBLE, "compile.enable=true", "grpo.pipeline_offload=0.5"],
            ["grpo.pipeline_offload", "compile.enable", "got 0.5"],
        ),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_work_is_refused_by_its_keys(num_ranks, settings, keys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    (problem,) = layout_problems(configured(*settings))
    for key in keys:
        assert key in problem


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (1, []),
        (8, ["tensor_parallel_degree=2", "expert_parallel_degree=4"]),
        (
            8,
            ["tensor_parallel_degree=2", "expert_parallel_degree=4", "expert_tensor_parallel_degree=2"],
        ),
        (2, [*ZERO_BUBBLE, "activation_checkpoint.mode=full"]),
        (2, [*ZERO_BUBBLE, "compile.enable=true", "activation_checkpoint.mode=full"]),
        (2, [*ZERO_BUBBLE, "activation_checkpoint.mode=selective"]),  # by layers
        (2, [*PIPELINE, "pipeline_parallel_schedule=Interleaved1F1B", "training.local_batch_size=5"]),
        (2, [*PIPELINE, "compile.enable=true", "activation_checkpoint.mode=memory_budget"]),
    ],
)  # fmt: skip
def test_a_layout_that_works_is_let_through(num_ranks, settings, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    assert list(layout_problems(configured(*settings))) == []


def test_a_stage_needs_a_layer(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = configured(*PIPELINE)
    config.parallelism.pipeline_parallel_layers_per_stage = 0
    (problem,) = layout_problems(config)
    assert "parallelism.pipeline_parallel_layers_per_stage must be at least 1, got 0" in problem


@pytest.mark.parametrize(
    ("stages", "schedule", "words"),
    [
        ("tok_embeddings layers.0 | layers.1 output", "1F1B", "lacks layers.2, layers.3, norm."),
        ("layers.0 layers.1 tok_embeddings | layers.2 layers.3 norm output", "1F1B", "this order"),
        ("tok_embeddings layers.0 layers.1 | layers.1 layers.2 layers.3 norm output", "1F1B", "once"),
        ("tok_embeddings layers.0 layers.1 | layers.2 layers.3 layers.4 norm output", "1F1B", "3, norm"),
        (WHOLE, "Interleaved1F1B", "the same number of stages, at least 2, on each of 2 ranks, got 2"),
        (f"{WHOLE} | ", "1F1B", "got 3 stages"),
        (IN_SIX, "ZBVZeroBubble", "ZBVZeroBubble needs exactly 2 stages on each of 2 ranks, got 6"),
        ("tok_embeddings layers.0 | layers.1 layers.2 | layers.3 norm output", "auto", "at least 1, on each"),
        (WHOLE, "auto", None),
        (IN_SIX, "auto", None),
        (WHOLE, "1F1B", None),
        (IN_SIX, "Interleaved1F1B", None),
    ],
)  # fmt: skip
def test_stages_that_are_named_must_be_the_whole_model(stages, schedule, words):
    config = configured(*PIPELINE, f"pipeline_parallel_schedule={schedule}")
    config.parallelism.module_fqns_per_model_part = [s.split() for s in stages.split("|")]
    args = SimpleNamespace(n_heads=8, n_layers=4, hidden_dim=48)
    model = SimpleNamespace(path=Path("model"), model_args=args)
    problems = list(model_layout_problems(config, model))  # pyright: ignore
    assert len(problems) == (0 if words is None else 1)
    for problem in problems:
        assert "parallelism.module_fqns_per_model_part" in problem
        assert str(words) in problem


@pytest.mark.parametrize(
    ("settings", "model_args", "keys"),
    [
        (["tensor_parallel_degree=3"], {}, ["tensor_parallel_degree (3)", "8 attention heads"]),
        (["context_parallel_degree=3"], {}, ["context_parallel_degree (3)", "8 attention heads"]),
        (
            ["pipeline_parallel_degree=8", "pipeline_parallel_schedule=ZBVZeroBubble"],
            {},
            ["parallelism.pipeline_parallel_degree = 8", "ZBVZeroBubble"],
        ),
        (["expert_parallel_degree=2"], {}, ["parallelism.expert_parallel_degree (2)", "got 0"]),
        (
            ["expert_parallel_degree=3"],
            {"moe_enabled": True},
            ["parallelism.expert_parallel_degree (3)", "got 8"],
        ),
        (
            ["expert_parallel_degree=2"],
            {"moe_enabled": True, "enable_weight_tying": True},
            ["parallelism.expert_parallel_degree", "tied embeddings"],
        ),
        (
            ["tensor_parallel_degree=2", "compile.enable=true", "activation_checkpoint.mode=full"],
            {},
            ["activation_checkpoint.mode", "compile.enable", "tensor_parallel_degree = 2"],
        ),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused_by_its_keys(settings, model_args, keys):
    args = {
        "n_heads": 8,
        "n_kv_heads": 4,
        "n_layers": 4,
        "moe_args": SimpleNamespace(num_experts=8),
    }
    # What dense and sparse models have in common.
    args |= {"hidden_dim": 48, "vocab_size": 128, "dim": 64, "moe_inter_dim": 48}
    model = SimpleNamespace(path=Path("model"), model_args=SimpleNamespace(**args | model_args))
    (problem,) = model_layout_problems(configured(*settings), model)  # pyright: ignore
    for key in keys:
        assert key in problem


@pytest.mark.parametrize(
    ("mode", "is_moe"), [("memory_budget", False), ("none", False), ("full", True)]
)
def test_a_compiled_checkpoint_without_sharded_tensors_is_let_through(mode, is_moe):
    args = SimpleNamespace(
        n_heads=8, n_layers=4, hidden_dim=48, dim=64, moe_inter_dim=48, moe_enabled=is_moe
    )
    model = SimpleNamespace(path=Path("model"), model_args=args)
    settings = ["tensor_parallel_degree=2", "compile.enable=true"]
    config = configured(*settings, f"activation_checkpoint.mode={mode}")
    assert list(model_layout_problems(config, model)) == []  # pyright: ignore


def test_a_layout_is_described_as_a_product(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    settings = ["pipeline_parallel_degree=2", "tensor_parallel_degree=2"]
    assert describe_layout(configured(*settings)) == "8 = 2 stages x 2 shards x 2 tensor parts"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert describe_layout(configured()) == "1"
