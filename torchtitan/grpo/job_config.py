# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""All tables of a run's configuration: torchtitan's own, and those that this project adds."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtitan.config import job_config

from torchtitan.grpo import config as grpo_config
from torchtitan.grpo.config.bounds import above, at_least

SECRETS = (("inference", "api_key"), ("inference", "admin_key"), ("teacher", "api_key"))
"""Table and key of each setting whose value is shown to nobody."""


@dataclass
class Job(job_config.Job):
    """``[job]``: torchtitan's table."""

    overwrite: bool = False
    """Begin a new run in a ``dump_folder`` that holds an earlier one: what that run wrote, its
    checkpoints and exports included, is removed first. Other files stay. Without it such a run is
    refused, unless it resumes from a checkpoint in the folder."""


@dataclass
class Checkpoint(job_config.Checkpoint):
    """``[checkpoint]``: torchtitan's table."""

    last_save_model_only: bool = False
    """Save the model alone at the last step. With False, the default here, the last checkpoint is
    whole, so that a finished run can go on with more ``training.steps``."""

    save_failure: Literal["warn", "stop"] = "warn"
    """What a checkpoint does that cannot be written, because the disk is full or cannot be written
    to. ``warn`` says so, and training goes on to the next one. ``stop`` ends the run. Earlier
    checkpoints stay in either case, and what was written in part is removed."""


@dataclass
class Model(job_config.Model):
    """``[model]``: torchtitan's table. A Hugging Face directory determines the model."""

    name: str = "huggingface"
    """Must stay ``huggingface``: the architecture is read from ``hf_assets_path``."""

    flavor: str = "directory"
    """Must stay ``directory``: the sizes are read from ``hf_assets_path``."""

    hf_assets_path: str = ""
    """Hugging Face directory with config.json, tokenizer.json and safetensors files, or a model on the
    Hub, as ``organisation/name`` or ``organisation/name@revision``. A directory of that name counts
    first. Required."""


