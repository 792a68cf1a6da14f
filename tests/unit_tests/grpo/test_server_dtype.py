# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rank 0 chooses the dtype of the servers that its run launches, and tells it to each of them."""

import pytest

from torchtitan.grpo import controller
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.controller import process_config, server_dtype
from torchtitan.grpo.inference.local_servers import server_command, server_specs
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.start.dry_run import describe_plan
from torchtitan.grpo.types import PromptProgress


def set_speedup(monkeypatch, speedup: float | None) -> None:
    def measure() -> float:
        assert speedup is not None, "the CPU was measured"
        return speedup

    monkeypatch.setattr(controller, "bfloat16_speedup", measure)


def launching(param: str, dtype: str = "auto", device: str = "cpu") -> JobConfig:
    config = JobConfig()
    config.training.mixed_precision_param = param  # pyright: ignore[reportAttributeAccessIssue]
    config.inference.dtype, config.inference.device = dtype, device  # pyright: ignore[reportAttributeAccessIssue]
    config.inference.launch, config.inference.kind = True, "embedded"
    config.inference.num_servers = 2
    return config


@pytest.mark.parametrize(
    ("param", "dtype", "device", "speedup", "chosen"),
    [
        ("bfloat16", "auto", "cpu", 2.0, "bfloat16"), ("bfloat16", "auto", "cpu", 1.2, "float32"),
        ("float32", "auto", "cpu", None, "float32"), ("bfloat16", "float32", "cpu", None, "float32"),
        ("float32", "bfloat16", "cpu", None, "bfloat16"), ("float32", "auto", "cuda", None, "bfloat16"),
    ],
)  # fmt: skip
def test_servers_on_a_cpu_compute_in_bfloat16_if_the_trainer_does_and_the_cpu_is_fast_at_it(
    param, dtype, device, speedup, chosen, repository, monkeypatch
):
    set_speedup(monkeypatch, speedup)
    config = launching(param, dtype, device)
    config.model.hf_assets_path = str(repository / "assets/reverse_digits/model")
    model = read_hf_model(config.model.hf_assets_path)
    told = process_config(config, model, 0, PromptProgress(), "")
    told.gpus = ["0"] if device == "cuda" else []
    commands = [server_command(spec, {})[0] for spec in server_specs(told, {}, [4321, 4322])]
    assert [command[command.index("--dtype") + 1] for command in commands] == [chosen] * 2


def test_a_dry_run_tells_the_dtype(monkeypatch):
    set_speedup(monkeypatch, 2.0)
    assert "2 x embedded, launched on this machine, in bfloat16" in describe_plan(
        launching("bfloat16")
    )
    assert "launched on this machine, in float32" in describe_plan(launching("float32"))


def test_nothing_is_chosen_for_servers_that_others_start(monkeypatch):
    set_speedup(monkeypatch, None)
    config = launching("bfloat16")
    config.inference.launch = False
    assert server_dtype(config) == "auto"
