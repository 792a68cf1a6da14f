# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lists the parallel layouts and the settings under which `layout_parity.py` trains."""

from dataclasses import dataclass
from typing import Any, Literal

Choice = Literal["quick", "default", "all"]
"""Which layouts are run."""


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
            "off_policy": "grpo.off_policy_mask_threshold",
            "estimator": "grpo.kl_estimator",
            "optimizer": "optimizer.name",
            "muon_dtype": "optimizer.muon_dtype",
            "separate": "prompts.no-share-contexts",
            "lora": "lora.rank",
        }
        arguments = []
        for key, value in ({"shard": 1} | self.settings).items():
            arguments += [f"--{known[key]}"] if value is True else [f"--{known[key]}", str(value)]
        return arguments


ONE = "one process, 4 updates a batch"
MIXED = "PP x2, Interleaved1F1B, bfloat16"
UPDATES = {"minibatches": 2, "epochs": 2, "kl_in": "reward", "ema": 0.5}
STREAMED = {"stream": True, "parts": 3}
# In all other layouts the completions of a group share their prompt.
SEPARATE = {"separate": True}
WITH_MUON = "one process, Muon"
MUON = {"optimizer": "Muon", "muon_dtype": "float32"}  # takes the place of AdamW in the last column
REJECTION = "one process, rejection"
# These settings reject some sequences and mask others.
REJECTED = {
    "minibatches": 2, "advantage": "leave_one_out", "max_k3": 0.9, "off_policy": 0.3,
    "estimator": "k2",
}  # fmt: skip
PPO = "one process, critic"
# The critic is another model with a head, and learns in four updates a batch, as the policy does.
WITH_CRITIC = {
    "minibatches": 2,
    "epochs": 2,
    "kl_in": "reward",
    "estimator": "k1",
    "advantage": "gae",
}
# Rounding differences of experts grow faster from update to update.
MOE_CRITIC = WITH_CRITIC | {"epochs": 1}
# Smaller microbatches have no tensors that are large enough to be moved to the host.
OFFLOAD = {"offload": 1, "microbatch": 4}
SCHEDULES = (
    "1F1B", "ZBH1", "ZBH2", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "VMin", "VHalf", "VZB", "auto",
)  # fmt: skip
LAYOUTS = [
    Layout("one process", 1, {}, True),
    Layout("one process, separate prompts", 1, SEPARATE, True),
    Layout("FSDP2 x2, separate prompts", 2, {"shard": 2} | SEPARATE),
    Layout("TP x2, separate prompts", 2, {"tp": 2} | SEPARATE),
    Layout("CP x2, separate prompts", 2, {"cp": 2} | SEPARATE),
    Layout("PP x2, ZBVZeroBubble, separate prompts", 2, {"pp": 2, "schedule": "ZBVZeroBubble"} | SEPARATE),
    Layout("FSDP2 x2, TP x2, separate prompts", 4, {"shard": 2, "tp": 2} | SEPARATE),
    Layout("one process, full AC", 1, {"ac": "full"}),
    Layout("one process, selective AC", 1, {"ac": "selective"}),
    Layout("FSDP2 x2 (ZeRO-3)", 2, {"shard": 2, "reshard": "always"}, True),
    Layout("FSDP2 x2 (ZeRO-2)", 2, {"shard": 2, "reshard": "never"}),
    Layout("FSDP2 x2, full AC", 2, {"shard": 2, "ac": "full"}),
    Layout("replicate x2", 2, {"replicate": 2}),
    Layout("TP x2", 2, {"tp": 2}, True),
    Layout("TP x2, selective AC", 2, {"tp": 2, "ac": "selective"}),
    Layout("CP x2", 2, {"cp": 2}, True),
    Layout("PP x2, GPipe", 2, {"pp": 2, "schedule": "GPipe"}),
    *(Layout(f"PP x2, {s}", 2, {"pp": 2, "schedule": s}, s == "ZBVZeroBubble") for s in SCHEDULES),
    Layout("PP x2, Helix", 2, {"pp": 2, "schedule": "Helix"}),
    Layout("PP x2, Helix, full AC", 2, {"pp": 2, "schedule": "Helix", "ac": "full"}),
    Layout("FSDP2 x2, TP x2, PP x2, Helix, full AC", 8, {"shard": 2, "tp": 2, "pp": 2, "schedule": "Helix", "ac": "full"}),
    Layout("PP x2, ZBVZeroBubble, full AC", 2, {"pp": 2, "schedule": "ZBVZeroBubble", "ac": "full"}),
    Layout("PP x2, 1F1B, selective AC", 2, {"pp": 2, "schedule": "1F1B", "ac": "selective"}),
    Layout("HSDP 2x2", 4, {"replicate": 2, "shard": 2}, True),
    Layout("FSDP2 x2, TP x2", 4, {"shard": 2, "tp": 2}),
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
    Layout(PPO, 1, WITH_CRITIC, False, PPO),
    Layout("FSDP2 x2, critic", 2, {"shard": 2} | WITH_CRITIC, False, PPO),
    Layout("replicate x2, critic", 2, {"replicate": 2} | WITH_CRITIC, False, PPO),
    Layout("TP x2, critic", 2, {"tp": 2} | WITH_CRITIC, False, PPO),
    Layout("CP x2, full AC, critic", 2, {"cp": 2, "ac": "full"} | WITH_CRITIC, False, PPO),
    Layout("PP x2, 1F1B, critic", 2, {"pp": 2, "schedule": "1F1B"} | WITH_CRITIC, False, PPO),
    Layout("PP x2, ZBVZeroBubble, critic", 2, {"pp": 2, "schedule": "ZBVZeroBubble"} | WITH_CRITIC, False, PPO),
    Layout("PP x2, Helix, critic", 2, {"pp": 2, "schedule": "Helix"} | WITH_CRITIC, False, PPO),
    Layout("HSDP 2x2, critic", 4, {"replicate": 2, "shard": 2} | WITH_CRITIC, False, PPO),
    Layout("FSDP2 x2, TP x2, critic", 4, {"shard": 2, "tp": 2} | WITH_CRITIC, False, PPO),
    Layout("FSDP2 x2, PP x2, ZBVZeroBubble, critic", 4, {"shard": 2, "pp": 2, "schedule": "ZBVZeroBubble"} | WITH_CRITIC, False, PPO),
    Layout("FSDP2 x2, TP x2, PP x2, 1F1B, critic", 8, {"shard": 2, "tp": 2, "pp": 2, "schedule": "1F1B"} | WITH_CRITIC, False, PPO),
    Layout("FSDP2 x2, critic, compiled", 2, {"shard": 2, "compile": True} | WITH_CRITIC, False, PPO),
    Layout("PP x2, ZBVZeroBubble, critic, compiled", 2, {"pp": 2, "schedule": "ZBVZeroBubble", "compile": True} | WITH_CRITIC, False, PPO),
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
    Layout("FSDP2 x2 lent to EP x2, separate prompts", 2, {"shard": 2, "ep": 2} | SEPARATE),
    Layout("FSDP2 x2 lent to EP x2, selective AC", 2, {"shard": 2, "ep": 2, "ac": "selective"}),
    Layout("FSDP2 x2 lent to EP x2, compiled", 2, {"shard": 2, "ep": 2, "compile": True}),
    Layout("PP x2, ZBVZeroBubble, compiled", 2, {"pp": 2, "schedule": "ZBVZeroBubble", "compile": True}),
    Layout("CP x2 lent to EP x2", 2, {"cp": 2, "ep": 2}),
    Layout("TP x2 lent to EP x2", 2, {"tp": 2, "ep": 2}),
    Layout(WITH_MUON, 1, MUON, False, WITH_MUON),
    Layout("FSDP2 x4, EP x2, Muon", 4, {"shard": 4, "ep": 2} | MUON, False, WITH_MUON),
    Layout(PPO, 1, MOE_CRITIC, False, PPO),
    Layout("FSDP2 x2 lent to EP x2, critic", 2, {"shard": 2, "ep": 2} | MOE_CRITIC, False, PPO),
    Layout("FSDP2 x2, TP x2 lent to EP x2, critic", 4, {"shard": 2, "tp": 2, "ep": 2} | MOE_CRITIC, False, PPO),
    Layout("FSDP2 x4, EP x2", 4, {"shard": 4, "ep": 2}),
    Layout("HSDP 2x2, EP x2", 4, {"replicate": 2, "shard": 2, "ep": 2}),
    Layout("replicate x2, TP x2 lent to EP x2", 4, {"replicate": 2, "tp": 2, "ep": 2}),
    Layout("FSDP2 x2, TP x2 lent to EP x2", 4, {"shard": 2, "tp": 2, "ep": 2}),
    Layout("FSDP2 x2 lent to EP x2, TP x2", 4, {"shard": 2, "tp": 2, "ep": 2}),
    Layout("PP x2, ZBVZeroBubble, FSDP2 x2, EP x2", 4, {"shard": 2, "ep": 2, "pp": 2, "schedule": "ZBVZeroBubble"}),
]  # fmt: skip

