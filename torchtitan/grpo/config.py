# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The TOML tables that the overlay adds to torchtitan's, one dataclass each.

Plain data without torch, so that the rollout process can import it. Reading and checking
a file is `config_manager.py`'s work.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.grpo.types import PromptProgress


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


@dataclass
class Prompts:
    """``[prompts]``: what is asked."""

    path: str = ""
    """A ``.jsonl`` or ``.parquet`` file, or the name or directory of a Hugging Face data
    set. Required, unless ``paths``."""

    paths: list[str] = field(default_factory=list)
    """Several sets in place of ``path``, mixed by ``weights``. ``name``, ``split``,
    ``column``, ``rename`` and ``template`` are those of all of them. Each prompt is given the
    column ``prompt_set``, unless it has one: the set's file name without its ending, or
    its last name at the hub; the whole path where two sets would be named alike."""

    weights: list[float] = field(default_factory=list)
    """How often each of ``paths`` is drawn from, one positive number each, of any sum; empty
    is by their sizes. Draws alternate in a fixed order, so that every batch has nearly these
    proportions. A set that is at its end begins anew while others go on."""

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

    single_rank_load: bool = True
    """Rank 0 loads the rollouts of a step and scatters each rank its rows. False: rank 0 is
    told of their lengths and rewards alone, and every rank fetches its own share from the
    rollout process, which spares rank 0 where batches are large or ranks are many."""

    balance_batch: bool = True
    """Spread a batch over data-parallel ranks by cost (Karmarkar-Karp) before it is packed
    into rows. False packs first and deals rows in snake order."""

    balance_cost: Literal["tokens", "flops"] = "flops"
    """What is balanced: tokens, or the floating-point operations of the loaded model, in
    which attention grows with the square of a sequence's length."""

    row_bucket: int = 1
    """Each rank's rows are filled up to a multiple of this many microbatches, so that
    pipelines see few shapes; what that costs is in ``data/padding_fraction``."""


