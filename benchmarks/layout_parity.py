# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that training computes the same numbers under every parallel layout.

    python benchmarks/layout_parity.py [--json] [--quick | --all]

The benchmark trains tiny Llama 3, Qwen2, Qwen3 and Qwen3-MoE models in float32 for three optimizer
steps on one recorded batch, in one process and under each layout (gloo, up to 8 ranks). The
loss includes the correction for sampling-time logprobs, the KL penalty and the entropy bonus.
The benchmark compares the loss and the gradient norm of each SGD step, every gradient tensor of
the first step (norm of the difference over norm), every parameter after the third step, the
copies of a parameter that several ranks hold, and the loss of the third AdamW step. Some layouts
take four optimizer steps for each batch, with the KL penalty in the reward and a moving
reference model.

By default each kind of layout is run for at least one model, which takes about ten minutes on
two cores. ``--quick`` leaves out the layouts of 8 ranks, compiled models, activation
checkpointing and several updates a batch. ``--all`` runs every layout, which takes about 40
minutes. ``--only TEXT`` runs of all layouts those whose name contains the text, and their baselines,
and ``--model NAME`` only those of one model. The benchmark prints one row for each layout, and exits with status 1 if a layout
differs. With ``--json`` the last line is a JSON object.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from ranks import run_ranks

from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.types import PromptProgress, Rollout, RolloutGroup, VersionSegment

TOLERANCE = 1e-5
ADAMW_LOSS_TOLERANCE = 1e-4
TIMEOUT_SECONDS = 1500
# Starting ranks is slow, but each layout's process groups and their threads stay to the end.
JOBS_PER_START = 6
SEQ_LEN = 96
VOCAB_SIZE = 131  # does not divide by the degrees of tensor parallelism


Choice = Literal["quick", "default", "all"]
"""How many of the layouts are run."""


@dataclass(frozen=True)
class Layout:
    """Describes a layout: its name in the table, its number of ranks, and its settings."""

    name: str
    ranks: int
    settings: dict[str, Any]
    is_quick: bool = False
    baseline: str = "one process"

    @property
    def arguments(self) -> list[str]:
        known = {
            "shard": "parallelism.data_parallel_shard_degree",
            "replicate": "parallelism.data_parallel_replicate_degree",
            "tp": "parallelism.tensor_parallel_degree",
            "cp": "parallelism.context_parallel_degree",
            "pp": "parallelism.pipeline_parallel_degree",
            "schedule": "parallelism.pipeline_parallel_schedule",
            "reshard": "parallelism.fsdp_reshard_after_forward",
            "ac": "activation_checkpoint.mode",
            "compile": "compile.enable",
            "ep": "parallelism.expert_parallel_degree",
            "etp": "parallelism.expert_tensor_parallel_degree",
            "precision": "training.mixed_precision_param",
            "microbatch": "parallelism.pipeline_parallel_microbatch_size",
            "offload": "grpo.pipeline_offload",
            "minibatches": "grpo.num_minibatches",
            "epochs": "grpo.num_epochs",
            "kl_in": "grpo.kl_in",
            "ema": "grpo.ref_model_ema",
            "stream": "rollout.stream",
            "parts": "rollout.stream_parts",
            "advantage": "grpo.advantage",
            "max_k3": "grpo.mismatch_max_k3",
            "normalize": "grpo.mismatch_normalize",
            "off_policy": "grpo.off_policy_mask_threshold",
            "estimator": "grpo.kl_estimator",
            "importance": "grpo.kl_importance",
            "optimizer": "optimizer.name",
            "muon_dtype": "optimizer.muon_dtype",
        }
        arguments = []
        for key, value in ({"shard": 1} | self.settings).items():
            arguments += [f"--{known[key]}"] if value is True else [f"--{known[key]}", str(value)]
        return arguments


