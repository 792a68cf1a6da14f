# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tables that torchtitan 0.2 also has, with its names and those of its keys that make sense here.

Torchtitan's releases differ in how they are configured, so none of torchtitan's own classes is used.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class Job:
    """``[job]``: the run, and the folder for its files."""

    config_file: str | None = None
    """TOML file that is read; only on the command line."""

    dump_folder: str = "./outputs"
    """Folder for everything that the run writes."""

    description: str = "default job"
    """Words that are shown at the start."""

    print_config: bool = False
    """Log all settings at the start."""

    overwrite: bool = False
    """Start a new run in a ``dump_folder`` that contains an earlier run. Everything that the
    earlier run wrote, including its checkpoints and exports, is moved to ``replaced-TIME`` in that
    folder, and is removed once the new run has completed a step; other files are kept. It counts
    once: ranks and jobs that are started again go on with the run. Without this setting, such a run
    is refused unless it resumes from a checkpoint in the folder."""


@dataclass
class Profiling:
    """``[profiling]``: traces of torch's profiler, and snapshots of the GPU's memory."""

    enable_profiling: bool = False
    """Write a trace of each rank every ``profile_freq`` steps."""

    save_traces_folder: str = "profile_traces"
    """Folder for traces in ``job.dump_folder``."""

    profile_freq: Annotated[int, at_least(1)] = 10
    """Number of steps between two traces, and between two snapshots."""

    profiler_active: Annotated[int, at_least(1)] = 1
    """Number of steps in a trace."""

    profiler_warmup: Annotated[int, at_least(0)] = 3
    """Number of steps in which the profiler runs before a trace begins."""

    enable_memory_snapshot: bool = False
    """Record every allocation of GPU memory, and write what was recorded."""

    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder for snapshots in ``job.dump_folder``."""


@dataclass
class Metrics:
    """``[metrics]``: TensorBoard and wandb. Every step is logged, since a run has few of them."""

    log_freq: Annotated[int, at_least(1)] = 1
    """Number of steps between two entries in TensorBoard and wandb. ``metrics.jsonl`` always has
    every step."""

    enable_tensorboard: bool = False
    """Write metrics for TensorBoard."""

    save_tb_folder: str = "tb"
    """Folder for TensorBoard's and wandb's files in ``job.dump_folder``."""

    enable_wandb: bool = False
    """Send metrics to Weights & Biases."""


@dataclass
class Model:
    """``[model]``: the model, whose architecture and sizes are those of a Hugging Face directory."""

    hf_assets_path: str = ""
    """Hugging Face directory with config.json, tokenizer.json and safetensors files, or the name of
    a model on the Hub, as ``organization/name`` or ``organization/name@revision``. If a directory
    of that name exists, it takes precedence. Required."""


@dataclass
class Optimizer:
    """``[optimizer]``: the optimizer; its defaults are those for a trained model."""

    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """Optimizer. ``Muon`` trains the matrices inside blocks with Muon, treating each expert's
    matrices separately, and trains the embedding, the output layer, norms and biases with AdamW.
    docs/how-to/muon.md describes its cost."""

    lr: Annotated[float, at_least(0)] = 1e-6
    """Learning rate after the warmup. 1e-6 is the value of the GRPO and DAPO papers
    (https://arxiv.org/abs/2402.03300, https://arxiv.org/abs/2503.14476), and the default of TRL's
    ``GRPOConfig`` and of prime-rl. Small models, and training of few parameters, need a higher
    one."""

    beta1: Annotated[float, at_least(0).below(1)] = 0.9
    """Decay rate of AdamW's first moment."""

    beta2: Annotated[float, at_least(0).below(1)] = 0.999
    """Decay rate of AdamW's second moment. The default is that of TRL, verl and prime-rl."""

    eps: Annotated[float, above(0)] = 1e-8
    """AdamW's epsilon."""

    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How torch steps AdamW: parameter by parameter, or many parameters in one kernel."""

    weight_decay: Annotated[float, at_least(0)] = 0.0
    """Weight decay of AdamW and Muon. 0 is the default of TRL and, for reinforcement learning, of
    prime-rl. At such low learning rates, weight decay has little effect, and it would pull the
    policy away from its reference without any benefit to the reward. verl uses 0.01, and its DAPO
    recipe 0.1."""

    muon_lr: Annotated[float, above(0).or_value(0, "optimizer.lr")] = 0.0
    """Experimental: Learning rate of Muon after the warmup, before ``muon_adjust_lr`` is applied.
    ``optimizer.lr`` remains the learning rate of AdamW, which ``name = "Muon"`` uses for all
    parameters that are not matrices. All ``muon_...`` settings require ``name = "Muon"``."""

    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How Muon's learning rate depends on the shape of a matrix. ``match_rms_adamw`` (Moonlight)
    makes updates about as large as those of AdamW, so that AdamW's learning rate can be used.
    ``original`` requires ``muon_lr``. docs/how-to/muon.md has the formulas."""

    muon_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type in which Muon gathers and orthogonalizes updates. With ``bfloat16``, as in torch,
    steps under two layouts differ by about the precision of bfloat16, because orthogonalization
    magnifies rounding errors of the gradients. With ``float32``, they agree as closely as those of
    AdamW, at twice the communication and a longer compute time. Measured by
    ``benchmarks/layout_parity.py``."""

    offload_while_lent: bool = False
    """Experimental: Move the optimizer's states to pinned host memory while the devices are lent
    (``inference.lend``, ``[cluster]``), so that the servers can use their memory. They are copied back while the
    forward and backward passes of the next batch run. The host needs as much memory as the states
    of its ranks. Needs GPUs."""


@dataclass
class LRScheduler:
    """``[lr_scheduler]``: a warmup, a constant phase, and a decay at the end of the run.

    All lengths count batches (``training.steps``), not optimizer steps.
    """

    warmup_steps: Annotated[int, at_least(0)] = 10
    """Number of steps over which the learning rate rises from 0. The default is that of verl's DAPO
    recipe. The DAPO paper uses 20; TRL, verl and prime-rl have no warmup by default."""

    total_steps: int | None = None
    """Length of the schedule; ``training.steps`` if it is not set. A run that is to be extended
    keeps its schedule if it begins with the later length."""

    decay_ratio: Annotated[float, at_least(0).at_most(1)] = 0.0
    """Fraction of the run, at its end, over which the learning rate decays to ``min_lr_factor``
    times its value. 0 keeps the learning rate constant after the warmup, as in prime-rl, verl and
    the DAPO paper; a run can then be extended at any time without a jump of the learning rate. With
    1, it decays from the end of the warmup on, as in torchtitan's default and in TRL, whose default
    is a linear decay."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: Annotated[float, at_least(0).at_most(1)] = 0.0
    """Learning rate at the end of the decay, as a fraction of ``optimizer.lr``."""


@dataclass
class Training:
    """``[training]``: steps, rows, and precision."""

    steps: Annotated[int, at_least(1)] = 10000
    """Number of batches to train on."""

    seq_len: Annotated[int, at_least(1)] = 2048
    """Number of tokens in a row, into which sequences are packed."""

    local_batch_size: Annotated[int, at_least(1)] = 8
    """Number of rows in a microbatch of each data-parallel rank."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    """Data type of parameters, gradients and optimizer states."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type in which FSDP gathers parameters and computes."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """Data type in which FSDP reduces gradients."""

    gc_freq: Annotated[int, at_least(1)] = 50
    """Number of steps between two runs of Python's garbage collector, which all ranks run together."""

    max_norm: Annotated[float, above(0)] = 1.0
    """Maximum gradient norm; a gradient with a larger norm is scaled down to it (gradient
    clipping). 1 is also the default of torchtitan, TRL, verl and prime-rl."""


@dataclass
class Parallelism:
    """``[parallelism]``: how the model is divided over ranks."""

    data_parallel_replicate_degree: Annotated[int, at_least(1)] = 1
    """Number of replicas, each of which is sharded: HSDP above 1."""

    data_parallel_shard_degree: int = -1
    """Number of ranks over which FSDP shards parameters. -1 takes the ranks that are left."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP frees the parameters of a block after its forward pass. ``default`` does so
    without a pipeline."""

    tensor_parallel_degree: Annotated[int, at_least(1)] = 1
    """Number of ranks over which each matrix is divided."""

    enable_async_tensor_parallel: bool = False
    """Overlap the collectives of tensor parallelism with products; needs ``compile.enable``."""

    context_parallel_degree: Annotated[int, at_least(1)] = 1
    """Number of ranks over which each row is divided."""

    expert_parallel_degree: Annotated[int, at_least(1)] = 1
    """Number of ranks over which the experts are divided."""

    pipeline_parallel_degree: Annotated[int, at_least(1)] = 1
    """Number of ranks over which the layers are divided."""

    pipeline_parallel_schedule: str = "1F1B"
    """Name of the schedule, or ``auto``. docs/schedules.md lists them."""

    pipeline_parallel_microbatch_size: Annotated[int, at_least(1)] = 1
    """Number of rows of ``local_batch_size`` in one microbatch of the pipeline."""

    module_fqns_per_model_part: list[list[str]] | None = None
    """Names of the modules of each stage, in place of an even division."""

    pipeline_parallel_first_stage_less_layers: Annotated[int, at_least(0)] = 1
    """Number of layers by which the first stage is lighter, for the embedding."""

    pipeline_parallel_last_stage_less_layers: Annotated[int, at_least(0)] = 1
    """Number of layers by which the last stage is lighter, for the output layer."""

    pipeline_parallel_layers_per_stage: Annotated[int | None, at_least(1)] = None
    """Number of layers in a stage, in place of the number of stages that the schedule implies."""

    fsdp_between_microbatches: Literal["auto", "free", "keep_parameters", "keep_all"] = "auto"
    """What each rank keeps between the microbatches of an optimizer step: nothing (``free``), the
    gathered parameters (``keep_parameters``), or also the gradients that are not reduced yet
    (``keep_all``). ``auto`` keeps what fits beside the training states and the activations,
    parameters first. docs/parallelism.md compares the values, and ``--dry-run`` shows the figures.
    The gradients are equal up to the order in which they are added. A batch that is streamed
    (``rollout.stream``) does all of this once for each of its parts. Pipelines always keep both;
    ``fsdp_reshard_after_forward = "always"`` keeps no parameters."""

    pipeline_fill_jobs: list[str] = field(default_factory=list)
    """Functions that run in the idle time of a pipeline's training passes, each named
    ``package.module:function`` or ``path/to/file.py:function``. A function is called as
    ``job(context)`` on every training rank and is a generator: what it does up to the next
    ``yield`` is a unit, which should take 1 to 20 ms. Units of the first function that fit are run
    first. They do not change what is learned; docs/how-to/fill-the-gaps.md describes what a job may
    do. Used with ``pipeline_parallel_degree`` above 1. Measured by ``benchmarks/pipeline_fill.py``."""


@dataclass
class Checkpoint:
    """``[checkpoint]``: what is saved, and what a run begins with."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder."""

    folder: str = "checkpoint"
    """Folder for checkpoints in ``job.dump_folder``."""

    interval: Annotated[int, at_least(1)] = 500
    """Number of steps between two checkpoints."""

    initial_load_path: str | None = None
    """Checkpoint of another run, including its step folder, from which a run starts whose own
    folder holds none."""

    initial_load_model_only: bool = True
    """Load only the model from ``initial_load_path``, not the optimizer and the step."""

    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Data type of a last checkpoint that is only the model."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Whether training waits until a checkpoint is written. ``async`` writes it on a thread, and
    ``async_with_pinned_mem`` in a process, through pinned memory."""

    keep_latest_k: Annotated[int, at_least(0)] = 10
    """Number of checkpoints that are kept; 0 keeps all."""

    load_step: int = -1
    """Step of the checkpoint that is loaded; -1 for the newest."""

    exclude_from_loading: list[str] = field(default_factory=list)
    """Parts of a checkpoint that are not loaded: ``optimizer``, ``lr_scheduler``, ``train_state``."""

    enable_first_step_checkpoint: bool = False
    """Also save after the first step, to see whether saving works."""

    load_only: bool = False
    """Load a checkpoint, and save none."""

    last_save_model_only: bool = False
    """Save only the model at the last step. With False, the default here, the last checkpoint is
    complete, so that a finished run can be continued with more ``training.steps``."""

    save_failure: Literal["warn", "stop"] = "warn"
    """What happens if a checkpoint cannot be written, because the disk is full or not writable.
    ``warn`` logs a warning, and training continues until the next checkpoint. ``stop`` ends the
    run. In either case, earlier checkpoints are kept and the incomplete one is removed."""


@dataclass
class ActivationCheckpoint:
    """``[activation_checkpoint]``: which activations are computed again in the backward pass."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """``full`` keeps only the inputs of blocks, ``selective`` more (``selective_ac_option``), and
    ``memory_budget`` leaves it to the compiler."""

    selective_ac_option: str = "2"
    """A number n lets every n-th block compute again; ``op`` keeps the results of attention and of
    every second matrix product in each block."""

    memory_budget: float = 0.5
    """Fraction of the activations that the compiler may keep, from 0 to 1."""

    preserve_rng_state: bool = True
    """Restore the state of random numbers before activations are computed again."""


@dataclass
class Compile:
    """``[compile]``: torch.compile."""

    enable: bool = False
    """Compile the model's layers."""

    backend: str = "inductor"
    """Backend of torch.compile."""


@dataclass
class Comm:
    """``[comm]``: collectives between training ranks."""

    init_timeout_seconds: Annotated[int, at_least(1)] = 300
    """Timeout of collectives until the end of the first step."""

    train_timeout_seconds: Annotated[int, at_least(1)] = 100
    """Timeout of collectives afterwards."""

    trace_buf_size: Annotated[int, at_least(0)] = 20000
    """Number of collectives that NCCL's flight recorder remembers and writes to a file after a
    timeout; 0 turns it off."""

    save_traces_folder: str = "comm_traces"
    """Folder for these files in ``job.dump_folder``."""

    save_traces_file_prefix: str = "rank_"
    """Beginning of their names."""


@dataclass
class Debug:
    """``[debug]``: repeatable runs."""

    seed: int | None = None
    """Seed of random numbers; drawn at the start if it is not set."""

    deterministic: bool = False
    """Use only kernels whose results repeat, which may be slower."""

    deterministic_warn_only: bool = False
    """Warn where there is no such kernel, instead of failing."""
