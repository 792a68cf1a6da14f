# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The TOML tables that the overlay adds to torchtitan's, one dataclass each.

Plain data without torch, so that the rollout process can import it. Reading and checking
a file is `config_manager.py`'s work.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class GRPO:
    """``[grpo]``: the algorithm."""

    group_size: int = 8
    """Rollouts per prompt, at least 2: advantages are relative to the group."""

    prompts_per_step: int = 16
    """Prompt groups in one optimizer step, at least 1. The global batch is
    ``prompts_per_step * group_size`` rollouts."""

    clip_low: float = 0.2
    """The ratio's floor is ``1 - clip_low``, in [0, 1)."""

    clip_high: float = 0.2
    """The ratio's ceiling is ``1 + clip_high``, above 0. DAPO uses 0.28."""

    old_policy: Literal["step_start", "sampling"] = "step_start"
    """What the clipped ratio is taken against. ``step_start``: the policy at the start of
    the step (decoupled PPO); the gap to the sampling-time policy is then corrected by a
    truncated importance weight, see ``importance_cap``. ``sampling``: the recorded
    sampling-time logprobs themselves, with no further weight."""

    importance_cap: float = 2.0
    """Upper bound of the per-token importance weight between the step's first policy and
    the sampling-time policy, above 0. Used with ``old_policy = "step_start"``."""

    advantage_eps: float = 1e-4
    """Added to the group's standard deviation before dividing by it, above 0."""

    kl_coef: float = 0.0
    """Weight of the k3 KL penalty against the reference model; 0 builds no reference."""

    ref_model_path: str | None = None
    """Hugging Face directory of the reference model; None is ``model.hf_assets_path``.
    Used where ``kl_coef`` is above 0."""

    async_weight_update: bool = True
    """Push weights on a background thread while the next step runs. False pushes in the
    foreground, between two steps."""

    packed_attention: Literal["auto", "sdpa", "flex"] = "auto"
    """How attention is kept inside each sequence of a packed row: ``sdpa`` with a dense
    mask (quadratic memory in ``training.seq_len``), or compiled FlexAttention (CUDA
    only). ``auto``: flex on CUDA from 2,048 tokens a row on, sdpa otherwise."""

    hf_export_interval: int = 0
    """Export a Hugging Face directory to ``<dump_folder>/hf/step-N`` every this many
    steps; 0 exports at the end only."""

    stop_timeout_seconds: float = 8.0
    """After Ctrl-C or SIGTERM the step under way is finished and, with
    ``checkpoint.enable``, a checkpoint is written. What has not ended after this long is
    ended hard; earlier checkpoints stay. Raise it where a checkpoint takes longer."""


@dataclass
class Prompts:
    """``[prompts]``: what is asked."""

    path: str = ""
    """A ``.jsonl`` file, or the name or directory of a Hugging Face data set. Required."""

    name: str | None = None
    """Configuration of a Hugging Face data set that has several, such as ``main`` of
    ``openai/gsm8k``; not used for JSONL."""

    split: str = "train"
    """Split of a Hugging Face data set; not used for JSONL."""

    column: str = "prompt"
    """Column that holds the prompt: a string, or a list of chat messages, which the
    tokenizer's chat template turns into text."""

    rename: dict[str, str] = field(default_factory=dict)
    """Columns renamed before use, as ``{old = "new"}``."""

    template: str | None = None
    """Python format string around a string prompt, such as ``"Question: {prompt}\\nAnswer:"``.
    None leaves the prompt as it is."""

    shuffle: bool = True
    """Shuffle anew each epoch, by ``debug.seed``."""

    max_prompt_tokens: int = 0
    """Longer prompts are left out, and counted; 0 is ``training.seq_len`` less
    ``rollout.max_new_tokens``."""


@dataclass
class Rollout:
    """``[rollout]``: sampling, and how far generation may run ahead."""

    max_head_offpolicyness: int = 1
    """Largest age, in optimizer steps, that a trained sample may have; holds for every
    sample. 0 is synchronous, on-policy training."""

    max_concurrent_rollouts: int = 256
    """Completions in flight over all servers, at least ``grpo.group_size``."""

    max_new_tokens: int = 256
    """Longest completion, in tokens."""

    temperature: float = 1.0
    """Sampling temperature, above 0. The trainer scores with the same temperature."""

    top_p: float = 1.0
    """Nucleus bound in (0, 1]; 1 is off. The trainer scores with the whole distribution,
    so anything below 1 biases the importance ratio: vLLM reports logprobs renormalised
    over the kept tokens, SGLang and the embedded server report those of the whole
    distribution for tokens that were drawn from a part of it."""

    top_k: int = -1
    """Number of most likely tokens kept, at least 1; -1 is off. The same bias as
    ``top_p``."""

    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion besides the model's own end-of-sequence tokens."""

    ignore_eos: bool = False
    """Write ``max_new_tokens`` tokens whatever the model says: for benchmarks, and for
    verification runs that want requests in flight at every push."""

    request_timeout_seconds: float = 600.0
    """Longest time that one completion may take before its request is aborted and
    counted as failed."""

    batch_timeout_seconds: float = 1800.0
    """Longest time that the trainer waits for a batch before it gives up."""

    max_consecutive_failures: int = 32
    """The run stops after this many completions in a row failed on the servers."""


