# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tables ``[grpo]``, the algorithm and the training step, ``[lora]`` and ``[critic]``."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class GRPO:
    """``[grpo]``: the algorithm.

    docs/losses.md has the formulas, the papers and advice. A step trains on one batch. It takes
    ``num_minibatches * num_epochs`` optimizer steps, then advances the learning-rate schedule by
    one, and pushes the weights to the servers as one new policy version. ``training.steps`` and all
    intervals count these steps, not optimizer steps.
    """

    group_size: Annotated[int, at_least(1)] = 8
    """Number of rollouts for each prompt. Advantages that compare the rollouts of a group need at
    least 2; ``advantage = "batch_norm"`` and ``"gae"`` also work with 1."""

    prompts_per_step: Annotated[int, at_least(1)] = 16
    """Number of prompt groups in one step. The global batch holds ``prompts_per_step *
    group_size`` rollouts."""

    num_minibatches: Annotated[int, at_least(1)] = 1
    """Number of minibatches into which a batch is split, with one optimizer step each. Prompt
    groups are not split, so the number cannot exceed ``prompts_per_step``. ``training.steps``,
    the learning-rate schedule (``lr_scheduler.warmup_steps``) and policy versions count
    batches, not minibatches. Measured by ``benchmarks/layout_parity.py``."""

    num_epochs: Annotated[int, at_least(1)] = 1
    """Number of times that each batch is trained on. If a batch takes more than one optimizer
    step (``num_minibatches * num_epochs``) and ``old_policy = "step_start"``, the trainer
    computes the log-probabilities of the old policy in an additional forward pass before the
    first optimizer step. Measured by ``benchmarks/layout_parity.py``."""

    advantage: Literal[
        "group_norm", "group_mean", "leave_one_out", "batch_norm", "max_rl", "gae",
    ] = "group_norm"  # fmt: skip
    """How advantages are computed from rewards: ``group_norm`` (GRPO), ``group_mean`` (Dr.GRPO),
    ``leave_one_out`` (RLOO), ``batch_norm`` (REINFORCE++-baseline), ``max_rl`` (MaxRL), which needs
    rewards of at least 0, or ``gae`` (PPO), for each token with the values of a critic, ``[critic]``. docs/losses.md has the formulas."""

    filter_zero_advantage: bool = False
    """Leave out groups in which all rewards are equal. Such groups have no gradient, but they would
    still count in the mean over tokens. The batch then has fewer groups;
    ``rollout.dynamic_sampling`` replaces them instead. This setting cannot be combined with a KL
    penalty in the reward (``kl_in``), which makes the rewards of such a group differ."""

    overlong_buffer: Annotated[int, at_least(1).or_value(0, "no penalty")] = 0
    """Length of the interval of DAPO's soft overlong penalty, in tokens. Over the last
    ``overlong_buffer`` tokens before ``rollout.max_new_tokens``, the penalty grows linearly from 0
    to ``overlong_penalty``."""

    overlong_penalty: Annotated[float, at_least(0)] = 1.0
    """Penalty that is subtracted from the reward of a completion of ``rollout.max_new_tokens``
    tokens. Used with ``overlong_buffer``."""

    policy_loss: str = "clip"
    """Policy loss of each token: ``clip`` (one ratio for each token), ``gspo`` (one ratio for each
    sequence), ``cispo``, ``reinforce`` (no ratio), or a custom function, named
    ``package.module:function`` or ``path/to/file.py:function``. docs/losses.md has the formulas, and
    ``examples/losses/`` has further losses."""

    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    """Experimental: Keyword arguments for a custom ``policy_loss`` function. An option that the
    function does not accept is refused. The built-in losses have no options; they use the
    settings below."""

    clip_low: Annotated[float, at_least(0).below(1)] = 0.2
    """Ratios below ``1 - clip_low`` are clipped."""

    clip_high: Annotated[float, above(0)] = 0.2
    """Ratios above ``1 + clip_high`` are clipped. DAPO uses 0.28, and GSPO uses 4e-4."""

    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """How token losses are aggregated. ``token_mean`` is the mean over all trained tokens of the
    global batch. ``sequence_mean`` is the mean over sequences of each sequence's mean over its
    tokens. ``constant_length`` (Dr.GRPO) divides each sequence's sum over its tokens by
    ``rollout.max_new_tokens`` and takes the mean over sequences."""

    old_policy: Literal["step_start", "sampling"] = "step_start"
    """Policy in the denominator of the ratio. ``step_start`` (decoupled PPO) is the policy before
    the first optimizer step of the batch; ``mismatch_correction`` then corrects for the difference
    between this policy and the policy that sampled the tokens. ``sampling`` uses the
    log-probabilities that the servers recorded, and applies no further correction."""

    mismatch_correction: Literal["none", "truncate", "mask"] = "truncate"
    """Importance weight for the difference between the policy before the batch's first optimizer
    step and the policy that sampled the tokens. ``truncate`` (TIS) clamps the importance ratio to
    [``importance_floor``, ``importance_cap``]. ``mask`` (MIS) uses the ratio inside these bounds
    and 0 outside. ``none`` applies no weight. Used with ``old_policy = "step_start"``."""

    mismatch_level: Literal["token", "sequence", "geometric"] = "token"
    """Level at which the importance ratio is computed: for each token alone (``token``), as the
    product over the trained tokens of the sequence (``sequence``), or as their geometric mean
    (``geometric``)."""

    importance_cap: Annotated[float, above(0)] = 2.0
    """Upper bound of the importance ratio of ``mismatch_correction``."""

    importance_floor: Annotated[float, at_least(0)] = 0.0
    """Experimental: Lower bound of the importance ratio of ``mismatch_correction``, below
    ``importance_cap``. With 0, there is no lower bound."""

    mismatch_max_k3: Annotated[float, above(0).or_value(0, "off")] = 0.0
    """Leave out each sequence whose mean ``k3`` estimate of the KL divergence between the
    sampling-time policy and the trainer's policy, over its trained tokens, is above this value,
    in nats per token. It can be combined with any ``mismatch_correction``. With ``old_policy =
    "sampling"``, it is applied to the current policy. Measured by
    ``benchmarks/layout_parity.py``."""

    off_policy_mask_threshold: Annotated[float, above(0).or_value(0, "off")] = 0.0
    """Leave out each sequence with a negative advantage that has become unlikely under the
    current policy (DeepSeek-V3.2): the mean over its trained tokens of the log-probability at
    sampling time minus the log-probability under the current policy is above this value, in
    nats per token. TRL recommends starting with 0.5. Measured by
    ``benchmarks/layout_parity.py``."""

    kl_coef: Annotated[float, at_least(0)] = 0.0
    """Weight of the KL penalty against the reference model. With 0, no reference model is built."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence from sampled tokens; docs/losses.md has the formulas.
    As a loss, ``k2`` has the gradient of the KL divergence."""

    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty is applied: as a term of the loss, or subtracted from the reward of each
    sequence before advantages are computed; with ``advantage = "gae"``, from that of each token."""

    ref_model_path: str | None = None
    """Hugging Face directory of the reference model, or its name on the Hub. With None, it is
    ``model.hf_assets_path``. Used with ``kl_coef`` above 0. Measured by
    ``benchmarks/layout_parity.py``."""

    ref_model_ema: Annotated[float, at_least(0).below(1)] = 0.0
    """Decay of an exponential moving average: after each step, the reference model becomes
    ``ema * reference + (1 - ema) * policy``. With 0, it is never updated. Measured by
    ``benchmarks/layout_parity.py``."""

    ref_model_offload: bool = False
    """Keep the shards of the reference model in host memory while they are not in use. Has no
    effect on CPU."""

    entropy_coef: Annotated[float, at_least(0)] = 0.0
    """Weight of the entropy bonus in the loss."""

    ptx_path: str | None = None
    """Experimental: A ``.jsonl`` file with supervised examples that are mixed into each batch.
    Each row has a string ``completion`` and may have a string ``prompt``. With None, no
    examples are mixed in. Needs ``rollout.temperature = 1``, because the trainer computes all
    log-probabilities at that temperature."""

    ptx_coef: Annotated[float, at_least(0)] = 1.0
    """Experimental: Weight of the supervised loss, the mean negative log-likelihood of the
    completion tokens of ``ptx_path``."""

    ptx_per_step: Annotated[int, at_least(1)] = 8
    """Experimental: Number of supervised examples in each step, at least ``num_minibatches``."""

    logprob_chunk_tokens: Annotated[int, at_least(1)] = 256
    """Number of tokens whose logits are computed at once, so that the full logits of shape
    [tokens, vocabulary] are never materialized. Measured by ``benchmarks/logprob_memory.py``."""

    logprob_keep_logits: bool = True
    """Experimental: Allocate the gradient of the output layer's weight in the forward pass, and
    keep as many logits in its memory as fit, so that the backward pass does not recompute them.
    The peak memory of a microbatch does not change, but each microbatch holds this memory from
    its forward pass to its backward pass. For this reason, no logits are kept, regardless of
    this setting, under a pipeline schedule whose last stage holds several microbatches at once
    (GPipe)."""

    pipeline_memory: Annotated[float, above(0)] = 1.5
    """Experimental: Upper bound of the activations that
    ``parallelism.pipeline_parallel_schedule = "auto"`` may hold, relative to those of 1F1B;
    docs/schedules.md shows what each schedule holds. If no schedule stays within the bound, the
    one that holds the fewest activations is used."""

    recompute_early_blocks: Annotated[int, at_least(0).or_value(-1, "all")] = 1
    """Number of checkpointed blocks of a pipeline stage, counted from its last block, that are
    recomputed while the stage waits for the gradient of its output. One block needs no
    additional memory; with more blocks, their activations are in memory at the same time. The
    gradients do not change. Has no effect without activation checkpointing, with compiled
    blocks, or with ``parallelism.fsdp_reshard_after_forward = "always"``. Measured by
    ``benchmarks/pipeline_schedules.py``."""

    pipeline_offload: Annotated[float, at_least(0).at_most(1).or_value(-1, "auto")] = 0.0
    """Fraction of a pipeline rank's forward passes whose activations are offloaded to host
    memory until their backward pass, beginning with the activations that are kept longest. -1
    offloads as many as can be copied while the rank computes, based on times and a bandwidth
    that are measured in an early step. Cannot be combined with ``compile.enable``. Measured by
    ``benchmarks/layout_parity.py``."""

    pipeline_chunk_tokens: Annotated[int, at_least(1).or_value(0, "all")] = 0
    """Number of tokens of a row for which the schedule Helix computes the parts of a layer
    other than attention at a time, so that the intermediate tensors of the feed-forward layers
    exist for these tokens alone. 0 means all tokens. Needs ``activation_checkpoint.mode =
    "full"``, and is not possible with tensor parallelism. Has no effect on the first and last
    part of the model, or under other schedules. Measured by ``benchmarks/helix_runtime.py``."""

    pipeline_fill_gaps: bool = True
    """Whether a pipeline computes the log-probabilities under the reference policy and the
    proximal policy in the idle time of its training passes, as long as this causes no delay,
    and trains a critic in the same passes as the policy. The former requires several
    minibatches (``num_minibatches``). The results do not change. With FSDP, the gathered
    parameters of both models are then in memory at the same time, and with a critic also the
    whole gradients of both and the activations of one more microbatch. Has no effect on a
    reference with ``ref_model_offload``, or on a reference whose KL is part of the reward.
    Measured by ``benchmarks/pipeline_gaps.py``."""

    max_pending_weight_grads_gib: Annotated[float, at_least(0).or_value(-1, "no bound")] = -1
    """Maximum memory, in GiB per rank, in which a zero-bubble schedule keeps the inputs and
    output gradients of linear layers whose weight gradients are computed later. When it is
    exceeded, the oldest weight gradients are computed immediately: the gradients do not change,
    but less idle time is filled. Other schedules do not defer weight gradients. Measured by
    ``benchmarks/long_rows.py``."""

    async_weight_update: bool = True
    """Push weights to the servers on a background thread while the next step runs. With False, the
    trainer waits for each push between two steps."""

    packed_attention: Literal["auto", "varlen", "flex", "sdpa"] = "auto"
    """Experimental: How attention is confined to each sequence of a packed row. ``varlen`` uses
    FlashAttention over sequences of several lengths, whose cost is that of the sequences alone.
    It needs a GPU of compute capability 8.0 or more, ``training.mixed_precision_param =
    "bfloat16"``, and attention heads of at most 256 dimensions, a multiple of 8. ``flex`` uses
    compiled FlexAttention and needs CUDA. ``sdpa`` uses a dense mask, whose memory grows with
    the square of ``training.seq_len``. ``auto`` uses ``varlen`` where it can run. Elsewhere, it
    uses ``flex`` on CUDA if rows have at least 2,048 tokens, and ``sdpa`` otherwise. On CUDA
    the kernel is tried before training starts, and ``auto`` replaces one that fails by the
    next. The log names the kernel in use."""

    hf_export_interval: Annotated[int, at_least(1).or_value(0, "only at the end")] = 0
    """Number of steps between two exports of the model as a Hugging Face directory,
    ``<dump_folder>/hf/step-N``. The last step is always exported."""

    stop_timeout_seconds: Annotated[float, above(0)] = 8.0
    """Maximum time between Ctrl-C, SIGTERM or SIGHUP and the end of the run. In this time, the run
    finishes the current step and, with ``checkpoint.enable``, writes a checkpoint. A process that
    is still running afterwards is killed; earlier checkpoints are kept. Raise the value if writing
    a checkpoint takes longer."""

    lost_rank_seconds: Annotated[float, above(0)] = 60.0
    """Maximum time, in seconds, without a heartbeat from a training rank. After this time, the rank
    counts as lost, and all ranks end; torchrun restarts them if ``--max-restarts`` allows it. A
    rank whose process ends is detected immediately. Heartbeats are sent by a separate thread, so a
    slow step, a compilation, or a slow disk does not delay them."""


@dataclass
class LoRA:
    """``[lora]``: training low-rank adapters (https://arxiv.org/abs/2106.09685) instead of all weights.

    Each target ``W`` becomes ``W + alpha / rank * B A``. ``W`` and all other weights of the model
    are frozen; only ``A`` and ``B`` have gradients and optimizer states. docs/how-to/lora.md
    describes how a run with adapters differs from other runs.
    """

    rank: Annotated[int, at_least(1).or_value(0, "all weights are trained")] = 0
    """Rank of the adapters: the number of rows of ``A`` and of columns of ``B``. With 0, there are
    no adapters, and the other settings of this table have no effect."""

    alpha: Annotated[float, above(0)] = 32.0
    """Scaling of the adapters: the product ``B A`` is multiplied by ``alpha / rank``. As in PEFT,
    ``A`` is initialized with random values and ``B`` with zeros, so that the initial model is
    unchanged."""

    target_modules: list[str] = field(
        default_factory=lambda: [
            *("q_proj", "k_proj", "v_proj", "o_proj"),
            *("gate_proj", "up_proj", "down_proj"),
        ]
    )
    """Experimental: Linear layers that get adapters, named by the last part of their name in
    Hugging Face's model, as in PEFT's ``target_modules``. The default is all linear layers. In
    mixture-of-experts models, only attention, and the feed-forward layers of dense blocks, can
    have adapters."""

    base_dtype: Literal["training", "bfloat16"] = "training"
    """Experimental: Data type in which the frozen weights are kept. ``training`` is
    ``training.dtype``. ``bfloat16`` needs half the memory of float32, and is lossless if the
    model directory stores the weights in bfloat16. In either case, the forward pass computes in
    ``training.mixed_precision_param``, and adapters, their gradients and optimizer states have
    ``training.dtype``."""

    push: Literal["merged", "adapters"] = "merged"
    """What is sent to the servers. ``merged`` sends all weights of the model, with the adapters
    added to their targets, to servers of any kind. ``adapters`` sends only the adapters, to servers
    that add them to their own base weights. Such servers must have been started with the model of
    ``model.hf_assets_path``, and an SGLang server must have been started by this project."""


@dataclass
class Critic:
    """``[critic]``: a second trained model that estimates the reward to come, for advantages by GAE.

    It is used with ``grpo.advantage = "gae"``, has the layout of the policy, and is trained on the
    same minibatches. docs/losses.md has the formulas and the papers, and docs/how-to/critic.md says
    what it costs and when it pays.
    """

    path: str | None = None
    """Experimental: Hugging Face directory of the model that the critic starts from, or its
    name on the Hub. It must have the architecture and the sizes of the policy. With None, it is
    ``model.hf_assets_path``. The head that computes values starts at zero, unless the directory
    holds a head of one output, ``score.weight``, as reward models do."""

    lr: Annotated[float, at_least(0)] = 1e-5
    """Learning rate of the critic after the warmup. With Muon it is also that of
    matrices. All other settings of ``[optimizer]`` and ``[lr_scheduler]``, and
    ``training.max_norm``, apply to both models. verl's default is 1e-5,
    too; it is usually higher than the policy's."""

    gamma: Annotated[float, above(0).at_most(1)] = 1.0
    """Discount of each decision: a token or, with ``level = "turn"``, a turn."""

    gae_lambda: Annotated[float, at_least(0).at_most(1)] = 0.95
    """Lambda of the policy's advantages. With 1, the advantage is the reward to come minus the
    value; with 0, it is the error of the value one decision ahead."""

    whiten: bool = True
    """Shift and scale the advantages of a batch to a mean of 0 and a variance of 1 over its trained
    tokens, on all ranks together. Cannot be combined with ``rollout.stream``."""

    value_clip: Annotated[float, above(0).or_value(0, "off")] = 0.2
    """A value that moves farther than this from the one before the batch's first optimizer step gains
    nothing. Matters only if a batch takes several optimizer steps. The default is TRL's."""

    warmup_steps: Annotated[int, at_least(0)] = 0
    """Experimental: Number of steps at the beginning in which only the critic learns. The
    policy, which takes no optimizer step, is published unchanged. Its learning-rate schedule
    counts these steps as well."""

    level: Literal["token", "turn"] = "token"
    """Experimental: Whether each trained token is a decision with a value and an advantage, or
    each turn: a maximal run of trained tokens in a sequence. At turn level, the value is read
    where the turn begins, and all of its tokens have one advantage."""