ONE = "one process, 4 updates a batch"
MIXED = "PP x2, Interleaved1F1B, bfloat16"
UPDATES = {"minibatches": 2, "epochs": 2, "kl_in": "reward", "ema": 0.5}
STREAMED = {"stream": True, "parts": 3}
# Rejects some of the sequences and masks others; the mean weight is over all ranks.
WITH_MUON = "one process, Muon"
MUON = {"optimizer": "Muon", "muon_dtype": "float32"}  # takes the place of AdamW in the last column
REJECTION = "one process, rejection"
REJECTED = {
    "minibatches": 2, "advantage": "leave_one_out_norm", "max_k3": 0.9, "normalize": True, "off_policy": 0.3,
    "estimator": "k3_straight", "importance": True,
}  # fmt: skip
# Smaller microbatches have no tensors of a size that is moved to the host.
OFFLOAD = {"offload": 1, "microbatch": 4}
SCHEDULES = (
    "1F1B", "ZBH1", "ZBH2", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "VMin", "VHalf", "VZB", "auto",
)  # fmt: skip
LAYOUTS = [
    Layout("one process", 1, {}, True),
    Layout("one process, full AC", 1, {"ac": "full"}),
    Layout("one process, selective AC", 1, {"ac": "selective"}),
    Layout("FSDP2 x2 (ZeRO-3)", 2, {"shard": 2, "reshard": "always"}, True),
    Layout("FSDP2 x2 (ZeRO-2)", 2, {"shard": 2, "reshard": "never"}),
    Layout("FSDP2 x2, full AC", 2, {"shard": 2, "ac": "full"}),
    Layout("replicate x2", 2, {"replicate": 2}, True),
    Layout("TP x2", 2, {"tp": 2}, True),
    Layout("TP x2, selective AC", 2, {"tp": 2, "ac": "selective"}),
    Layout("CP x2", 2, {"cp": 2}, True),
    Layout("PP x2, GPipe", 2, {"pp": 2, "schedule": "GPipe"}),
    *(Layout(f"PP x2, {s}", 2, {"pp": 2, "schedule": s}, s == "ZBVZeroBubble") for s in SCHEDULES),
    Layout("PP x2, ZBVZeroBubble, full AC", 2, {"pp": 2, "schedule": "ZBVZeroBubble", "ac": "full"}),
    Layout("PP x2, 1F1B, selective AC", 2, {"pp": 2, "schedule": "1F1B", "ac": "selective"}),
    Layout("HSDP 2x2", 4, {"replicate": 2, "shard": 2}, True),
    Layout("FSDP2 x2, TP x2", 4, {"shard": 2, "tp": 2}, True),
    Layout("FSDP2 x2, CP x2", 4, {"shard": 2, "cp": 2}),
    Layout("TP x2, CP x2", 4, {"tp": 2, "cp": 2}),
    Layout("CP x4", 4, {"cp": 4}),
    Layout("replicate x2, PP x2, ZBVZeroBubble", 4, {"replicate": 2, "pp": 2, "schedule": "ZBVZeroBubble"}),
    Layout("replicate x2, TP x2", 4, {"replicate": 2, "tp": 2}),
    Layout("FSDP2 x2, PP x2, ZBVZeroBubble", 4, {"shard": 2, "pp": 2, "schedule": "ZBVZeroBubble"}, True),
    Layout("FSDP2 x2, PP x2, 1F1B", 4, {"shard": 2, "pp": 2, "schedule": "1F1B"}),
    Layout("TP x2, PP x2, Interleaved1F1B", 4, {"tp": 2, "pp": 2, "schedule": "Interleaved1F1B"}),
    Layout("CP x2, PP x2, ZBVZeroBubble", 4, {"cp": 2, "pp": 2, "schedule": "ZBVZeroBubble"}),
    Layout("PP x4, InterleavedZeroBubble", 4, {"pp": 4, "schedule": "InterleavedZeroBubble"}),
    *(
        Layout(f"FSDP2 x2, TP x2, PP x2, {s}", 8, {"shard": 2, "tp": 2, "pp": 2, "schedule": s})
        for s in SCHEDULES
    ),
    Layout("HSDP 2x2, TP x2", 8, {"replicate": 2, "shard": 2, "tp": 2}),
    Layout("FSDP2 x2, CP x2, TP x2", 8, {"shard": 2, "cp": 2, "tp": 2}),
    Layout(MIXED, 2, {"pp": 2, "schedule": "Interleaved1F1B", "precision": "bfloat16"}, False, MIXED),
    Layout("PP x2, ZBVZeroBubble, bfloat16", 2, {"pp": 2, "schedule": "ZBVZeroBubble", "precision": "bfloat16"}, False, MIXED),
    Layout("PP x2, ZBVZeroBubble, op AC", 2, {"pp": 2, "schedule": "ZBVZeroBubble", "ac": "selective"}),
    Layout("PP x2, Interleaved1F1B, offload", 2, {"pp": 2, "schedule": "Interleaved1F1B"} | OFFLOAD),
    Layout("PP x2, VHalf, full AC, offload", 2, {"pp": 2, "schedule": "VHalf", "ac": "full"} | OFFLOAD),
    Layout("FSDP2 x2, PP x2, ZBVZeroBubble, offload", 4, {"shard": 2, "pp": 2, "schedule": "ZBVZeroBubble"} | OFFLOAD),
    Layout(ONE, 1, UPDATES, False, ONE),
    Layout("PP x2, 1F1B, 4 updates a batch", 2, {"pp": 2, "schedule": "1F1B"} | UPDATES, False, ONE),
    Layout("TP x2, 4 updates a batch", 2, {"tp": 2} | UPDATES, False, ONE),
    Layout("CP x2, 4 updates a batch", 2, {"cp": 2} | UPDATES, False, ONE),
    Layout("PP x2, ZBVZeroBubble, 4 updates a batch", 2, {"pp": 2, "schedule": "ZBVZeroBubble"} | UPDATES, False, ONE),
    Layout("FSDP2 x2, PP x2, 1F1B, 4 updates a batch", 4, {"shard": 2, "pp": 2, "schedule": "1F1B"} | UPDATES, False, ONE),
    Layout(REJECTION, 1, REJECTED, False, REJECTION),
    Layout("FSDP2 x2, rejection", 2, {"shard": 2} | REJECTED, False, REJECTION),
    Layout("TP x2, rejection", 2, {"tp": 2} | REJECTED, False, REJECTION),
    Layout("CP x2, rejection", 2, {"cp": 2} | REJECTED, False, REJECTION),
    Layout("PP x2, 1F1B, rejection", 2, {"pp": 2, "schedule": "1F1B"} | REJECTED, False, REJECTION),
    Layout("HSDP 2x2, rejection", 4, {"replicate": 2, "shard": 2} | REJECTED, False, REJECTION),
    Layout("FSDP2 x2, PP x2, ZBVZeroBubble, rejection", 4, {"shard": 2, "pp": 2, "schedule": "ZBVZeroBubble"} | REJECTED, False, REJECTION),
    Layout(WITH_MUON, 1, MUON, False, WITH_MUON),
    Layout("FSDP2 x2, Muon", 2, {"shard": 2} | MUON, False, WITH_MUON),
    Layout("TP x2, Muon", 2, {"tp": 2} | MUON, False, WITH_MUON),
    Layout("HSDP 2x2, Muon", 4, {"replicate": 2, "shard": 2} | MUON, False, WITH_MUON),
    Layout("FSDP2 x2, PP x2, ZBVZeroBubble, Muon", 4, {"shard": 2, "pp": 2, "schedule": "ZBVZeroBubble"} | MUON, False, WITH_MUON),
    Layout("one process, in 3 parts", 1, STREAMED, True),
    Layout("FSDP2 x2, in 3 parts", 2, {"shard": 2} | STREAMED),
    Layout("TP x2, in 3 parts", 2, {"tp": 2} | STREAMED),
    Layout("FSDP2 x2, PP x2, ZBVZeroBubble, in 3 parts", 4, {"shard": 2, "pp": 2, "schedule": "ZBVZeroBubble"} | STREAMED, True),
    Layout("one process, compiled", 1, {"compile": True}),
    Layout("FSDP2 x2, full AC, compiled", 2, {"shard": 2, "ac": "full", "compile": True}),
    Layout("TP x2, compiled", 2, {"tp": 2, "compile": True}),
    Layout("CP x2, compiled", 2, {"cp": 2, "compile": True}),
    Layout("PP x2, 1F1B, compiled", 2, {"pp": 2, "schedule": "1F1B", "compile": True}),
    Layout("PP x2, Interleaved1F1B, compiled", 2, {"pp": 2, "schedule": "Interleaved1F1B", "compile": True}),
    Layout("PP x2, ZBVZeroBubble, compiled", 2, {"pp": 2, "schedule": "ZBVZeroBubble", "compile": True}),
    Layout("PP x2, ZBVZeroBubble, full AC, compiled", 2, {"pp": 2, "schedule": "ZBVZeroBubble", "ac": "full", "compile": True}),
    Layout("PP x2, VHalf, compiled", 2, {"pp": 2, "schedule": "VHalf", "compile": True}),
    Layout("PP x2, auto, compiled", 2, {"pp": 2, "schedule": "auto", "compile": True}),
    Layout("FSDP2 x2, TP x2, compiled", 4, {"shard": 2, "tp": 2, "compile": True}),
    Layout("FSDP2 x2, PP x2, ZBVZeroBubble, compiled", 4, {"shard": 2, "pp": 2, "schedule": "ZBVZeroBubble", "compile": True}),
]  # fmt: skip
MOE_LAYOUTS = [
    Layout("one process", 1, {}, True),
    Layout("FSDP2 x2", 2, {"shard": 2}),
    Layout("FSDP2 x2, full AC", 2, {"shard": 2, "ac": "full"}),
    Layout("replicate x2", 2, {"replicate": 2}),
    Layout("TP x2", 2, {"tp": 2}, True),
    Layout("PP x2, 1F1B", 2, {"pp": 2, "schedule": "1F1B"}),
    Layout("PP x2, ZBVZeroBubble", 2, {"pp": 2, "schedule": "ZBVZeroBubble"}),
    Layout("FSDP2 x2 lent to EP x2", 2, {"shard": 2, "ep": 2}, True),
    Layout("FSDP2 x2 lent to EP x2, selective AC", 2, {"shard": 2, "ep": 2, "ac": "selective"}),
    Layout("FSDP2 x2 lent to EP x2, compiled", 2, {"shard": 2, "ep": 2, "compile": True}),
    Layout("PP x2, ZBVZeroBubble, compiled", 2, {"pp": 2, "schedule": "ZBVZeroBubble", "compile": True}),
    Layout("CP x2 lent to EP x2", 2, {"cp": 2, "ep": 2}),
    Layout("TP x2 lent to EP x2", 2, {"tp": 2, "ep": 2}),
    Layout(WITH_MUON, 1, MUON, False, WITH_MUON),
    Layout("FSDP2 x4, EP x2, Muon", 4, {"shard": 4, "ep": 2} | MUON, False, WITH_MUON),
    Layout("FSDP2 x4, EP x2", 4, {"shard": 4, "ep": 2}),
    Layout("HSDP 2x2, EP x2", 4, {"replicate": 2, "shard": 2, "ep": 2}),
    Layout("replicate x2, TP x2 lent to EP x2", 4, {"replicate": 2, "tp": 2, "ep": 2}),
    Layout("FSDP2 x2, TP x2 lent to EP x2", 4, {"shard": 2, "tp": 2, "ep": 2}),
    Layout("FSDP2 x2 lent to EP x2, TP x2", 4, {"shard": 2, "tp": 2, "ep": 2, "etp": 2}),
    Layout("PP x2, ZBVZeroBubble, FSDP2 x2, EP x2", 4, {"shard": 2, "ep": 2, "pp": 2, "schedule": "ZBVZeroBubble"}),
]  # fmt: skip