@dataclass
class Rollout:
    """``[rollout]``: sampling, and how far generation may run ahead."""

    max_head_offpolicyness: int = 1
    """Largest age that a trained sample may have, in policy versions, which count batches
    (not the optimizer steps that each is trained by); holds for every sample. 0 is
    synchronous training, on-policy with one optimizer step a batch."""

    max_concurrent_rollouts: int = 256
    """Completions in flight over all servers, at least ``grpo.group_size``."""

    max_new_tokens: int = 256
    """Longest completion, in tokens."""

    temperature: float = 1.0
    """Sampling temperature, above 0. The trainer scores with the same temperature, and a
    replay must have that of its record."""

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

    segment_tokens: int = 0
    """Longest part of a completion that a server is asked for at once; whoever has room
    writes the next one. What a lost server or a stopped run costs is then one part, and long
    answers move to servers that are free. Each part sends what is there of the completion
    again, which a server with a prefix cache does not compute again. 0 asks for whole
    completions."""

    environment: str | None = None
    """Multi-turn rollouts: what answers the model between its turns. A class or function of yours
    that makes one, ``package.module:Class`` or ``path/to/file.py:Class``, or a built-in name:
    ``calculator``, ``verifiers``. ``max_new_tokens`` counts what it puts in as well. None is one
    turn a completion."""

    environment_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments with which ``environment`` is called for each completion."""

    max_turns: int = 16
    """Longest episode with ``environment``, in turns of the model, at least 1."""

    environment_timeout_seconds: float = 30.0
    """Longest time of one call of ``environment``; its completion has then failed. Importing it
    may take ten times as long."""

    environment_workers: int = 1
    """Processes in which environments run, many in each."""

    buffer_size_limit: int = 0
    """No further group is started while this many finished rollouts wait to be trained on;
    0 is twice ``grpo.prompts_per_step`` times ``grpo.group_size``. At least once that."""

    stream: bool = False
    """Hand a batch to the trainer in parts, each as soon as its groups are finished: forward and
    backward passes over the first begin while the last are still being written. The optimizer
    step is that of the whole batch, up to rounding. It is one step a batch, with advantages
    that are within groups."""

    stream_parts: int = 4
    """In how many parts with ``stream``, from 2 to ``grpo.prompts_per_step``. Each is packed into
    rows of its own; many small ones are padded more."""

    overdue: Literal["wait", "drop", "cut", "resume"] = "wait"
    """What becomes of groups that must be in the next batch to be young enough, and are the
    last that it lacks, as soon as enough others are there. ``wait``: it waits for them all the
    same. ``drop``: they are given up; that favours short answers. ``cut``: their completions end
    with the segments that are written, and count as cut (``drop_truncated``), at the length
    that they have (``grpo.overlong_buffer``). ``resume``: they make room
    for others and go on under newer weights; what was written of a completion becomes context
    that is not trained, and completions of the group that were whole are written anew. The last
    two need ``segment_tokens`` and no ``environment``; all but the first are counted."""

    min_completion_tokens: int = 0
    """Completions with fewer tokens are left out of their group."""

    drop_truncated: bool = False
    """Leave completions out of their group that were cut at ``max_new_tokens``. A group that
    keeps fewer than two is closed, and another takes its place."""

    dynamic_sampling: bool = False
    """Leave out groups whose rewards are all equal, and refill the batch with others (DAPO).
    ``grpo.filter_zero_advantage`` leaves them out without a refill."""

    dynamic_sampling_limit: float = 4.0
    """At most this many times ``grpo.prompts_per_step`` groups are left out for one batch;
    beyond that they are taken as they are."""

    should_accept: str | None = None
    """A function of yours, named as in ``reward.functions``, that is called after scoring as
    ``should_accept(prompts, completions, rewards, **columns)`` and returns for each
    completion whether to keep it."""

    max_process_restarts: int = 3
    """How often the rollout process is started again when it was killed; 0 is never."""

    longest_first: bool = False
    """Start the prompts that probably have the longest answers first, among those of a
    batch, and spread them over the servers. Lengths are predicted by a small model that
    learns while the run goes on; which prompts are trained in which epoch does not change."""

    adaptive_concurrency: bool = True
    """Let the completions in flight on a server follow its own pressure: one more with each
    round without a queue on the server, half as many when it queues or fails. The sum
    never exceeds ``max_concurrent_rollouts``."""

    hedge_seconds: float = 0.0
    """A completion that a server has not answered for this long, while servers are idle, is
    asked of another one as well, and the first answer counts. 0 is never."""

    batch_timeout_seconds: float = 1800.0
    """Longest time that the trainer waits for a batch, or for a part of it with ``stream``,
    before it gives up."""

    max_consecutive_failures: int = 32
    """The run stops after this many completions in a row failed on the servers, or in their
    environments."""

    record: str | None = None
    """Write every trained batch of rollouts to this file, for ``replay``; ``.gz``
    compresses. A new run refuses a file that holds batches; a resumed run goes on in it,
    and cannot begin one."""

    replay: str | None = None
    """Train on the batches of this file, in its order, instead of on new rollouts: no
    server and no rollout process is started, no reward is computed, nothing is evaluated.
    A run ends after ``training.steps`` or with the file. Not together with ``record``."""


@dataclass
class Inference:
    """``[inference]``: the servers that write rollouts."""

    kind: Literal["embedded", "sglang", "vllm"] = "embedded"
    """``embedded`` is this project's own small server; it needs nothing else installed."""

    urls: list[str] = field(default_factory=list)
    """Base URLs of running servers, ``http://host:port``. Required unless ``launch`` or
    ``urls_file``."""

    urls_file: str | None = None
    """File with one base URL a line, in place of ``urls``; lines that begin with # are
    passed over. Read again when it changes, and when rank 0 is sent SIGHUP: servers that
    are new in it join the run, servers that are no longer in it leave it. A file that names
    no servers, or is no list of URLs, changes nothing. SIGHUP goes to the process that the
    log names at the start, not to torchrun, which would end the run. A run whose servers are
    all on this machine at the start uses its loopback alone for gloo; set
    ``GLOO_SOCKET_IFNAME`` where others are to join it."""

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

    max_restarts: int = 3
    """How often each launched server that ends is started again; 0 is never."""

    restart_seconds: float = 5.0
    """Pause before a launched server is started again; it doubles with each restart."""

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

    bucket_bytes: int = 256 * 1024 * 1024
    """Tensors travel in buckets of about this size; one tensor is never split. Receivers have
    room for a bucket or two, and on CUDA the training ranks, too, while they gather."""

    num_slots: int = 2
    """Snapshots of the local shards that may be alive at once, at least 2: one is sent
    while the next is filled. On CPU versions are sent from their slots, so there are as many
    more as ``weight_sync.max_versions`` allows, all of them in memory from the start."""

    master_address: str = "auto"
    """Address under which servers reach rank 0. ``auto``: this host's address on the
    route to each server, which is 127.0.0.1 for a server on this machine."""

    timeout_seconds: float = 120.0
    """Bound of joining a server's groups, of each bucket, and of what either side takes to
    rate the tokens of an attestation."""

    push_timeout_seconds: float = 600.0
    """Bound of one push to one server. A server that takes longer is given up, and joined
    anew."""

    retry_seconds: float = 1.0
    """Pause before a lost server is joined anew; it doubles with each failure in a row."""

    max_retry_seconds: float = 30.0
    """The pause grows no further than this."""

    transport: Literal["group", "disk"] = "group"
    """``group``: process groups between trainer and servers. ``disk``: safetensors files
    in ``weight_sync.disk_path``, for servers that share a filesystem with the trainer."""

    disk_path: str | None = None
    """Directory for ``transport = "disk"``, under one name on all hosts. Holds the newest
    versions only; empty it holds nothing else."""

    staging: Literal["auto", "device", "host"] = "auto"
    """Where snapshots lie: in the training device's memory or in pinned host memory.
    ``auto``: on the device."""

    max_versions: int = 0
    """Versions of the whole model, in wire dtype, that may be alive at once on the ranks
    that send: the newest, one being gathered, and those that slow servers still receive.
    0: as many as keep every server independent of the others, which is two more than
    servers. At least 2; with less than two more than servers, several slow servers
    together can hold up the others."""

    checksum: bool = False
    """Compare a checksum of each tensor where the server can (embedded, vLLM)."""

    attest_every: int = 200
    """Versions divisible by this are attested: the log-probabilities that a server gives
    fixed tokens must equal the trainer's. 0: only the server's version is compared."""

    attest_tolerance: float = 0.0
    """Largest mean difference of those log-probabilities. 0: 1e-3 where weights travel as
    float32, 0.05 where as bfloat16."""

    delta: bool = False
    """Send only the elements that changed since the version that a server has confirmed,
    where the server can apply them (embedded, vLLM). Lossless. Pays where the network is
    slower than memory."""


