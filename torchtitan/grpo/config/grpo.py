# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[grpo]`` table: the algorithm."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class GRPO:
    """``[grpo]``: the algorithm. Formulas, papers and choices are in docs/losses.md.

    A step is one batch: ``num_minibatches * num_epochs`` optimizer steps, then one step of the
    learning-rate schedulers, one push of weights and one new policy version. ``training.steps``
    and all intervals count these.
    """

    group_size: int = 8
    """Rollouts per prompt, at least 1. Advantages relative to the group need 2;
    ``advantage = "batch_norm"`` does not."""

    prompts_per_step: int = 16
    """Prompt groups in one step, at least 1. The global batch is
    ``prompts_per_step * group_size`` rollouts."""

    num_minibatches: int = 1
    """Optimizer steps into which a batch is cut, by whole prompt groups; at most
    ``prompts_per_step``. ``training.steps``, schedulers (``lr_scheduler.warmup_steps``) and
    policy versions count batches, not these."""

    num_epochs: int = 1
    """Times that a batch is gone through. With more than one optimizer step a batch
    (``num_minibatches * num_epochs``) and ``old_policy = "step_start"``, the proximal
    logprobs are computed anew before the first of them."""

    advantage: Literal["group_norm", "group_mean", "leave_one_out", "batch_norm"] = "group_norm"
    """What a reward is compared to. ``group_norm``: GRPO, the group's mean and standard
    deviation. ``group_mean``: Dr.GRPO, the mean alone. ``leave_one_out``: RLOO, the mean
    of the group's other samples. ``batch_norm``: REINFORCE++-baseline, the group's mean,
    then the standard deviation of the whole batch."""

    advantage_std: Literal["sample", "population"] = "sample"
    """Divisor of the standard deviation: N - 1, or N."""

    advantage_eps: float = 1e-4
    """Added to the standard deviation before dividing by it, above 0."""

    advantage_length_power: float = 0.0
    """Advantages are multiplied by ``(mean completion length / completion length) **
    power``; 0 is off, 1 lets every completion weigh the same under a token mean."""

    filter_zero_advantage: bool = False
    """Leave out groups whose rewards are all equal (DAPO's dynamic sampling): they carry
    no gradient, and would only dilute the mean. Not with a KL penalty in the reward
    (``kl_in``), which tells the samples of such a group apart."""

    reward_positive_scale: float = 1.0
    """Factor of rewards above 0, at least 0."""

    reward_negative_scale: float = 1.0
    """Factor of rewards below 0, at least 0."""

    overlong_buffer: int = 0
    """DAPO's soft overlong penalty: it grows from 0 to ``overlong_penalty`` over the last
    this many tokens before ``rollout.max_new_tokens``; 0 is off."""

    overlong_penalty: float = 1.0
    """Taken from the reward of a completion of full length, at least 0."""

    policy_loss: str = "clip"
    """``clip``: the clipped surrogate; ``gspo``: the same with one ratio a sequence;
    ``cispo``: the clipped ratio as a constant weight; ``reinforce``: no ratio. Or a
    function of yours, ``package.module:function`` or ``path/to/file.py:function``."""

    clip_low: float = 0.2
    """The ratio's floor is ``1 - clip_low``, in [0, 1)."""

    clip_high: float = 0.2
    """The ratio's ceiling is ``1 + clip_high``, above 0. DAPO uses 0.28, GSPO 4e-4."""

    dual_clip: float = 0.0
    """Where the advantage is negative, the objective is at least this many times it
    (dual-clip PPO); above 1, or 0 for off. With ``clip`` and ``gspo``."""

    cispo_two_sided: bool = False
    """CISPO's weight is also held above ``1 - clip_low``. The paper bounds it from above
    alone."""

    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """From tokens to one number. ``token_mean``: over the trained tokens of the global
    batch. ``sequence_mean``: over sequences, of each one's token mean.
    ``constant_length``: Dr.GRPO, token sums over ``aggregation_length``, then a mean
    over sequences."""

    aggregation_length: int = 0
    """Divisor of ``constant_length``; 0 is ``rollout.max_new_tokens``."""

    old_policy: Literal["step_start", "sampling"] = "step_start"
    """What the ratio is taken against. ``step_start``: the policy before the batch's
    first optimizer step (decoupled PPO); the gap to the sampling-time policy is then
    left to ``mismatch_correction``. ``sampling``: the recorded sampling-time logprobs
    themselves, with no further weight."""

    mismatch_correction: Literal["none", "truncate", "mask"] = "truncate"
    """Weight between the step's first policy and the sampling-time policy. ``truncate``
    (TIS): the ratio, held inside its bounds. ``mask`` (MIS): the ratio, and 0 outside of
    them. Used with ``old_policy = "step_start"``."""

    mismatch_level: Literal["token", "sequence", "geometric"] = "token"
    """What that ratio is of: each token; the product over the sequence's trained tokens;
    their geometric mean."""

    importance_cap: float = 2.0
    """Upper bound of that ratio, above 0."""

    importance_floor: float = 0.0
    """Lower bound of that ratio, at least 0 and below ``importance_cap``; 0 is none."""

    mismatch_veto: float = 0.0
    """A sequence is left out when any of its trained tokens has a ratio below this; 0 is
    off. 1e-4 catches tokens that the trainer could hardly have sampled."""

    kl_coef: float = 0.0
    """Weight of the KL penalty against the reference model, at least 0; 0 builds no
    reference."""

    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimate of the KL from sampled tokens."""

    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty goes: a term of the loss, or taken from each sequence's reward
    before advantages are computed."""

    ref_model_path: str | None = None
    """Hugging Face directory of the reference model; None is ``model.hf_assets_path``.
    Used where ``kl_coef`` is above 0."""

    ref_model_ema: float = 0.0
    """After each step the reference becomes ``ema * reference + (1 - ema) * policy``, in
    [0, 1); 0 keeps it as it is."""

    ref_model_offload: bool = False
    """Keep the reference's shards in host memory between uses. Nothing changes on CPU."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus, at least 0."""

    log_entropy: bool = True
    """Compute the policy's mean entropy for the metrics also where ``entropy_coef`` is
    0. It costs one more pass over the logits of each chunk."""

    ptx_path: str | None = None
    """Supervised mix-in: a ``.jsonl`` file with a ``completion`` in each row and, where
    there is one, a ``prompt``, both strings. None mixes nothing in. It needs
    ``rollout.temperature = 1``: the trainer scores every token at that temperature."""

    ptx_coef: float = 1.0
    """Weight of the mean negative log-likelihood of the mixed-in completion tokens."""

    ptx_per_step: int = 8
    """Mixed-in rows a step, at least ``num_minibatches``."""

    logprob_chunk_tokens: int = 256
    """Tokens whose logits exist at a time; [tokens, vocabulary] is never whole in memory.
    At least 1."""

    logprob_keep_logits: bool = True
    """Take the memory of the output weight's gradient in the forward pass already, and keep
    in it as many logits as fit, which the backward pass then does not compute again. The peak
    of a microbatch stays as it is, but the memory is held once for each microbatch that is
    between its forward and its backward pass. Where the last pipeline stage has several
    of them (``parallelism.pipeline_parallel_schedule`` is GPipe or InterleavedZeroBubble)
    nothing is kept, whatever this says."""

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