# By default a model is also run under these layouts, so that each kind of layout is there once.
ALSO_BY_DEFAULT = {
    "llama3": (
        MIXED, "PP x2, ZBVZeroBubble, bfloat16",
        "one process, full AC", "TP x2, selective AC", "FSDP2 x2 (ZeRO-2)", "PP x2, GPipe",
        "PP x2, Interleaved1F1B", "PP x4, InterleavedZeroBubble", "replicate x2, TP x2",
        "FSDP2 x2, TP x2, PP x2, 1F1B", "HSDP 2x2, TP x2", ONE, "CP x2, 4 updates a batch", REJECTION,
        "FSDP2 x2, PP x2, ZBVZeroBubble, rejection",
    ),
    "qwen3": (
        "PP x2, 1F1B", "FSDP2 x2, CP x2, TP x2", "CP x2, PP x2, ZBVZeroBubble", ONE,
        "PP x2, ZBVZeroBubble, 4 updates a batch", "one process, compiled", "PP x2, VHalf, full AC, offload",
        "FSDP2 x2, full AC, compiled", "PP x2, ZBVZeroBubble, full AC, compiled",
    ),
    "qwen2": (
        *(f"PP x2, {schedule}" for schedule in SCHEDULES), "PP x2, GPipe", "FSDP2 x2, PP x2, 1F1B",
        "TP x2, PP x2, Interleaved1F1B", "PP x2, ZBVZeroBubble, 4 updates a batch", ONE,
    ),
    "qwen3_moe": (
        "PP x2, ZBVZeroBubble", "FSDP2 x4, EP x2", "FSDP2 x2 lent to EP x2, TP x2",
        "PP x2, ZBVZeroBubble, FSDP2 x2, EP x2",
    ),
}  # fmt: skip