@dataclass
class Optimizer(job_config.Optimizer):
    """``[optimizer]``: torchtitan's table, with defaults for post-training.

    A model that has been trained already is moved by small steps. Torchtitan's own defaults are
    those of pretraining.
    """

    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Optimizer. ``Muon`` trains the matrices inside of blocks with Muon, each expert's as one of its
    own, and embedding, output layer, norms and biases with AdamW. docs/how-to/muon.md tells what it
    costs."""

    lr: Annotated[float, at_least(0)] = 1e-6
    """Learning rate after the warm-up. 1e-6 is the value of the GRPO and DAPO papers
    (https://arxiv.org/abs/2402.03300, https://arxiv.org/abs/2503.14476), and the default of TRL's
    ``GRPOConfig`` and of prime-rl. Small models, and updates of few parameters, take more."""

    beta2: Annotated[float, at_least(0).below(1)] = 0.999
    """Decay of AdamW's second moment, as in TRL, verl and prime-rl."""

    weight_decay: Annotated[float, at_least(0)] = 0.0
    """AdamW's weight decay. 0 is the default of TRL and, for reinforcement learning, of prime-rl:
    with such learning rates a decay hardly acts, and it would pull the policy away from its
    reference for no reward. verl takes 0.01, its DAPO recipe 0.1. Muon's is the same."""

    muon_lr: Annotated[float, above(0).or_value(0, "optimizer.lr")] = 0.0
    """Learning rate of Muon after the warm-up, before ``muon_adjust_lr``. ``optimizer.lr`` stays that
    of AdamW, which ``name = "Muon"`` uses for what is no matrix. All ``muon_...`` are used with
    ``name = "Muon"``."""

    muon_momentum: Annotated[float, at_least(0).below(1)] = 0.95
    """Decay of Muon's momentum, as in torch and in the Muon post."""

    muon_nesterov: bool = True
    """Whether Muon's update looks one step ahead of its momentum."""

    muon_ns_steps: Annotated[int, at_least(1).below(100)] = 5
    """Iterations by which Muon makes an update orthogonal, as in torch."""

    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How Muon's learning rate depends on the shape of a matrix. ``match_rms_adamw`` (Moonlight) makes
    updates as large as AdamW's, so that AdamW's learning rate fits. ``original`` multiplies by
    ``sqrt(max(1, rows / columns))``, and needs a ``muon_lr`` of its own: the Muon post takes 0.02 for
    pretraining. Torch's default is ``original``."""

    muon_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type in which Muon gathers and orthogonalises updates. With ``bfloat16``, as in torch, steps
    under two layouts differ by about its precision, because it magnifies the last bits of gradients.
    With ``float32`` they agree as AdamW's do; it takes twice the communication and more time."""


@dataclass
class LRScheduler(job_config.LRScheduler):
    """``[lr_scheduler]``: torchtitan's table, with defaults for post-training.

    The learning rate rises for ``warmup_steps``, stays, and decays over the last part of the run.
    All of them count batches (``training.steps``), not optimizer steps.
    """

    warmup_steps: Annotated[int, at_least(0)] = 10
    """Number of steps over which the learning rate rises from 0, as in verl's DAPO recipe. The DAPO
    paper takes 20; TRL, verl's own default and prime-rl take none."""

    decay_ratio: Annotated[float, at_least(0).at_most(1)] = 0.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """Part of the run, at its end, over which the learning rate decays to ``min_lr_factor`` times its
    value. 0 keeps it constant after the warm-up, as prime-rl, verl and the DAPO paper do: a run can
    then be made longer at any time, without a jump of the learning rate. With 1 it decays from the
    end of the warm-up on, as in TRL, whose default is a linear decay, and as torchtitan's default."""


@dataclass
class Training(job_config.Training):
    """``[training]``: torchtitan's table."""

    max_norm: Annotated[float, above(0)] = 1.0
    """Largest norm of a gradient; a gradient with a larger one is scaled down to it. 1 is the default
    of torchtitan, TRL, verl and prime-rl alike."""


@dataclass
class Metrics(job_config.Metrics):
    """``[metrics]``: torchtitan's table, with every step logged.

    A step of reinforcement learning takes long, and a run has few of them.
    """

    log_freq: Annotated[int, at_least(1)] = 1
    """Number of steps between two entries in TensorBoard and wandb. ``metrics.jsonl`` has every step
    in any case. Torchtitan's own default is 10."""


@dataclass
class JobConfig(job_config.JobConfig):
    """Torchtitan's tables and those of `torchtitan/grpo/config/`."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    metrics: Metrics = field(default_factory=Metrics)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    grpo: grpo_config.GRPO = field(default_factory=grpo_config.GRPO)
    lora: grpo_config.LoRA = field(default_factory=grpo_config.LoRA)
    prompts: grpo_config.Prompts = field(default_factory=grpo_config.Prompts)
    rollout: grpo_config.Rollout = field(default_factory=grpo_config.Rollout)
    inference: grpo_config.Inference = field(default_factory=grpo_config.Inference)
    weight_sync: grpo_config.WeightSync = field(default_factory=grpo_config.WeightSync)
    reward: grpo_config.Reward = field(default_factory=grpo_config.Reward)
    teacher: grpo_config.Teacher = field(default_factory=grpo_config.Teacher)
    workers: grpo_config.Workers = field(default_factory=grpo_config.Workers)
    evaluation: grpo_config.Evaluation = field(default_factory=grpo_config.Evaluation)
    sft: grpo_config.SFT = field(default_factory=grpo_config.SFT)
    guards: grpo_config.Guards = field(default_factory=grpo_config.Guards)
    observe: grpo_config.Observe = field(default_factory=grpo_config.Observe)

    @property
    def has_servers(self) -> bool:
        """Whether servers generate rollouts: neither in a replay nor in supervised training."""
        return self.rollout.replay is None and self.sft.path is None

    @property
    def may_be_taught(self) -> bool:
        """Whether rollouts may come with a teacher's ratings: from teachers, or from a file."""
        return bool(self.teacher.urls) or self.rollout.replay is not None

    @property
    def has_rewards(self) -> bool:
        """Whether the run learns from rewards: not from examples or from a teacher alone."""
        is_taught = bool(self.teacher.urls) and not self.reward.functions
        return self.sft.path is None and not is_taught

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as plain data for printing and logging, with keys masked."""
        values = super().to_dict()
        for table, name in SECRETS:
            if values[table][name]:
                values[table][name] = "***"
        return values
