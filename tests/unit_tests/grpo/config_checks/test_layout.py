"""Layouts that cannot work are refused before anything starts, by the names of their keys."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.layout import describe_layout, model_layout_problems
from torchtitan.grpo.models.blocks.parts import (
    GatedFeedForward,
    GroupedAttention,
    Layer,
    Layers,
    RoutedExperts,
)
from torchtitan.grpo.models.decoder import DecoderArgs

WHOLE = "tok_embeddings layers.0 layers.1 | layers.2 layers.3 norm output"
IN_SIX = "tok_embeddings | layers.0 | layers.1 | layers.2 | layers.3 | norm output"


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


def problems_of(config: JobConfig, *, has_experts: bool = False, **more: Any) -> list[str]:
    """Problems with a model of four layers."""
    experts = RoutedExperts(64, 48, num_experts=8, top_k=2)
    layer = Layer(
        GroupedAttention(64, 8, 4, 8), experts if has_experts else GatedFeedForward(64, 48)
    )
    args = DecoderArgs(dim=64, vocab_size=128, layers=Layers.of([layer] * 4), **more)
    model = SimpleNamespace(path=Path("model"), model_args=args)
    return list(model_layout_problems(config, model))  # pyright: ignore


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
        (IN_SIX, "Interleaved1F1B", None),
    ],
)  # fmt: skip
def test_stages_that_are_named_must_be_the_whole_model(stages, schedule, words):
    config = configured("pipeline_parallel_degree=2", f"pipeline_parallel_schedule={schedule}")
    config.parallelism.module_fqns_per_model_part = [s.split() for s in stages.split("|")]
    problems = problems_of(config)
    assert len(problems) == (0 if words is None else 1)
    for problem in problems:
        assert "parallelism.module_fqns_per_model_part" in problem
        assert str(words) in problem


COMPILED = "tensor_parallel_degree=2 compile.enable=true activation_checkpoint.mode"


@pytest.mark.parametrize(
    ("settings", "sizes", "keys"),
    [
        ("tensor_parallel_degree=3", {}, ["tensor_parallel_degree (3)", "8 attention heads"]),
        ("context_parallel_degree=3", {}, ["context_parallel_degree (3)", "8 attention heads"]),
        ("pipeline_parallel_degree=8 pipeline_parallel_schedule=ZBVZeroBubble", {},
         ["parallelism.pipeline_parallel_degree = 8", "ZBVZeroBubble"]),
        ("expert_parallel_degree=2", {}, ["parallelism.expert_parallel_degree (2)", "got 0"]),
        ("expert_parallel_degree=3", {"has_experts": True}, ["expert_parallel_degree (3)", "got 8"]),
        ("expert_parallel_degree=2", {"has_experts": True, "enable_weight_tying": True},
         ["parallelism.expert_parallel_degree", "tied embeddings"]),
        (f"{COMPILED}=full", {},
         ["activation_checkpoint.mode", "compile.enable", "tensor_parallel_degree = 2"]),
        (f"{COMPILED}=full", {"has_experts": True}, []),  # these checkpoints are outside of compile
        (f"{COMPILED}=memory_budget", {}, []),
    ],
)  # fmt: skip
def test_a_layout_that_the_model_cannot_have_is_refused_by_its_keys(settings, sizes, keys):
    problems = problems_of(configured(*settings.split()), **sizes)
    assert len(problems) == (1 if keys else 0)
    assert all(key in problems[0] for key in keys)


def test_a_layout_is_described_as_a_product(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    settings = ["pipeline_parallel_degree=2", "tensor_parallel_degree=2"]
    assert describe_layout(configured(*settings)) == "8 = 2 stages x 2 shards x 2 tensor parts"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert describe_layout(configured()) == "1"