# Under --quick, the layouts of models that have something besides what llama3 has: norms of queries and
# keys, and embeddings that are tied across two ranks, or across two stages of one.
QUICK = {
    "qwen3": ("one process", "TP x2", "CP x2", "FSDP2 x2, PP x2, ZBVZeroBubble"),
    "qwen2": ("one process", "PP x2, 1F1B", "PP x2, ZBVZeroBubble"),
}


def layouts_of(model: str, choice: Choice, only: str | None = None) -> list[Layout]:
    """Returns the layouts that a model is run under; mixtures of experts have their own.

    Qwen2 is there for its tied embeddings, which only pipelines treat differently.
    """
    layouts = MOE_LAYOUTS if model == "qwen3_moe" else LAYOUTS
    if model == "qwen2":
        baselines = {layout.baseline for layout in layouts}
        layouts = [x for x in layouts if "pp" in x.settings or x.name in baselines]
    if only is not None:
        found = [layout for layout in layouts if only in layout.name]
        baselines = {layout.baseline for layout in found}
        return [layout for layout in layouts if layout in found or layout.name in baselines]
    if choice == "quick" and model in QUICK:
        return [layout for layout in layouts if layout.name in QUICK[model]]
    names = ALSO_BY_DEFAULT[model] if choice == "default" else ()
    return [
        layout for layout in layouts if choice == "all" or layout.is_quick or layout.name in names
    ]