REAL = "real"
"""Name of the model of a directory. The one for which its layouts are made has 3 heads of keys and values."""
ADAPTED = "one process, LoRA"
LORA = {"lora": 8}
REAL_LAYOUTS = [
    Layout("one process", 1, {}),
    Layout("one process, separate prompts", 1, SEPARATE),
    Layout(ADAPTED, 1, LORA, False, ADAPTED),
    Layout(PPO, 1, WITH_CRITIC, False, PPO),
    Layout("FSDP2 x2 (ZeRO-3)", 2, {"shard": 2, "reshard": "always"}),
    Layout("PP x2, InterleavedZeroBubble", 2, {"pp": 2, "schedule": "InterleavedZeroBubble"}),
    Layout("PP x2, ZBVZeroBubble", 2, {"pp": 2, "schedule": "ZBVZeroBubble"}),
    Layout("FSDP2 x2, LoRA", 2, {"shard": 2} | LORA, False, ADAPTED),
    Layout("TP x3", 3, {"tp": 3}),
    Layout("TP x3, LoRA", 3, {"tp": 3} | LORA, False, ADAPTED),
    Layout("TP x3, critic", 3, {"tp": 3} | WITH_CRITIC, False, PPO),
]


# By default a model is also run under these layouts, so that each kind of layout is run once.
ALSO_BY_DEFAULT = {
    "llama3": (
        MIXED, "PP x2, ZBVZeroBubble, bfloat16", "FSDP2 x2, separate prompts", "TP x2, separate prompts",
        PPO, "TP x2, critic", "PP x2, ZBVZeroBubble, critic", "PP x2, Helix, critic", "PP x2, Helix, full AC",
        "replicate x2", "FSDP2 x2, TP x2", "one process, full AC", "TP x2, selective AC", "FSDP2 x2 (ZeRO-2)", "PP x2, GPipe",
        "PP x2, Interleaved1F1B", "PP x4, InterleavedZeroBubble", "replicate x2, TP x2",
        "FSDP2 x2, TP x2, PP x2, 1F1B", "HSDP 2x2, TP x2", ONE, "CP x2, 4 updates a batch", REJECTION,
        "FSDP2 x2, PP x2, ZBVZeroBubble, rejection",
    ),
    "qwen3": (
        "CP x2, separate prompts", "PP x2, ZBVZeroBubble, separate prompts",
        "replicate x2", "FSDP2 x2, TP x2", "PP x2, 1F1B", "FSDP2 x2, CP x2, TP x2", "CP x2, PP x2, ZBVZeroBubble", ONE,
        "PP x2, ZBVZeroBubble, 4 updates a batch", "one process, compiled", "PP x2, VHalf, full AC, offload",
        "FSDP2 x2, full AC, compiled", "PP x2, ZBVZeroBubble, full AC, compiled",
    ),
    "qwen2": (
        *(f"PP x2, {schedule}" for schedule in SCHEDULES), "PP x2, GPipe", "FSDP2 x2, PP x2, 1F1B",
        "TP x2, PP x2, Interleaved1F1B", "PP x2, ZBVZeroBubble, 4 updates a batch", ONE,
    ),
    "qwen3_moe": (
        "FSDP2 x2 lent to EP x2, separate prompts", "PP x2, ZBVZeroBubble", "FSDP2 x4, EP x2", "FSDP2 x2 lent to EP x2, TP x2",
        "PP x2, ZBVZeroBubble, FSDP2 x2, EP x2",
    ),
}  # fmt: skip

