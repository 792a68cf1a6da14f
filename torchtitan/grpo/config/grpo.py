# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[grpo]`` table: the algorithm."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class GRPO:
    """``[grpo]``: the algorithm. docs/losses.md has the formulas, the papers and advice.

    A step trains on one batch. It takes ``num_minibatches * num_epochs`` optimizer steps, then
    one step of the learning-rate schedulers, and pushes the weights to the servers as one new
    policy version. ``training.steps`` and all intervals count these steps, not optimizer steps.
    """

    group_size: Annotated[int, at_least(1)] = 8
    """Number of rollouts for each prompt. Advantages that compare the rollouts of a group need at
    least 2; ``advantage = "batch_norm"`` works with 1."""

    prompts_per_step: Annotated[int, at_least(1)] = 16
    """Number of prompt groups in one step. The global batch holds ``prompts_per_step *
    group_size`` rollouts."""

    num_minibatches: Annotated[int, at_least(1)] = 1
    """Number of minibatches into which a batch is cut, with one optimizer step each. Prompt groups
    stay whole, so it cannot exceed ``prompts_per_step``. ``training.steps``, the learning-rate
    schedulers (``lr_scheduler.warmup_steps``) and policy versions count batches, not
    minibatches."""

    num_epochs: Annotated[int, at_least(1)] = 1
    """Number of times that each batch is trained on. If a batch takes more than one optimizer step
    (``num_minibatches * num_epochs``) and ``old_policy = "step_start"``, the trainer computes the
    log-probabilities of the old policy in a forward pass before the first of them."""

    advantage: Literal[
        "group_norm", "group_mean", "leave_one_out", "leave_one_out_norm", "batch_norm", "max_rl"
    ] = "group_norm"
    """How rewards become advantages. ``group_norm`` (GRPO) subtracts the mean of the group and
    divides by its standard deviation. ``group_mean`` (Dr.GRPO) subtracts the mean only.
    ``leave_one_out`` (RLOO) subtracts the mean of the group's other rollouts, and
    ``leave_one_out_norm`` also divides by the standard deviation of the group. ``batch_norm``
    (REINFORCE++-baseline) subtracts the mean of the group and divides by the standard deviation
    of the whole batch. ``max_rl`` (MaxRL) subtracts the mean of the group and divides by it, for
    rewards that are at least 0."""

    advantage_std: Literal["sample", "population"] = "sample"
    """Whether the variance of N rewards is divided by N - 1 (``sample``) or by N
    (``population``)."""

    advantage_eps: Annotated[float, above(0)] = 1e-4
    """Number added to the standard deviation, or to the mean of ``max_rl``, before rewards are
    divided by it."""

    advantage_length_power: Annotated[float, at_least(0)] = 0.0
    """Advantages are multiplied by ``(mean completion length / completion length) ** power``. With
    0 they stay as they are. With 1 all completions have the same weight under
    ``aggregation = "token_mean"``, however long they are."""

    filter_zero_advantage: bool = False
    """Leave out groups in which all rewards are equal: they have no gradient and only dilute the
    mean over tokens. The batch then has fewer groups; ``rollout.dynamic_sampling`` replaces them
    instead. Cannot be combined with a KL penalty in the reward (``kl_in``), which makes the
    rewards of such a group differ."""

    reward_positive_scale: Annotated[float, at_least(0)] = 1.0
    """Factor by which rewards above 0 are multiplied."""

    reward_negative_scale: Annotated[float, at_least(0)] = 1.0
    """Factor by which rewards below 0 are multiplied."""

    overlong_buffer: Annotated[int, at_least(1).or_value(0, "no penalty")] = 0
    """Length, in tokens, of DAPO's soft overlong penalty. Over the last ``overlong_buffer`` tokens
    before ``rollout.max_new_tokens``, the penalty grows linearly from 0 to
    ``overlong_penalty``."""

    overlong_penalty: Annotated[float, at_least(0)] = 1.0
    """Penalty that is subtracted from the reward of a completion of ``rollout.max_new_tokens``
    tokens. Used with ``overlong_buffer``."""

    policy_loss: str = "clip"
    """Loss of each token. ``clip`` is the clipped surrogate with one ratio per token. ``gspo`` is
    the clipped surrogate with one ratio per sequence. ``cispo`` weights the log-probability by the
    clipped ratio, held constant. ``reinforce`` uses no ratio. ``sapo`` replaces the clip by a smooth
    gate. ``gmpo`` takes the geometric mean of clipped ratios over the sequence. A function of your own is named
    ``package.module:function`` or ``path/to/file.py:function``."""

    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that your own ``policy_loss`` function is called with. An option that the
    function does not have is refused. The built-in losses have no options: they read the keys
    below."""

    clip_low: Annotated[float, at_least(0).below(1)] = 0.2
    """Ratios below ``1 - clip_low`` are clipped."""

    clip_high: Annotated[float, above(0)] = 0.2
    """Ratios above ``1 + clip_high`` are clipped. DAPO uses 0.28, GSPO 4e-4. ``policy_loss = "gmpo"``
    clips the logarithm of the ratio, at ``clip_high`` where the advantage is positive and at
    ``-clip_low`` where it is negative; its paper uses 0.4 for both."""

    sapo_temperature: Annotated[float, above(0)] = 1.0
    """Temperature of the gate of ``policy_loss = "sapo"`` where the advantage is positive. The higher
    it is, the sooner tokens lose their gradient as the ratio leaves 1."""

    sapo_temperature_negative: Annotated[float, above(0)] = 1.05
    """The same where the advantage is not positive. The paper takes a higher one, because negative
    advantages make training less stable."""

    dual_clip: Annotated[float, above(1).or_value(0, "off")] = 0.0
    """Dual-clip PPO: for a token with a negative advantage A, the loss is at most
    ``-dual_clip * A``, however large the ratio is. Used with ``policy_loss`` ``clip`` and
    ``gspo``."""

    cispo_two_sided: bool = False
    """Also clip the weight of ``policy_loss = "cispo"`` from below, at ``1 - clip_low``. The paper
    clips it from above only."""

    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """How the losses of tokens become one number. ``token_mean`` is the mean over all trained
    tokens of the global batch. ``sequence_mean`` is the mean over sequences of each sequence's
    mean over tokens. ``constant_length`` (Dr.GRPO) divides each sequence's sum over tokens by
    ``aggregation_length`` and takes the mean over sequences."""

    aggregation_length: Annotated[int, at_least(1).or_value(0, "rollout.max_new_tokens")] = 0
    """Divisor, in tokens, of ``aggregation = "constant_length"``."""

    old_policy: Literal["step_start", "sampling"] = "step_start"
    """The policy against which the ratio is taken. ``step_start`` (decoupled PPO) is the policy
    before the first optimizer step of the batch; ``mismatch_correction`` then accounts for the
    difference between it and the policy that sampled the tokens. ``sampling`` takes the
    log-probabilities that the servers recorded, and applies no further correction."""

    mismatch_correction: Literal["none", "truncate", "mask"] = "truncate"
    """Importance weight between the policy before the batch's first optimizer step and the policy
    that sampled the tokens. ``truncate`` (TIS) clamps the importance ratio to
    [``importance_floor``, ``importance_cap``]. ``mask`` (MIS) takes the ratio inside these bounds
    and 0 outside of them. ``none`` applies no weight. Used with
    ``old_policy = "step_start"``."""

    mismatch_level: Literal["token", "sequence", "geometric"] = "token"
    """What the importance ratio is computed from: each token alone (``token``), the product over
    the trained tokens of the sequence (``sequence``), or their geometric mean
    (``geometric``)."""

    importance_cap: Annotated[float, above(0)] = 2.0
    """Upper bound of the importance ratio of ``mismatch_correction``."""

    importance_floor: Annotated[float, at_least(0)] = 0.0
    """Lower bound of the importance ratio of ``mismatch_correction``, below ``importance_cap``. 0
    bounds nothing."""

    mismatch_veto: Annotated[float, above(0).below(1).or_value(0, "off")] = 0.0
    """Leave out each sequence that has a trained token whose importance ratio is below this. 1e-4
    finds tokens that the trainer's policy would hardly ever sample."""

    mismatch_max_k1: Annotated[float, above(0).or_value(0, "off")] = 0.0
    """Leave out each sequence whose log importance ratio, averaged over its trained tokens, is
    farther from 0 than this, in nats for each token. Like the other ``mismatch_max_...``, it can be
    combined with every ``mismatch_correction``; the bounds compare with the current policy where
    ``old_policy = "sampling"``."""

    mismatch_max_k3: Annotated[float, above(0).or_value(0, "off")] = 0.0
    """Leave out each sequence whose ``k3`` estimate of the KL divergence between sampling and
    training, averaged over its trained tokens, is above this, in nats for each token. Unlike
    that of ``mismatch_max_k1``, differences of opposite sign do not cancel."""

    mismatch_max_tv: Annotated[float, above(0).or_value(0, "off")] = 0.0
    """Leave out each sequence whose estimate of the total variation distance between sampling and
    training, half the mean of |importance ratio - 1| over its trained tokens, is above this."""

    mismatch_max_ratio: Annotated[float, above(1).or_value(0, "off")] = 0.0
    """Leave out each sequence that has a trained token whose importance ratio is above this, or
    below 1 divided by this."""

    mismatch_normalize: bool = False
    """Divide the weights of ``mismatch_correction`` by their mean over the trained tokens that are
    kept, of all ranks, so that they change the size of an optimizer step no more. The trainer then
    computes the log-probabilities of the old policy in a forward pass of its own. Cannot be combined
    with ``rollout.stream``."""

    off_policy_mask_threshold: Annotated[float, above(0).or_value(0, "off")] = 0.0
    """Leave out each sequence with a negative advantage that the current policy hardly writes any
    more: the mean over its trained tokens of the log-probability at sampling time minus that under
    the current policy is above this, in nats for each token (DeepSeek-V3.2). TRL recommends to
    begin with 0.5."""

    kl_coef: Annotated[float, at_least(0)] = 0.0
    """Weight of the KL penalty against the reference model. With 0 no reference model is
    built."""

    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1_straight", "k3_straight"] = "k3"
    """Estimator of the KL divergence from sampled tokens. With d = log-probability under the
    policy minus that under the reference: ``k1`` is d, ``k2`` is d² / 2, ``k3`` is
    exp(-d) - 1 + d, and ``abs`` is |d|. ``k1_straight`` and ``k3_straight`` have the value of ``k1``
    and ``k3`` and, as a loss, the gradient of ``k2``, which is that of the KL divergence."""

    kl_importance: bool = False
    """Multiply the KL estimate of each token in the loss by the ratio of the policy to the old policy
    (``old_policy``). Its expected gradient is then that of the KL divergence, for tokens that an
    older policy drew, too; not with ``kl_estimator = "abs"``, which is no KL. The ratio has a
    gradient with ``k1`` and ``k3``, and none with those that have the right gradient
    themselves. Used with ``kl_in = "loss"``."""

    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty is applied: as a term of the loss, or subtracted from the reward of each
    sequence before advantages are computed."""

    ref_model_path: str | None = None
    """Hugging Face directory, or name on the Hub, of the reference model. None takes ``model.hf_assets_path``. Used
    with ``kl_coef`` above 0."""

    ref_model_ema: Annotated[float, at_least(0).below(1)] = 0.0
    """After each step the reference model becomes ``ema * reference + (1 - ema) * policy``. With 0
    it is never updated."""

    ref_model_offload: bool = False
    """Keep the shards of the reference model in host memory while they are not used. Has no effect
    on CPU."""

    entropy_coef: Annotated[float, at_least(0)] = 0.0
    """Weight of the entropy bonus in the loss."""

    log_entropy: bool = True
    """Compute the mean entropy of the policy for the metrics even if ``entropy_coef`` is 0. It
    costs one more pass over the logits."""

    ptx_path: str | None = None
    """A ``.jsonl`` file with supervised examples that are mixed into each batch. Each row holds a
    string ``completion`` and may hold a string ``prompt``. None mixes nothing in. Needs
    ``rollout.temperature = 1``, because the trainer scores all tokens at that temperature."""

    ptx_coef: Annotated[float, at_least(0)] = 1.0
    """Weight of the supervised loss, the mean negative log-likelihood of the completion tokens of
    ``ptx_path``."""

    ptx_per_step: Annotated[int, at_least(1)] = 8
    """Number of supervised examples in each step, at least one for each of
    ``num_minibatches``."""

    logprob_chunk_tokens: Annotated[int, at_least(1)] = 256
    """Number of tokens whose logits are computed at once, so that logits of shape
    [tokens, vocabulary] are never in memory as a whole."""

    logprob_keep_logits: bool = True
    """Allocate the gradient of the output layer's weight already in the forward pass, and keep in
    its memory as many logits as fit, so that the backward pass does not compute them again. The
    peak memory of a microbatch stays the same, but each microbatch holds this memory between its
    forward and its backward pass. Therefore nothing is kept, whatever this says, under a pipeline
    schedule whose last stage holds several microbatches at once (GPipe)."""

    pipeline_memory: Annotated[float, above(0)] = 1.5
    """Bound of the activations that ``parallelism.pipeline_parallel_schedule = "auto"`` may hold, as
    a share of those that 1F1B holds. Interleaved1F1B needs up to 1.5, V-ZB 1 and, of p ranks,
    V-Half ``(p + 2) / 2p`` and V-Min ``(p + 4) / 3p``. If no schedule keeps to the bound, the one
    that holds least is taken."""

    pipeline_microbatches: Annotated[
        int, at_least(1).or_value(0, "four for each pipeline rank")
    ] = 0
    """Number of microbatches of an optimizer step, on each pipeline, for which
    ``parallelism.pipeline_parallel_schedule = "auto"`` chooses. A step's real number depends on how
    long the completions are."""

    recompute_early_blocks: Annotated[int, at_least(0).or_value(-1, "all")] = 1
    """Number of checkpointed blocks of a pipeline stage, from its last one on, that are recomputed
    while the stage waits for the gradient of its output. One costs no memory; with more, their
    activations exist at the same time. Gradients do not depend on it. It has no effect without
    activation checkpoints, with compiled blocks, or with
    ``parallelism.fsdp_reshard_after_forward = "always"``."""

    pipeline_offload: Annotated[float, at_least(0).at_most(1).or_value(-1, "auto")] = 0.0
    """Share of a pipeline rank's forward passes whose activations lie in host memory until their
    backward pass: those that are kept longest. -1 takes as many as copies can move while the rank
    computes, by times and a bandwidth that are measured in an early step. It cannot be combined with
    ``compile.enable``."""

    pipeline_fill_gaps: bool = True
    """Whether a pipeline computes logprobs under the reference and under the proximal policy in the
    idle time of its training passes, as far as they fit in without a delay. There must be several
    minibatches (``num_minibatches``): while one is trained, those after it are computed. Numbers do
    not depend on it. Parameters of both models are then gathered at the same time, where FSDP
    shards them. It has no effect with ``ref_model_offload`` on the reference, nor on a reference
    whose KL is part of the reward."""

    max_pending_weight_grads_gib: Annotated[float, at_least(0).or_value(-1, "no bound")] = -1
    """Memory, in GiB on each rank, that a zero-bubble schedule may use to keep the inputs and output
    gradients of linear layers whose weight gradients it computes later. Beyond it the oldest weight
    gradients are computed at once: gradients stay the same, but less idle time is filled. Other
    schedules keep nothing."""

    async_weight_update: bool = True
    """Push weights to the servers on a background thread while the next step runs. False makes the
    trainer wait for each push between two steps."""

    packed_attention: Literal["auto", "sdpa", "flex"] = "auto"
    """How attention is confined to each sequence of a packed row. ``sdpa`` uses a dense mask, whose
    memory grows with the square of ``training.seq_len``. ``flex`` uses compiled FlexAttention and
    needs CUDA. ``auto`` takes ``flex`` on CUDA if rows have at least 2,048 tokens, and ``sdpa``
    otherwise."""

    hf_export_interval: Annotated[int, at_least(1).or_value(0, "only at the end")] = 0
    """Number of steps between two exports of the model as a Hugging Face directory,
    ``<dump_folder>/hf/step-N``. The last step is always exported."""

    stop_timeout_seconds: Annotated[float, above(0)] = 8.0
    """Maximum time between Ctrl-C or SIGTERM and the end of the run. In this time the run finishes
    the current step and, with ``checkpoint.enable``, writes a checkpoint. A process that has not
    ended by then is ended at once, and earlier checkpoints stay. Raise it if writing a checkpoint
    takes longer."""

    lost_rank_seconds: Annotated[float, above(0)] = 60.0
    """Maximum time, in seconds, for which a training rank may give no sign of life. After it the rank
    counts as lost, and all ranks end; torchrun starts them again if it may (``--max-restarts``). A
    rank whose process ends is found at once. Threads of a rank send the signs, so a slow step, a
    compilation, or a slow disk does not count."""