def make_models(folder: Path) -> dict[str, Path]:
    """Writes random tiny models as Hugging Face directories; no two of their sizes are equal."""
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

    shape = {
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
    experts = {
        "head_dim": 24,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    torch.manual_seed(0)
    models = {
        "llama3": LlamaForCausalLM(LlamaConfig(**shape)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**shape | {"tie_word_embeddings": True})),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=24)),
        "qwen3_moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)),
    }
    with torch.no_grad():
        for name, parameter in models["qwen2"].named_parameters():
            if name.endswith(".bias"):  # transformers begins with zeros
                parameter.normal_(std=0.1)
    for name, model in models.items():
        model.float().save_pretrained(folder / name)
        # The reference is another model, or its KL would be 0.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn_like(parameter)
        model.save_pretrained(folder / f"{name}-reference")
    return {name: folder / name for name in models}


def record_batch(file: Path, steps: int) -> None:
    """Records random rollouts whose lengths fill rows unevenly: the same batch for each step."""
    random = np.random.default_rng(0)
    groups = []
    for group_id in range(6):
        prompt = random.integers(1, VOCAB_SIZE, random.integers(2, 12)).astype(np.int32)
        rollouts = []
        for _ in range(4):
            length = int(random.integers(1, 40))
            # About as likely as a random model finds them, so that some weights are cut off.
            logprobs = random.normal(-np.log(VOCAB_SIZE), 0.8, length).astype(np.float32)
            rollouts.append(
                Rollout(
                    prompt_ids=prompt,
                    completion_ids=random.integers(1, VOCAB_SIZE, length).astype(np.int32),
                    generator_logprobs=logprobs,
                    segments=(VersionSegment(0, 0, length),),
                    finish_reason="stop",
                    completion="",
                    reward=float(random.normal()),
                )
            )
        groups.append(RolloutGroup(group_id, "", tuple(rollouts), "http://127.0.0.1:1"))
    recorder = RolloutRecorder(str(file), VOCAB_SIZE, 1.0, 0)
    for version in range(steps):
        recorder.write(version, PromptProgress(len(groups) * (version + 1)), groups)
    recorder.close()