@dataclass
class Inference:
    """``[inference]``: the servers that write rollouts."""

    kind: Literal["embedded", "sglang", "vllm"] = "embedded"
    """``embedded`` is this project's own small server; it needs nothing else installed."""

    urls: list[str] = field(default_factory=list)
    """Base URLs of running servers, ``http://host:port``. Required unless ``launch``."""

    launch: bool = False
    """Start ``num_servers`` servers on this machine, on free ports, and end them with the
    run. Not together with ``urls``."""

    num_servers: int = 1
    """Servers to launch, at least 1."""

    python: str | None = None
    """Python interpreter of the servers' environment, used with ``launch``. None is this
    interpreter, which suits the embedded server. vLLM and SGLang want environments of
    their own, see scripts/install_vllm.sh and scripts/install_sglang.sh."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of launched servers. ``auto``: CUDA where there is a GPU."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights' dtype in launched servers. ``auto``: float32 on CPU, bfloat16 on CUDA."""

    max_model_len: int = 0
    """Longest sequence of launched servers, at least the longest prompt with
    ``rollout.max_new_tokens``; 0 is ``training.seq_len``."""

    extra_args: list[str] = field(default_factory=list)
    """Further command line arguments of launched servers, passed as they are. Each server
    is also given a sampling seed: ``debug.seed`` plus its index."""

    api_key: str | None = None
    """Key for generation routes. None reads the environment variable
    ``TORCHTITAN_GRPO_API_KEY``."""

    admin_key: str | None = None
    """Key for control routes (SGLang's ``--admin-api-key``). None reads
    ``TORCHTITAN_GRPO_ADMIN_KEY``."""

    startup_timeout_seconds: float = 300.0
    """Longest time until a server, launched or not, answers that it is up."""

    control_timeout_seconds: float = 30.0
    """Bound of one control request, such as pause or version."""


@dataclass
class WeightSync:
    """``[weight_sync]``: how weights travel to the servers."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Transport of the weight groups. ``auto`` with ``inference.launch``: NCCL where trainer
    and servers each have GPUs of their own, gloo otherwise. ``auto`` with
    ``inference.urls``: NCCL where the trainer has a GPU; set gloo for servers on CPU or on
    the trainer's own GPU, which it cannot see."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Wire dtype. ``auto``: ``training.mixed_precision_param``, which is what the
    trainer's own forward computes with."""

    bucket_bytes: int = 64 * 1024 * 1024
    """Tensors travel in buckets of about this size; one tensor is never split."""

    num_slots: int = 2
    """Snapshots of the local shards that may be alive at once, at least 2: one is sent
    while the next is filled."""

    master_address: str = "auto"
    """Address under which servers reach rank 0. ``auto``: this host's address on the
    route to each server, which is 127.0.0.1 for a server on this machine."""

    timeout_seconds: float = 120.0
    """Bound of joining a server's group, and of each bucket."""


@dataclass
class Reward:
    """``[reward]``: scoring."""

    functions: list[str] = field(default_factory=list)
    """Reward functions as dotted paths, ``package.module:function`` or
    ``path/to/file.py:function``; a bare name is a built-in one: ``exact_match``,
    ``partial_match``, ``boxed_math``, ``think_answer_tags``. At least one."""

    weights: list[float] = field(default_factory=list)
    """One weight a function; empty is 1.0 each."""

    num_workers: int = 1
    """Processes that score, at least 1."""

    timeout_seconds: float = 30.0
    """A worker that takes longer for one group is killed; the group is then unscored."""

    max_consecutive_failures: int = 8
    """The run stops after this many groups in a row could not be scored."""


@dataclass
class Evaluation:
    """``[evaluation]``: held-out prompts, decoded greedily."""

    path: str | None = None
    """Held-out prompts, in the form of ``prompts.path``; None evaluates nothing."""

    name: str | None = None
    """Configuration of a Hugging Face data set that has several; not used for JSONL."""

    split: str = "test"
    """Split of a Hugging Face data set; not used for JSONL."""

    num_prompts: int = 256
    """The first this many rows are used; 0 is all."""

    function: str = "exact_match"
    """Reward function whose mean is reported as ``evaluation/score``."""

    interval: int = 0
    """Evaluate every this many steps, besides before the first and after the last; 0 is
    only those two."""


@dataclass
class Observe:
    """``[observe]``: what a run leaves behind, besides torchtitan's ``[metrics]``."""

    samples_per_step: int = 4
    """Rollouts written to ``samples.jsonl`` each step; 0 writes none."""

    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """Live line (``bar``), a line a step (``lines``). ``auto``: bar on a terminal."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """What of torchtitan's own log rank 0 prints; other ranks print warnings only."""


@dataclass
class RolloutProcessConfig:
    """What the rollout process is given by rank 0: the tables it needs, and some facts."""

    grpo: GRPO
    prompts: Prompts
    rollout: Rollout
    inference: Inference
    reward: Reward
    evaluation: Evaluation
    hf_assets_path: str
    """Directory of the model: tokenizer, and weights for launched servers."""
    vocab_size: int
    eos_token_ids: list[int]
    seq_len: int
    """``training.seq_len``: prompt plus completion fit into one row."""
    seed: int
    dump_folder: str
    server_gpus: list[str]
    """GPUs of launched servers, as in ``CUDA_VISIBLE_DEVICES``; empty without any."""
    start_version: int
    """Optimizer steps already taken (a resumed run)."""
    prompt_position: int
    """Prompts already used up (a resumed run)."""

    def to_dict(self) -> dict[str, Any]:
        from dataclasses import asdict

        return asdict(self)
