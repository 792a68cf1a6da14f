# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[rollout]`` table: sampling, and how far generation may run ahead of training."""

from dataclasses import dataclass, field
from typing import Any, Literal


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
