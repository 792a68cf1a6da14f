# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""All tables of a run's configuration: torchtitan's own, and those that this project adds."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtitan.grpo import config as grpo_config
from torchtitan.grpo.config.bounds import above, at_least
from torchtitan.grpo.config.cluster import lent_groups
from torchtitan.grpo.config.environments import reward_functions
from torchtitan.grpo.upstream.configuration import job_config


@dataclass
class Job(job_config.Job):
    """``[job]``: torchtitan's table."""

    overwrite: bool = False
    """Start a new run in a ``dump_folder`` that contains an earlier run. Everything that the
    earlier run wrote, including its checkpoints and exports, is moved to ``replaced-TIME`` in that
    folder, and is removed once the new run has completed a step; other files are kept. It counts
    once: ranks and jobs that are started again go on with the run. Without this setting, such a run
    is refused unless it resumes from a checkpoint in the folder."""


@dataclass
class Checkpoint(job_config.Checkpoint):
    """``[checkpoint]``: torchtitan's table."""

    last_save_model_only: bool = False
    """Save only the model at the last step. With False, the default here, the last checkpoint is
    complete, so that a finished run can be continued with more ``training.steps``."""

    save_failure: Literal["warn", "stop"] = "warn"
    """What happens if a checkpoint cannot be written, because the disk is full or not writable.
    ``warn`` logs a warning, and training continues until the next checkpoint. ``stop`` ends the
    run. In either case, earlier checkpoints are kept and the incomplete one is removed."""


@dataclass
class Model(job_config.Model):
    """``[model]``: torchtitan's table. A Hugging Face directory determines the model."""

    name: str = "huggingface"
    """Must stay ``huggingface``: the architecture is read from ``hf_assets_path``."""

    flavor: str = "directory"
    """Must stay ``directory``: the sizes are read from ``hf_assets_path``."""

    hf_assets_path: str = ""
    """Hugging Face directory with config.json, tokenizer.json and safetensors files, or the name of
    a model on the Hub, as ``organization/name`` or ``organization/name@revision``. If a directory
    of that name exists, it takes precedence. Required."""