def run_layouts(
    layouts: dict[str, list[Layout]], models: dict[str, Path], batch: Path, folder: Path
) -> dict[tuple[str, str], dict[str, Any]]:
    """Runs the layouts of each model; layouts with the same number of ranks share starts."""
    results = {}
    for ranks in sorted({layout.ranks for some in layouts.values() for layout in some}):
        jobs, keys = [], []
        for model, some in layouts.items():
            for layout in some:
                if layout.ranks == ranks:
                    out = folder / f"{model}-{len(keys)}-{ranks}.pt"
                    keys.append(((model, layout.name), out))
                    jobs.append(
                        {"out": str(out), "args": _arguments(layout, models[model], batch, folder)}
                    )
        for begin in range(0, len(jobs), JOBS_PER_START):
            file = folder / f"jobs-{ranks}-{begin}.json"
            file.write_text(json.dumps(jobs[begin : begin + JOBS_PER_START]))
            run_ranks(ranks, "layout_run.py", file, timeout_seconds=TIMEOUT_SECONDS)
        for key, out in keys:
            results[key] = torch.load(out)
    return results


def _arguments(layout: Layout, model: Path, batch: Path, folder: Path) -> list[str]:
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
        "grpo.entropy_coef": 0.05,  # the policy term alone is near 0, and so no measure
        "grpo.ref_model_path": f"{model}-reference",
        "observe.progress": "none",
        "observe.log_level": "warning",
        "observe.samples_per_step": 0,
        "debug.seed": 0,
    }
    plain = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return plain + layout.arguments


def compare(result: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Returns the largest relative differences; that of a missing tensor is infinite."""
    sgd, sgd_expected = result["sgd"], expected["sgd"]
    return {
        "loss": _largest(zip(sgd["losses"], sgd_expected["losses"], strict=True)),
        "grad_norm": _largest(zip(sgd["grad_norms"], sgd_expected["grad_norms"], strict=True)),
        "gradients": _farthest(sgd["gradients"], sgd_expected["gradients"]),
        "parameters": _farthest(sgd["parameters"], sgd_expected["parameters"]),
        "replicas": max(run["spread"] for run in result.values()),
        "adamw_loss": _largest([(result["adamw"]["losses"][-1], expected["adamw"]["losses"][-1])]),
    }


def _largest(pairs: Iterable[tuple[float, float]]) -> float:
    # numpy's maximum is NaN where there is one; Python's may pass over it.
    return float(np.max([abs(value - expected) / abs(expected) for value, expected in pairs]))


def _farthest(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if set(tensors) != set(expected):
        return float("inf")
    distances = [
        ((tensors[name].double() - e.double()).norm() / e.double().norm()).item()
        for name, e in expected.items()
    ]
    return float(np.max(distances))


def holds(figures: dict[str, float]) -> bool:
    """Returns whether a layout's differences are within the bounds (NaN is not)."""
    adamw = figures["adamw_loss"] <= ADAMW_LOSS_TOLERANCE
    return adamw and all(v <= TOLERANCE for k, v in figures.items() if k != "adamw_loss")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the layouts; the choice is ``options.choice``."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--quick", dest="choice", action="store_const", const="quick", default="default",
        help="few layouts, of up to 4 ranks",
    )  # fmt: skip
    group.add_argument(
        "--all", dest="choice", action="store_const", const="all", help="every layout"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    add_choice(parser)
    parser.add_argument("--only", metavar="TEXT", help="all layouts with this text in their name")
    parser.add_argument("--model", choices=ALSO_BY_DEFAULT, help="only this model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models, batch = make_models(folder), folder / "batch.jsonl"
        record_batch(batch, steps=3)
        layouts = {
            model: layouts_of(model, options.choice, options.only)
            for model in models
            if options.model in (None, model)
        }
        results = run_layouts(layouts, models, batch, folder)
    baselines = {
        (m, layout.name): layout.baseline for m, some in layouts.items() for layout in some
    }
    rows = {key: compare(r, results[key[0], baselines[key]]) for key, r in results.items()}
    print(
        f"{'model':10}{'layout':46}{'ranks':>5}  loss     grad norm gradients params   replicas "
        "AdamW loss"
    )
    for (model, name), figures in rows.items():
        ranks = next(layout.ranks for layout in layouts[model] if layout.name == name)
        numbers = "  ".join(f"{value:.1e}" for value in figures.values())
        print(f"{model:10}{name:46}{ranks:>5}  {numbers}  {'ok' if holds(figures) else 'DIFFERS'}")
    ok = all(map(holds, rows.values()))
    if options.json:
        figures = {
            f"{model}/{name}/{figure}": value
            for (model, name), values in rows.items()
            for figure, value in values.items()
        }
        print(json.dumps({"benchmark": "layout_parity", "ok": ok, "figures": figures}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