# Layouts with --quick of the models that have parts which llama3 lacks: norms of queries and keys,
# and embeddings that are tied across two ranks, or across two stages of one rank.
QUICK = {
    "qwen3": ("one process", "FSDP2 x2, PP x2, ZBVZeroBubble"),
    "qwen2": ("one process", "PP x2, 1F1B", "PP x2, ZBVZeroBubble"),
}


def layouts_of(model: str, choice: Choice, only: str | None = None) -> list[Layout]:
    """Returns the layouts under which a model is run.

    Mixtures of experts and real models have layouts of their own. Qwen2 is run for its tied embeddings, which only
    pipelines treat differently, so other layouts of Qwen2 are left out.
    """
    layouts = {"qwen3_moe": MOE_LAYOUTS, REAL: REAL_LAYOUTS}.get(model, LAYOUTS)
    if model == "qwen2":
        baselines = {layout.baseline for layout in layouts}
        layouts = [x for x in layouts if "pp" in x.settings or x.name in baselines]
    if only is not None:
        found = [layout for layout in layouts if only in layout.name]
        baselines = {layout.baseline for layout in found}
        return [layout for layout in layouts if layout in found or layout.name in baselines]
    if model == REAL:
        return layouts
    if choice == "quick" and model in QUICK:
        return [layout for layout in layouts if layout.name in QUICK[model]]
    names = ALSO_BY_DEFAULT[model] if choice == "default" else ()
    return [
        layout for layout in layouts if choice == "all" or layout.is_quick or layout.name in names
    ]