@dataclass
class Optimizer(job_config.Optimizer):
    """``[optimizer]``: torchtitan's table, whose own defaults are too large for a trained model."""

    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Optimizer. ``Muon`` trains the matrices inside blocks with Muon, treating each expert's
    matrices separately, and trains the embedding, the output layer, norms and biases with AdamW.
    docs/how-to/muon.md describes its cost."""

    lr: Annotated[float, at_least(0)] = 1e-6
    """Learning rate after the warmup. 1e-6 is the value of the GRPO and DAPO papers
    (https://arxiv.org/abs/2402.03300, https://arxiv.org/abs/2503.14476), and the default of TRL's
    ``GRPOConfig`` and of prime-rl. Small models, and training of few parameters, need a higher
    one."""

    beta2: Annotated[float, at_least(0).below(1)] = 0.999
    """Decay rate of AdamW's second moment. The default is that of TRL, verl and prime-rl."""

    weight_decay: Annotated[float, at_least(0)] = 0.0
    """Weight decay of AdamW and Muon. 0 is the default of TRL and, for reinforcement learning, of
    prime-rl. At such low learning rates, weight decay has little effect, and it would pull the
    policy away from its reference without any benefit to the reward. verl uses 0.01, and its DAPO
    recipe 0.1."""

    muon_lr: Annotated[float, above(0).or_value(0, "optimizer.lr")] = 0.0
    """Experimental: Learning rate of Muon after the warmup, before ``muon_adjust_lr`` is
    applied. ``optimizer.lr`` remains the learning rate of AdamW, which ``name = "Muon"`` uses
    for all parameters that are not matrices. All ``muon_...`` settings require ``name =
    "Muon"``."""

    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How Muon's learning rate depends on the shape of a matrix. ``match_rms_adamw`` (Moonlight)
    makes updates about as large as those of AdamW, so that AdamW's learning rate can be used.
    ``original`` requires ``muon_lr``. docs/how-to/muon.md has the formulas."""

    muon_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type in which Muon gathers and orthogonalizes updates. With ``bfloat16``, as in
    torch, steps under two layouts differ by about the precision of bfloat16, because
    orthogonalization magnifies rounding errors of the gradients. With ``float32``, they agree
    as closely as those of AdamW, at twice the communication and a longer compute time. Measured
    by ``benchmarks/layout_parity.py``."""

    offload_while_lent: bool = False
    """Experimental: Move the optimizer's states to pinned host memory while the devices are
    lent (``inference.lend``, ``[cluster]``), so that the servers can use their memory. They are
    copied back while the forward and backward passes of the next batch run. The host needs as
    much memory as the states of its ranks. Needs GPUs."""


@dataclass
class LRScheduler(job_config.LRScheduler):
    """``[lr_scheduler]``: torchtitan's table, with defaults for post-training.

    There is a warmup of ``warmup_steps``, a constant phase, and a decay at the end of the run. All
    lengths count batches (``training.steps``), not optimizer steps.
    """

    warmup_steps: Annotated[int, at_least(0)] = 10
    """Number of steps over which the learning rate rises from 0. The default is that of verl's DAPO
    recipe. The DAPO paper uses 20; TRL, verl and prime-rl have no warmup by default."""

    decay_ratio: Annotated[float, at_least(0).at_most(1)] = 0.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """Fraction of the run, at its end, over which the learning rate decays to ``min_lr_factor``
    times its value. 0 keeps the learning rate constant after the warmup, as in prime-rl, verl and
    the DAPO paper; a run can then be extended at any time without a jump of the learning rate. With
    1, it decays from the end of the warmup on, as in torchtitan's default and in TRL, whose default
    is a linear decay."""


@dataclass
class Training(job_config.Training):
    """``[training]``: torchtitan's table."""

    max_norm: Annotated[float, above(0)] = 1.0
    """Maximum gradient norm; a gradient with a larger norm is scaled down to it (gradient
    clipping). 1 is also the default of torchtitan, TRL, verl and prime-rl."""


@dataclass
class Parallelism(job_config.Parallelism):
    """``[parallelism]``: torchtitan's table."""

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
    ``yield`` is a unit, which should take 1 to 20 ms. Units of the first function that fit are
    run first. They do not change what is learned; docs/how-to/fill-the-gaps.md describes what a
    job may do. Used with ``pipeline_parallel_degree`` above 1. Measured by
    ``benchmarks/pipeline_fill.py``."""


@dataclass
class Metrics(job_config.Metrics):
    """``[metrics]``: torchtitan's table, with every step logged, since a run has few of them."""

    log_freq: Annotated[int, at_least(1)] = 1
    """Number of steps between two entries in TensorBoard and wandb. ``metrics.jsonl`` always has
    every step. Torchtitan's default is 10."""


@dataclass
class JobConfig(job_config.JobConfig):
    """Torchtitan's tables and those of `torchtitan/grpo/config/`."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    metrics: Metrics = field(default_factory=Metrics)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    grpo: grpo_config.GRPO = field(default_factory=grpo_config.GRPO)
    critic: grpo_config.Critic = field(default_factory=grpo_config.Critic)
    lora: grpo_config.LoRA = field(default_factory=grpo_config.LoRA)
    prompts: grpo_config.Prompts = field(default_factory=grpo_config.Prompts)
    rollout: grpo_config.Rollout = field(default_factory=grpo_config.Rollout)
    agent: grpo_config.Agent = field(default_factory=grpo_config.Agent)
    inference: grpo_config.Inference = field(default_factory=grpo_config.Inference)
    cluster: dict[str, grpo_config.ClusterRow] = field(default_factory=dict)
    """Tables ``[cluster.NAME]``, each with ``tags`` (``rollout``, or ``train`` and ``rollout``),
    ``num_servers`` and ``gpus``. They say which servers the run launches on rank 0's machine, and
    whether they share the GPUs of training ranks, in place of ``inference.num_servers`` and
    ``inference.lend``. docs/servers.md has an example."""

    weight_sync: grpo_config.WeightSync = field(default_factory=grpo_config.WeightSync)
    reward: grpo_config.Reward = field(default_factory=grpo_config.Reward)
    teacher: grpo_config.Teacher = field(default_factory=grpo_config.Teacher)
    workers: grpo_config.Workers = field(default_factory=grpo_config.Workers)
    evaluation: grpo_config.Evaluation = field(default_factory=grpo_config.Evaluation)
    sft: grpo_config.SFT = field(default_factory=grpo_config.SFT)
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tables ``[environments.NAME]``, each with a ``prompts.path`` and with settings that replace
    those of the run for its prompts, so that one run trains in several environments. ``weight`` is
    the relative frequency with which its prompts are drawn. It is set in all environments or in
    none; without it, they are drawn from in proportion to their numbers of prompts.
    docs/environments.md has an example."""

    guards: grpo_config.Guards = field(default_factory=grpo_config.Guards)
    observe: grpo_config.Observe = field(default_factory=grpo_config.Observe)

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a second trained model, which estimates values."""
        return self.grpo.advantage == "gae"

    @property
    def has_servers(self) -> bool:
        """Whether servers generate rollouts: neither in a replay nor in supervised training."""
        return self.rollout.replay is None and self.sft.path is None

    @property
    def lends_devices(self) -> bool:
        """Whether servers use the training devices while these wait."""
        return self.has_servers and bool(lent_groups(self))

    @property
    def may_be_taught(self) -> bool:
        """Whether rollouts may come with a teacher's ratings: from teachers, or from a file."""
        return bool(self.teacher.urls) or self.rollout.replay is not None

    @property
    def has_rewards(self) -> bool:
        """Whether the run learns from rewards: not from examples or from a teacher alone."""
        is_taught = bool(self.teacher.urls) and not reward_functions(self)
        return self.sft.path is None and not is_taught

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as plain data for printing and logging, with keys masked."""
        values = super().to_dict()
        for table, name in grpo_config.SECRETS:
            if values[table][name]:
                values[table][name] = "***"
        return values
