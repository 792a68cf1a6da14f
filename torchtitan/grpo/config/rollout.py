# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[rollout]`` table: sampling, and how far generation may run ahead of training."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class Rollout:
    """``[rollout]``: sampling, and how far generation may run ahead of training."""

    max_head_offpolicyness: Annotated[int, at_least(0)] = 1
    """Maximum age of every trained sample, in policy versions. The age is the number of batches
    trained on since the oldest token of the sample was written, however many optimizer steps each
    batch took. 0 is synchronous training, which is on-policy if a batch takes one optimizer
    step."""

    max_concurrent_rollouts: Annotated[int, at_least(1)] = 256
    """Maximum number of completions in flight on all servers together, at least
    ``grpo.group_size``."""

    max_new_tokens: Annotated[int, at_least(1)] = 256
    """Maximum length of a completion, in tokens. Together with a prompt it must fit into
    ``training.seq_len``."""

    temperature: Annotated[float, above(0)] = 1.0
    """Sampling temperature. The trainer computes log-probabilities at the same temperature, and
    ``replay`` needs the temperature of its record."""

    top_p: Annotated[float, above(0).at_most(1)] = 1.0
    """Nucleus sampling: tokens are drawn from the most likely ones whose probabilities sum up to
    this. 1 draws from all tokens. The trainer computes log-probabilities of the whole
    distribution, so any value below 1 biases the importance ratio: vLLM reports log-probabilities
    renormalised over the kept tokens, SGLang and the embedded server report those of the whole
    distribution."""

    top_k: Annotated[int, at_least(1).or_value(-1, "all tokens")] = -1
    """Number of most likely tokens to draw from. A limit biases the importance ratio in the same way
    as ``top_p``."""

    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion, besides the end-of-sequence tokens of the model."""

    ignore_eos: bool = False
    """Generate ``max_new_tokens`` tokens even if the model ends earlier. Meant for benchmarks, and
    for verification runs that need requests in flight during each push."""

    request_timeout_seconds: Annotated[float, above(0)] = 600.0
    """Maximum duration of one completion. After it the request is aborted, and the completion
    counts as failed."""

    segment_tokens: Annotated[int, at_least(1).or_value(0, "whole completions")] = 0
    """Maximum number of tokens that one request to a server generates. A completion is then made of
    several segments, each on the server that has room. A lost server or a stopped run costs one
    segment instead of a completion, and long completions move to idle servers. Each request sends
    the prompt and all earlier segments, which a server with a prefix cache does not compute
    again."""

    environment: str | None = None
    """Multi-turn rollouts: what answers the model between its turns. A built-in name
    (``calculator``, ``verifiers``), or a class or function of your own that makes an environment,
    named ``package.module:Class`` or ``path/to/file.py:Class``. The tokens that it inserts count
    towards ``max_new_tokens``. With None each completion is a single turn."""

    environment_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments with which ``environment`` is called for each completion."""

    max_turns: Annotated[int, at_least(1)] = 16
    """Maximum number of model turns in one episode. Used with ``environment``."""

    environment_timeout_seconds: Annotated[float, above(0)] = 30.0
    """Maximum duration of one call of ``environment``. After it the completion counts as failed.
    Importing the environment may take ten times as long."""

    environment_workers: Annotated[int, at_least(1)] = 1
    """Number of processes that run environments. Each runs many at once."""

    buffer_size_limit: Annotated[int, at_least(1).or_value(0, "twice a batch")] = 0
    """Number of finished rollouts waiting for the trainer at which no further group is started. It
    must hold at least one batch, ``grpo.prompts_per_step * grpo.group_size``."""

    stream: bool = False
    """Hand a batch to the trainer in parts, each as soon as its groups are finished, so that forward
    and backward passes over the first part begin while the last groups are still being generated.
    The optimizer step equals that of the whole batch up to rounding. Needs one optimizer step for
    each batch and advantages that are computed within groups."""

    stream_parts: Annotated[int, at_least(2)] = 4
    """Number of parts of a batch with ``stream``, at most ``grpo.prompts_per_step``. Each part is
    packed into rows of its own, so many small parts are padded more."""

    deterministic: bool = False
    """Make a run repeatable to the bit, however often it is killed and resumed: each completion has
    random numbers of its own, from ``debug.seed``, its prompt and its number in the group, and the
    servers compute one completion at a time, since the last bits of logits depend on how many are
    computed together. This is slow, and meant for tests and for finding faults. Needs
    ``max_head_offpolicyness = 0``, and servers that the run starts itself (``inference.launch``) of
    kind ``embedded``. Rollouts in flight are not kept beside checkpoints but generated again."""

    overdue: Literal["wait", "drop", "cut", "resume"] = "wait"
    """What happens to overdue groups: those that would be too old for any later batch, and for which
    alone the next batch has to wait. ``wait`` waits for them. ``drop`` gives them up, which favours
    short completions. ``cut`` ends their completions after the segments that are written; such a
    completion counts as truncated (``drop_truncated``) at the length that it has
    (``grpo.overlong_buffer``). ``resume`` replaces them in the batch by other groups and continues
    them under newer weights: the tokens written so far become context that is not trained, and
    completions of the group that were finished are generated again. ``cut`` and ``resume`` need
    ``segment_tokens`` and no ``environment``. Metrics count what is dropped, cut and resumed."""

    min_completion_tokens: Annotated[int, at_least(0)] = 0
    """Number of tokens below which a completion is removed from its group. 0 keeps all."""

    drop_truncated: bool = False
    """Remove completions that were truncated at ``max_new_tokens`` from their group. A group with
    fewer than two completions left is closed, and another takes its place."""

    dynamic_sampling: bool = False
    """Leave out groups in which all rewards are equal and fill the batch with others (DAPO).
    ``grpo.filter_zero_advantage`` leaves them out without filling the batch."""

    dynamic_sampling_limit: Annotated[float, at_least(0)] = 4.0
    """Maximum number of groups that ``dynamic_sampling`` leaves out for one batch, as a multiple of
    ``grpo.prompts_per_step``. Further groups are trained on even if their rewards are equal."""

    should_accept: str | None = None
    """A function of your own that selects completions after scoring, named as in
    ``reward.functions``. It is called as ``should_accept(prompts, completions, rewards,
    **columns)`` and returns one bool for each completion: whether to keep it. None keeps all."""

    max_process_restarts: Annotated[int, at_least(0)] = 3
    """How often the rollout process is started again after it was killed. With 0 the run ends
    instead."""

    longest_first: bool = False
    """Among the prompts of a batch, start those that probably have the longest completions first,
    and spread them over the servers. A small model, which learns during the run, predicts the
    lengths. It does not change which prompts are trained on in which epoch."""

    adaptive_concurrency: bool = True
    """Adapt the number of completions in flight on each server to its load: one more after each
    round in which no request waited on the server, half as many if requests wait or fail. The sum
    never exceeds ``max_concurrent_rollouts``."""

    hedge_seconds: Annotated[float, above(0).or_value(0, "never")] = 0.0
    """If a server has not answered a completion after this time and other servers are idle, a second
    server is asked for the same completion, and the first answer counts."""

    batch_timeout_seconds: Annotated[float, above(0)] = 1800.0
    """Maximum time that the trainer waits for a batch, or for a part of it with ``stream``. After it
    the run ends with an error."""

    max_consecutive_failures: Annotated[int, at_least(1)] = 32
    """The run ends with an error after this many completions in a row have failed, on the servers or
    in their environments."""

    earlier_turns: Literal["as_written", "as_templated"] = "as_written"
    """What the model sees of its earlier turns where an environment answers chat prompts with chat
    messages. ``as_written`` keeps all tokens as the model wrote them, thinking included.
    ``as_templated`` renders the whole conversation with the chat template, as a chat server does.
    Where the template leaves out or changes earlier turns, the next turn begins a training row of
    its own; ``environment/rewritten_contexts`` counts how often. Needs ``environment``."""

    record: str | None = None
    """File to which every trained batch of rollouts is written, for ``replay``. A name that ends in
    ``.gz`` is compressed. A new run refuses a file that already holds batches. A resumed run
    continues its file and cannot start one."""

    replay: str | None = None
    """File written with ``record`` whose batches are trained on, in their order, instead of new
    rollouts. No server and no rollout process is started, no reward is computed and nothing is
    evaluated. The run ends after ``training.steps``, or with the file. Cannot be combined with
    ``record``."""
