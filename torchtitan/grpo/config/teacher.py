# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tables ``[teacher]``, distillation on policy, and ``[sft]``, supervised training."""

from dataclasses import dataclass, field
from typing import Annotated

from torchtitan.grpo.config.bounds import above, at_least
from torchtitan.grpo.types import ServerKind

MAX_TOP_K = 128
"""Largest value of ``teacher.top_k``."""


@dataclass
class Teacher:
    """``[teacher]``: a larger or better trained model that rates each token that the trained model samples.

    The teacher's log-probability minus the student's, times ``coef``, is added to the advantage of
    each trained token; it is an estimate of the negative reverse KL divergence from the sampled
    token. With ``top_k``, the reverse KL divergence over the teacher's most likely tokens is a term
    of the loss instead. Without ``reward.functions``, the run learns only from the teacher.
    docs/how-to/distill.md shows a run.
    """

    urls: list[str] = field(default_factory=list)
    """Base URLs of the servers of the teacher, ``http://host:port``, all with the same weights. If
    it is empty, the run has no teacher. The run does not start these servers, and pushes no weights
    to them."""

    kind: ServerKind = "embedded"
    """Kind of the teacher's servers: ``embedded``, ``vllm`` or ``sglang``. vLLM needs
    ``--enable-scale-out``."""

    model_path: str | None = None
    """Experimental: Directory that contains the teacher's ``tokenizer.json``, or the teacher's
    name on the Hugging Face Hub. With None, it is the directory that the servers report to have
    loaded, if it exists on this machine. Each token id of the trained model must stand for the
    same token in the teacher, and the teacher's vocabulary must not be smaller; otherwise, the
    teacher is refused at the start."""

    coef: Annotated[float, at_least(0)] = 1.0
    """Weight of the teacher's term in the advantage, or in the loss with ``top_k``. It also applies
    to replayed rollouts."""

    top_k: Annotated[int, at_least(0).at_most(MAX_TOP_K)] = 0
    """Number of the teacher's most likely tokens at each position that are compared with the
    student. 0 compares only the sampled token, as part of its advantage. With a value above 0, the
    teacher's term is a separate loss: the reverse KL divergence over these tokens and one more
    outcome for all other tokens. Each completion token then needs 8 bytes times ``top_k`` of memory
    and of messages between processes (256 bytes at 32). Replayed rollouts must have been rated with
    the same number."""

    max_divergence: Annotated[float, above(0).or_value(0, "no bound")] = 0.0
    """Experimental: Bound to which the divergence of a token is clamped, in nats, in both
    directions. Tokens that a confident teacher would not generate have divergences such as 10
    or 30 nats, which make the gradient noisy. With a bound, it is no longer exactly that of the
    reverse KL divergence."""

    max_concurrent_requests: Annotated[int, at_least(1)] = 32
    """Experimental: Maximum number of requests that are sent to each server at once. Rollouts
    of a group share a request of up to 4096 tokens, except with vLLM, where each request has
    one rollout."""

    request_timeout_seconds: Annotated[float, above(0)] = 120.0
    """Experimental: Maximum time for one request. After this time, another request for its
    rollouts is sent to any of the servers."""

    wait_seconds: Annotated[float, at_least(10)] = 600.0
    """Experimental: Time, in seconds, without any response from a teacher after which a group
    that waits for its rating is dropped. The time begins for each group when its rating is
    first requested. The group is counted as unrated, and is never trained on without its
    rating."""

    api_key: str | None = None
    """Key of the teacher's servers. With None, it is read from the environment variable
    ``TORCHTITAN_GRPO_TEACHER_KEY``. The keys of ``[inference]`` are never sent to a teacher."""


@dataclass
class SFT:
    """``[sft]``: supervised training on given completions, instead of on rollouts.

    A run with ``path`` learns to generate these completions. It has no servers, rewards or
    rollouts. Model, layout, optimizer, checkpoints and exports are the same as in any other run,
    and GRPO can start from its export. docs/how-to/supervised-start.md shows both runs.
    """

    path: str | None = None
    """Training examples: a ``.jsonl`` or ``.parquet`` file, or the name or directory of a Hugging
    Face data set (``prompts.name``, ``prompts.split``). With None, the run trains on rollouts."""

    column: str = "prompt"
    """Column that holds the prompt: a string, to which ``prompts.template`` is applied, or a list
    of chat messages, to which the chat template with ``prompts.system_prompt`` and
    ``prompts.chat_template_kwargs`` is applied. If the last message is from the assistant, this is a
    whole conversation, in which each turn of the assistant is learned."""

    completion_column: str = "completion"
    """Column that holds the completion: a string, or a list of messages, in which the assistant's
    are learned. It is not read if ``column`` already contains the completion. A string is tokenized
    separately, as a continuation of the prompt, and an end-of-sequence token is appended unless it
    ends with one."""

    examples_per_step: Annotated[int, at_least(1)] = 32
    """Number of examples in one step, at least ``grpo.num_minibatches``. The loss is the mean
    negative log-likelihood of their completion tokens."""

    max_example_tokens: Annotated[int, at_least(1).or_value(0, "training.seq_len")] = 0
    """Experimental: Maximum length of an example, in tokens, including prompt and completion.
    Longer examples are left out and counted."""

    held_out_path: str | None = None
    """Held-out examples, in the form of ``path``. Their loss is computed before the first step and
    after the last one. With None, no held-out loss is computed."""

    held_out_interval: Annotated[int, at_least(1).or_value(0, "only at the start and the end")] = 0
    """Number of steps between two computations of the held-out loss."""
