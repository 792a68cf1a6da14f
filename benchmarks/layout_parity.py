# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that training computes the same numbers under every parallel layout.

    python benchmarks/layout_parity.py [--json] [--quick | --all]

The benchmark trains tiny Llama 3, Qwen2, Qwen3 and Qwen3-MoE models in float32 for three optimizer
steps on one recorded batch, in one process and under each layout (gloo, up to 8 ranks). The
loss includes the correction for sampling-time logprobs, the KL penalty and the entropy bonus.
The benchmark compares the loss and the gradient norm of each SGD step, every gradient tensor of
the first step (norm of the difference over norm), every parameter and every exported weight after
the third step, the copies of a parameter that several ranks hold, and the loss of the third AdamW step. Some layouts
take four optimizer steps for each batch, with the KL penalty in the reward and a moving
reference model. Others train a critic, whose gradients and parameters are compared as well.

By default each kind of layout is run for at least one model, which takes about ten minutes on
two cores. ``--quick`` leaves out the layouts of 8 ranks, compiled models, activation
checkpointing and several updates per batch. ``--all`` runs every layout, which takes about 40
minutes. ``--only TEXT`` runs the layouts whose name contains the text, and their baselines.
``--model NAME`` runs the layouts of one model. ``--model DIRECTORY`` runs a real model, such as
that of `scripts/get_smollm2.sh`, under layouts of its own, on completions that it samples; for
SmolLM2-135M this needs 20 GiB of memory and 10 GB of disk. The benchmark prints one row for each layout, and
exits with status 1 if a layout differs. With ``--json`` the last line is a JSON object.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import finish, make_parser
from layouts import ALSO_BY_DEFAULT, REAL, Layout, layouts_of
from ranks import run_ranks
from real_model import SETTINGS, sampled_groups
from replay_settings import rollout
from safetensors.torch import load_file, save_file

from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.types import PromptProgress, RolloutGroup

TOLERANCE, REAL_TOLERANCE = 1e-5, 5e-5
"""The bounds of tiny models and of a real one. In SmolLM2-135M, rounding alone, as when one process computes
the same tokens in other rows, changes gradients by 1.3e-5."""
ADAMW_LOSS_TOLERANCE = 1e-4
TIMEOUT_SECONDS = 5400  # only ends ranks that hang: a busy machine is several times slower
# Starting ranks is slow, but the process groups of each layout and their threads stay until the
# ranks end.
JOBS_PER_START = 6
TENSORS = ("gradients", "parameters", "exported")
SEQ_LEN = 96
VOCAB_SIZE = 131  # not divisible by the degrees of tensor parallelism


def make_models(folder: Path) -> dict[str, Path]:
    """Writes random tiny models as Hugging Face directories. All sizes of a model are different."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 152,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    }
    experts: dict[str, Any] = {
        "head_dim": 24,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    tied: dict[str, Any] = {"tie_word_embeddings": True}
    torch.manual_seed(0)
    models = {
        "llama3": LlamaForCausalLM(LlamaConfig(**shape)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**shape | tied)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=24)),
        "qwen3_moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)),
    }
    with torch.no_grad():
        for name, parameter in models["qwen2"].named_parameters():
            if name.endswith(".bias"):  # transformers initializes biases to zero
                parameter.normal_(std=0.1)
    return {name: save_models(model, folder / name, noise=0.01) for name, model in models.items()}


def save_models(model: Any, folder: Path, noise: float) -> Path:
    """Writes a model, and beside it a reference and a critic, whose parameters have noise."""
    model.float().save_pretrained(folder)
    # The reference is another model. Otherwise the KL divergence would be 0.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn_like(parameter)
    model.save_pretrained(f"{folder}-reference")
    # A critic is this model with a head. With a head of 0, its blocks would have no gradient.
    model.save_pretrained(f"{folder}-critic")
    add_score(Path(f"{folder}-critic"), model.config.hidden_size)
    return folder


def add_score(folder: Path, dim: int) -> None:
    """Adds the head of a reward model to the only file of a model's weights."""
    file = folder / "model.safetensors"
    head = {"score.weight": 0.1 * torch.randn(1, dim)}
    save_file(load_file(file) | head, file, {"format": "pt"})


