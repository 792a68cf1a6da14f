# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[teacher]`` table: distillation on policy."""

from dataclasses import dataclass, field
from typing import Annotated

from torchtitan.grpo.config.bounds import above, at_least
from torchtitan.grpo.types import ServerKind

MAX_TOP_K = 128
"""Largest value of ``teacher.top_k``."""


@dataclass
class Teacher:
    """``[teacher]``: a larger or better trained model that rates each token which the trained one samples.

    Each trained token gets, besides the advantage of its rollout, the teacher's log-probability minus
    the student's, times ``coef``: the reverse KL divergence, estimated at the sampled token. With
    ``top_k`` the divergence over the teacher's most likely tokens is a term of the loss instead. Without
    ``reward.functions`` the teacher is all that the run learns from. docs/how-to/distill.md shows a run.
    """

    urls: list[str] = field(default_factory=list)
    """Base URLs of running servers that serve the teacher, ``http://host:port``, all with the same
    weights. Empty trains without a teacher. Nothing is pushed to them, and the run does not start
    them."""

    kind: ServerKind = "embedded"
    """Kind of these servers: ``embedded``, ``vllm`` or ``sglang``. vLLM needs ``--enable-scale-out``."""

    model_path: str | None = None
    """Directory with the teacher's ``tokenizer.json``, or its name on the Hugging Face Hub. None takes the
    directory that the servers say they have loaded, if it is on this machine. Each token of the
    trained model must be the same token of the teacher, and the teacher's vocabulary must not be
    smaller; another one is refused at the start."""

    coef: Annotated[float, at_least(0)] = 1.0
    """Weight of the teacher's part of the advantage, or of the loss with ``top_k``. It is used for replayed
    rollouts as well."""

    top_k: Annotated[int, at_least(0).at_most(MAX_TOP_K)] = 0
    """Number of the teacher's most likely tokens at each position that the student is compared with. 0
    compares the sampled token alone, as part of its advantage. Above 0 the teacher's part is a loss of
    its own: the reverse KL divergence over these tokens and one more outcome, that it is any other
    token. Each completion token then takes 8 bytes times ``top_k`` of memory and of messages between
    processes (256 bytes at 32). Replayed rollouts must have been rated with the same number."""

    max_divergence: Annotated[float, above(0).or_value(0, "no bound")] = 0.0
    """Bound of a token's divergence, in nats, in either direction. A teacher that is sure of itself gives a
    token that it would not write any divergence, 10 nats as well as 30, and such tokens make the
    gradient noisy. The bound leaves the others' divergence what it is, and the gradient is then no
    longer exactly that of the reverse KL."""

    max_concurrent_requests: Annotated[int, at_least(1)] = 32
    """Maximum number of requests that each server answers at once. Rollouts of a group share a request
    of up to 4096 tokens, except on vLLM, which takes one rollout for each request."""

    request_timeout_seconds: Annotated[float, above(0)] = 120.0
    """Maximum time for one request. After this time its rollouts are rated again, by any of the
    servers."""

    wait_seconds: Annotated[float, at_least(10)] = 600.0
    """Time, in seconds, without any answer of a teacher after which a group that waits for its rating is
    dropped. The time begins for each group when its rating is first requested. The group is counted as
    unrated, and is never trained on without its rating."""

    max_unrated_groups: Annotated[int, at_least(1)] = 16
    """The run ends with an error after this many groups in a row got no rating. Groups that still wait
    are not counted."""

    api_key: str | None = None
    """Key of the servers. None reads the environment variable ``TORCHTITAN_GRPO_TEACHER_KEY``. Keys of
    ``[inference]`` are not sent to a teacher."""