@dataclass
class Reward:
    """``[reward]``: scoring."""

    functions: list[str] = field(default_factory=list)
    """Reward functions as dotted paths, ``package.module:function`` or
    ``path/to/file.py:function``; a bare name is a built-in one: ``exact_match``,
    ``partial_match``, ``boxed_math``, ``think_answer_tags``, ``environment`` (what
    ``rollout.environment`` gave). At least one."""

    weights: list[float] = field(default_factory=list)
    """One weight a function; empty is 1.0 each."""

    num_workers: int = 1
    """Processes that score, at least 1."""

    timeout_seconds: float = 30.0
    """A worker that takes longer for one group is killed; the group is then unscored. To
    import the functions it may take ten times as long."""

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
    """Batches already trained on (a resumed run)."""
    progress: PromptProgress
    """Prompts already used up, and those to begin with (a resumed run)."""
    saved_rollouts: str | None = None
    """File with the rollouts that were finished when the checkpoint was written."""
    incarnation: int = 0
    """How many rollout processes the run has had before this one."""
    fetch_host: str = ""
    """Address under which ranks reach it, with ``prompts.single_rank_load = false``."""
    fetch_secret: str = ""

    def to_dict(self) -> dict[str, Any]:
        from dataclasses import asdict

        return asdict(self)