def random_groups() -> list[RolloutGroup]:
    """Makes random rollouts whose lengths fill rows unevenly."""
    random = np.random.default_rng(0)
    groups = []
    for group_id in range(6):
        prompt = random.integers(1, VOCAB_SIZE, random.integers(2, 12)).astype(np.int32)
        rollouts = []
        for _ in range(4):
            length = int(random.integers(1, 40))
            # About the logprobs of a random model, so that some importance weights are truncated.
            logprobs = random.normal(-np.log(VOCAB_SIZE), 0.8, length).astype(np.float32)
            tokens = random.integers(1, VOCAB_SIZE, length).astype(np.int32)
            rollouts.append(rollout(prompt, tokens, logprobs, 0, float(random.normal())))
        groups.append(RolloutGroup(group_id, "", tuple(rollouts), "http://127.0.0.1:1"))
    return groups


def record_batch(
    file: Path,
    steps: int,
    groups: list[RolloutGroup] | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> None:
    """Records the same batch for each step; of random rollouts, if no groups are given."""
    groups = groups or random_groups()
    recorder = RolloutRecorder(str(file), vocab_size, 1.0, 0)
    for version in range(steps):
        recorder.write(version, PromptProgress(len(groups) * (version + 1)), groups)
    recorder.close()


def prepare_real_model(source: Path, folder: Path) -> Path:
    """Writes copies of a model in float32, and a batch that it samples."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    groups = sampled_groups(model, AutoTokenizer.from_pretrained(source))
    record_batch(folder / "batch.jsonl", 3, groups, model.config.vocab_size)
    torch.manual_seed(0)
    return save_models(model, folder / REAL, noise=0.001)


def run_layouts(
    layouts: dict[str, list[Layout]],
    models: dict[str, Path],
    batch: Path,
    folder: Path,
    more: dict[str, Any],
) -> dict[tuple[str, str], dict[str, float]]:
    """Runs the layouts of each model; returns the differences of each from its baseline.

    ``more`` are settings. Layouts with the same number of ranks share a start. A baseline comes before what it is compared with.
    """
    figures, baselines = {}, {}
    for ranks in sorted({layout.ranks for some in layouts.values() for layout in some}):
        jobs, keys = [], []
        for model, some in layouts.items():
            for layout in some:
                if layout.ranks == ranks:
                    out = folder / f"{model}-{len(keys)}-{ranks}.pt"
                    keys.append((model, layout, out))
                    arguments = _arguments(layout, models[model], batch, folder, more)
                    jobs.append({"out": str(out), "args": arguments})
        for begin in range(0, len(jobs), JOBS_PER_START):
            file = folder / f"jobs-{ranks}-{begin}.json"
            file.write_text(json.dumps(jobs[begin : begin + JOBS_PER_START]))
            run_ranks(ranks, "layout_run.py", file, timeout_seconds=TIMEOUT_SECONDS)
            for model, layout, out in keys[begin : begin + JOBS_PER_START]:
                result = torch.load(out, mmap=True)  # the tensors of a real model stay in the file
                if layout.name == layout.baseline:
                    baselines[model, layout.name] = result
                else:
                    out.unlink()
                expected = baselines[model, layout.baseline]
                figures[model, layout.name] = compare(result, expected)
    return figures


def _arguments(
    layout: Layout, model: Path, batch: Path, folder: Path, more: dict[str, Any]
) -> list[str]:
    settings = {
        "job.dump_folder": folder / "dump",
        "job.overwrite": True,
        "model.hf_assets_path": model,
        "training.steps": 3,
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": 4,
        "training.max_norm": 1e9,
        "training.mixed_precision_param": "float32",
        "optimizer.lr": 1e-3,
        "optimizer.implementation": "foreach",
        "lr_scheduler.warmup_steps": 0,
        "optimizer.beta2": 0.95,
        "optimizer.weight_decay": 0.1,
        "lr_scheduler.decay_ratio": 1.0,
        "activation_checkpoint.mode": "none",
        "activation_checkpoint.selective_ac_option": "op",
        "rollout.replay": batch,
        "rollout.max_new_tokens": 48,
        "grpo.prompts_per_step": 6,
        "grpo.group_size": 4,
        "grpo.aggregation": "sequence_mean",
        "grpo.mismatch_level": "geometric",
        "grpo.kl_coef": 0.1,
        "grpo.entropy_coef": 0.05,  # the policy term alone is near 0, too small to compare
        "grpo.ref_model_path": f"{model}-reference",
        "observe.progress": "none",
        "observe.log_level": "warning",
        "observe.samples_per_step": 0,
        "debug.seed": 0,
    }
    settings |= more
    if "lora" in layout.settings:
        del settings["grpo.ref_model_path"]  # the base model is the reference
    if layout.settings.get("advantage") == "gae":
        settings |= {
            "critic.path": f"{model}-critic",
            "critic.lr": settings["optimizer.lr"],
            "critic.gamma": 0.97,
        }
    plain = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return plain + layout.arguments


def compare(result: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Returns the largest relative differences. The difference of a missing tensor is infinite."""
    sgd, sgd_expected = result["sgd"], expected["sgd"]
    return {
        "loss": _largest(zip(sgd["losses"], sgd_expected["losses"], strict=True)),
        "grad_norm": _largest(zip(sgd["grad_norms"], sgd_expected["grad_norms"], strict=True)),
        **{kind: _farthest(sgd[kind], sgd_expected[kind]) for kind in TENSORS},
        "replicas": max(run["spread"] for run in result.values()),
        "adamw_loss": _largest([(result["adamw"]["losses"][-1], expected["adamw"]["losses"][-1])]),
    }


def _largest(pairs: Iterable[tuple[float, float]]) -> float:
    # numpy's maximum is NaN if a value is NaN. Python's maximum may ignore a NaN.
    return float(np.max([abs(value - expected) / abs(expected) for value, expected in pairs]))


def _farthest(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if set(tensors) != set(expected):
        return float("inf")
    return float(np.max([_distance(tensors[name], e) for name, e in expected.items()]))


def _distance(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    distance = (tensor.double() - expected.double()).norm()
    # One half of the adapters has no gradient in the first step, because the other half is zero.
    return (distance / expected.double().norm() if distance else distance).item()


def holds(model: str, figures: dict[str, float]) -> bool:
    """Returns whether the differences of a layout are within the model's bounds. NaN is not."""
    adamw = figures["adamw_loss"] <= ADAMW_LOSS_TOLERANCE
    bound = REAL_TOLERANCE if model == REAL else TOLERANCE
    return adamw and all(v <= bound for k, v in figures.items() if k != "adamw_loss")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the layouts. The choice is stored in ``options.choice``."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--quick", dest="choice", action="store_const", const="quick", default="default",
        help="a few layouts of up to 4 ranks",
    )  # fmt: skip
    group.add_argument(
        "--all", dest="choice", action="store_const", const="all", help="every layout"
    )


def known_model(text: str) -> str | Path:
    if text in ALSO_BY_DEFAULT:
        return text
    if (Path(text) / "config.json").is_file():
        return Path(text)
    raise argparse.ArgumentTypeError(
        f"must be {', '.join(ALSO_BY_DEFAULT)}, or a directory with config.json, got {text}"
    )


def main() -> int:
    parser = make_parser(__doc__)
    add_choice(parser)
    parser.add_argument("--only", metavar="TEXT", help="layouts whose name contains this text")
    parser.add_argument("--model", type=known_model, help="one of the models, or a directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batch = folder / "batch.jsonl"
        if isinstance(options.model, Path):
            models, more = {REAL: prepare_real_model(options.model, folder)}, SETTINGS
        else:
            models, more = make_models(folder), {}
            record_batch(batch, steps=3)
        layouts = {
            model: layouts_of(model, options.choice, options.only)
            for model in models
            if options.model in (None, model) or model == REAL
        }
        rows = run_layouts(layouts, models, batch, folder, more)
    print(
        f"{'model':10}{'layout':46}{'ranks':>5}  loss     grad norm gradients params   exported  "
        "replicas AdamW loss"
    )
    verdicts = {row: holds(row[0], figures) for row, figures in rows.items()}
    for (model, name), figures in rows.items():
        ranks = next(layout.ranks for layout in layouts[model] if layout.name == name)
        numbers = "  ".join(f"{value:.1e}" for value in figures.values())
        print(
            f"{model:10}{name:46}{ranks:>5}  {numbers}  {'ok' if verdicts[model, name] else 'DIFFERS'}"
        )
    ok = all(verdicts.values())
    figures = {
        f"{model}/{name}/{figure}": value
        for (model, name), values in rows.items()
        for figure, value in values.items()
    }
    return finish(options, "layout_parity", ok, figures)


if __name__ == "__main__":
    sys.exit(main())
